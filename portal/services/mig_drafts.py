"""A wished layout of a card before anyone applies it: how it would be cut, what is lost, who is in the way."""

from dataclasses import dataclass, field

from portal.hardware.mig import Illegal, Near, text_of
from portal.models import User
from portal.services import mig
from portal.services.blockers import Blocker
from portal.services.errors import Problem
from portal.services.mig import MigPlan
from portal.services.mig_cards import Block, MigCard, planned_blocks


@dataclass(frozen=True)
class Draft:
    """`refusal`: the card cannot be cut so, `nearest` is what it can; without these the wish is not understood yet."""

    card: MigCard
    plan: MigPlan | None = None
    blocks: list[Block] = field(default_factory=list)
    refusal: str = ""
    nearest: tuple[Near, ...] = ()

    @property
    def busy(self) -> bool:
        """Another change of the card is under way."""
        return self.card.order is not None

    @property
    def lost(self) -> str:
        """2 × 1g.10gb: what will be gone."""
        gone = self.plan.destroyed if self.plan else ()
        return text_of(piece.profile for piece in gone) if gone else ""

    @property
    def blockers(self) -> list[tuple[Blocker, str]]:
        """Each with what it is on."""
        places = {part.gpu.uuid: part.label for part in self.card.cell.slices}
        whole = self.card.cell.label
        return [(one, places.get(one.slice_uuid or "", whole)) for one in (self.plan.blockers if self.plan else ())]

    @property
    def room(self) -> list[tuple[str, int]]:
        return list(self.plan.room.items()) if self.plan else []

    @property
    def warning(self) -> str:
        """Names what is lost, for the question before it is done."""
        lost = f"{self.lost} will be gone. " if self.lost else "No slice is removed. "
        wait = "It waits until nothing holds the GPU; nothing is stopped. " if self.blockers else ""
        return f"{lost}{wait}The GPU gets no new job until the change is done. Its neighbours are not touched."


def draft(card: MigCard, text: str, viewer: User) -> Draft:
    try:
        plan = mig.plan(card.cell.gpu, text, viewer=viewer)
    except Problem as problem:
        why = problem.__cause__
        if isinstance(why, Illegal):
            return Draft(card, refusal=sentence(why.reason), nearest=why.nearest)
        return Draft(card, refusal=sentence(problem.errors[0]["message"] if problem.errors else problem.detail))
    return Draft(card, plan, planned_blocks(plan.board, plan.layout, plan.kept))


def sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
