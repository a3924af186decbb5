"""How a card is cut, as it is drawn: memory slots from left to right, each slice with its state."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from portal.hardware.boards import Board
from portal.hardware.mig import Slice, text_of
from portal.models import HardwareOrder
from portal.services import mig_boards
from portal.services.cells import Cell, mig_of

STEPS = ("waiting", "sent", "running", "done")


@dataclass(frozen=True)
class Block:
    """`begin` and `end` are lines of a grid that has a column per memory slot. Without a profile: nothing is there."""

    begin: int
    end: int
    profile: str = ""
    state: str = ""  # of the slice; planned ones: kept | created
    cell: Cell | None = None
    whole: bool = False  # the card itself, with MIG off


@dataclass(frozen=True)
class MigCard:
    cell: Cell
    board: Board
    blocks: list[Block]
    order: HardwareOrder | None = None  # that is not finished

    @property
    def enabled(self) -> bool:
        return self.cell.gpu.mig_enabled

    @property
    def pending(self) -> bool:
        """What the driver will do after the next reset differs from what it does."""
        told = mig_of(self.cell.gpu)
        return bool(told) and bool(told.get("pending")) != bool(told.get("enabled"))

    @property
    def layout_text(self) -> str:
        """As one writes it: 2g.20gb + 2 × 1g.10gb."""
        return text_of(block.profile for block in self.blocks if block.profile)

    @property
    def step(self) -> int:
        """How far the open order has come: 1 drains, 2 is sent, 3 is carried out, 4 is done."""
        return STEPS.index(self.order.state) + 1 if self.order and self.order.state in STEPS else 0


def mig_cards(cells: Iterable[Cell], orders: Iterable[HardwareOrder]) -> list[MigCard]:
    """Of the cards that can be cut, by the tables of boards or by what the driver says."""
    waiting = {order.gpu_id: order for order in orders if order.kind == "mig" and order.finished_at is None}
    found = []
    for cell in cells:
        board = mig_boards.find_board(cell.gpu)
        if board is not None:
            found.append(MigCard(cell, board, present_blocks(cell, board), waiting.get(cell.gpu.pk)))
    return found


def present_blocks(cell: Cell, board: Board) -> list[Block]:
    if not cell.split:
        return [Block(1, board.slots + 1, "", cell.state, cell, whole=True)]
    known = {one.gpu.uuid: one for one in cell.slices}
    blocks = []
    for one in mig_of(cell.gpu).get("instances") or []:
        begin = int(one.get("start") or 0) + 1
        part = known.get(str(one.get("uuid")))
        state = part.state if part else "suspect"
        blocks.append(Block(begin, begin + int(one.get("size") or 1), str(one.get("profile") or ""), state, part))
    return with_gaps(blocks, board)


def planned_blocks(board: Board, layout: Sequence[Slice], kept: Iterable[Slice]) -> list[Block]:
    if not layout:
        return [Block(1, board.slots + 1, whole=True)]
    stays = set(kept)
    blocks = [
        Block(one.start + 1, one.start + 1 + board.by_name[one.profile].size, one.profile,
              "kept" if one in stays else "created")
        for one in layout
    ]
    return with_gaps(blocks, board)


def with_gaps(blocks: list[Block], board: Board) -> list[Block]:
    """What no slice covers is a block without a profile."""
    drawn, line = [], 1
    for block in sorted(blocks, key=lambda one: one.begin):
        if block.begin > line:
            drawn.append(Block(line, block.begin))
        drawn.append(block)
        line = max(line, block.end)
    return drawn if line > board.slots else [*drawn, Block(line, board.slots + 1)]
