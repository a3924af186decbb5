"""A wished layout of a card before anyone applies it: how it would be cut, what is lost, who is in the way."""

from dataclasses import dataclass, field

from portal.hardware import mig
from portal.hardware.boards import Board
from portal.hardware.mig import Near, Slice
from portal.services.cells import Cell, mig_of
from portal.services.mig_cards import Block, MigCard, planned_blocks


@dataclass(frozen=True)
class Draft:
    """`illegal`: the card cannot be cut so, `nearest` is what it can. `unreadable`: the wish is not understood yet."""

    board: Board
    uuid: str
    index: int
    wanted: str = ""
    unreadable: str = ""
    illegal: str = ""
    nearest: tuple[Near, ...] = ()
    blocks: list[Block] = field(default_factory=list)
    room: list[tuple[str, int]] = field(default_factory=list)
    changes: bool = False
    lost: str = ""
    blockers: list[str] = field(default_factory=list)
    busy: bool = False  # another change is under way

    @property
    def warning(self) -> str:
        lost = f"{self.lost} will be gone. " if self.lost else ""
        wait = "It waits until nothing holds the GPU; nothing is stopped. " if self.blockers else ""
        return f"{lost}{wait}The GPU gets no new job until the change is done. Its neighbours are not touched."


def draft(card: MigCard, text: str) -> Draft:
    board, gpu = card.board, card.cell.gpu
    try:
        wish = mig.read(board, text)
        plan = mig.plan(board, wish, existing(card.cell))
    except mig.Unreadable as error:
        return Draft(board, gpu.uuid, gpu.index, unreadable=sentence(str(error)))
    except mig.Illegal as error:
        return Draft(board, gpu.uuid, gpu.index, illegal=sentence(error.reason), nearest=error.nearest)
    return Draft(
        board, gpu.uuid, gpu.index, mig.text_of(wish),
        blocks=planned_blocks(board, plan.layout, plan.kept),
        room=sorted(mig.room(board, plan.layout).items(), key=lambda item: list(board.by_name).index(item[0])),
        changes=plan.changes or bool(wish) != card.enabled,
        lost=mig.text_of(one.profile for one in plan.destroyed) if plan.destroyed else "",
        blockers=blockers(card.cell),
        busy=card.order is not None,
    )


def existing(cell: Cell) -> list[Slice]:
    told = mig_of(cell.gpu).get("instances") or []
    return [Slice(int(one.get("start") or 0), str(one.get("profile"))) for one in told]


def blockers(cell: Cell) -> list[str]:
    """Whoever holds the card or a slice of it, and processes that no job explains."""
    said = []
    for part in cell.parts:
        if part.holder:
            job = f"#{part.holder.job_id} {part.holder.job_name} ({part.holder.owner})" if part.holder.job_id else ""
            said.append(f"In the way: {job or 'a job of ' + part.holder.owner} holds {part.label}.")
    rows = [raw for one in [cell, *cell.slices] for raw in one.processes or [] if not raw.get("attempt")]
    for pid, raw in {raw.get("pid"): raw for raw in rows}.items():
        said.append(f"In the way: process {pid} of {raw.get('user') or 'an unknown user'}, not from gpuyard.")
    return said


def sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
