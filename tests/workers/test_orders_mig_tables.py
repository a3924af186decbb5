"""Every layout that the portal plans is one that a node can be cut into: its tables against the driver."""

import random

import pytest
from desk import Make, SetDesk, make_desk

from portal.hardware import boards, mig
from portal.hardware.boards import Board
from wire.hardware import MigOrder, MigSlice, MigStatus
from workers.gpus.boards import CATALOGUE, MIB

__all__ = ["make_desk"]

BOARDS = {
    found: topology
    for topology, entry in sorted(CATALOGUE.topologies.items())
    if not entry.mig and (board := CATALOGUE.boards[entry.board]).mig
    and (found := boards.find(board.name, board.memory_mib * MIB))
}  # fmt: skip
every_board = pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.name)


def status(desk: SetDesk) -> MigStatus:
    desk.gpus = desk.driver.enumerate()
    found = desk.hardware(0).mig
    assert found is not None
    return found


def places(desk: SetDesk) -> dict[mig.Slice, str]:
    return {mig.Slice(one.start, one.profile): one.uuid for one in status(desk).instances}


def cut(desk: SetDesk, layout: mig.Layout) -> None:
    pieces = [MigSlice(piece.profile, piece.start) for piece in layout]
    desk.driver.set_mig(MigOrder(id="o", gpu_uuid=desk.uuid(0), layout=pieces))


def test_every_board_of_the_tables_can_be_simulated() -> None:
    assert {board.name for board in BOARDS} == {known.board.name for known in boards.TABLES}


@every_board
def test_the_driver_offers_what_the_tables_say(make_desk: Make, board: Board) -> None:
    desk = make_desk(BOARDS[board])
    smallest = board.profiles[0].name
    cut(desk, mig.plan(board, [smallest]).layout)
    profiles = status(desk).profiles
    offered = {one.name: (one.slices, one.size, tuple(one.placements), one.instances_max) for one in profiles}
    tabled = {one.name: (one.slices, one.size, one.starts, one.most) for one in board.profiles}
    assert offered == tabled


@every_board
def test_every_legal_layout_is_planned_and_carried_out_one_after_the_other(make_desk: Make, board: Board) -> None:
    desk = make_desk(BOARDS[board])
    wishes = [*mig.legal(board), ()]
    random.Random(7).shuffle(wishes)
    before: dict[mig.Slice, str] = {}
    for wish in wishes:
        planned = mig.plan(board, wish, list(before))
        cut(desk, planned.layout)
        after = places(desk)
        assert set(after) == set(planned.layout), wish
        listed = sorted(info.mig_profile or "" for info in desk.gpus.infos if info.parent_uuid == desk.uuid(0))
        assert listed == sorted(wish), "each slice has the whole of its place"
        assert all(after[piece] == before[piece] for piece in planned.kept), "what is kept is the same slice"
        before = after
