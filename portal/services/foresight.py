"""What would happen to a request that is still being written. Nothing is stored."""

from dataclasses import dataclass

from portal.models import Gpu
from portal.scheduler.decisions import Placement, Start
from portal.services import capacity, scheduling
from portal.services.job_details import link_kinds
from portal.services.specs import JobSpec


@dataclass(frozen=True)
class Place:
    node: str
    gpus: tuple[int, ...]  # by index, as people count them
    model: str
    links: str


@dataclass(frozen=True)
class Prospect:
    starts: bool
    never: bool
    sentence: str
    places: tuple[Place, ...] = ()


@dataclass(frozen=True)
class ModelStock:
    name: str
    free: int
    total: int


def would_start(spec: JobSpec) -> Prospect:
    """The scheduler's own answer for this request, behind all who wait already."""
    decision = scheduling.would_start(spec)
    if isinstance(decision, Start):
        return Prospect(True, False, "", tuple(place(placement) for placement in decision.placements))
    return Prospect(False, decision.code == "never_fits", decision.message)


def free_by_model() -> list[ModelStock]:
    """GPU models of the cluster with what of them is free now, on nodes that take work. Slices are not counted."""
    stock: dict[str, list[int]] = {}
    for node in capacity.node_views():
        for gpu in (whole for whole in node.gpus if not whole.mig):
            counts = stock.setdefault(gpu.model, [0, 0])
            counts[0] += gpu.free and gpu.healthy and not node.unavailable
            counts[1] += 1
    return [ModelStock(name, free, total) for name, (free, total) in sorted(stock.items())]


def place(placement: Placement) -> Place:
    gpus = list(Gpu.objects.filter(uuid__in=placement.gpus).select_related("node").order_by("index"))
    models = dict.fromkeys(gpu.model for gpu in gpus)
    links = link_kinds(set(placement.gpus), gpus[0].node.links) if gpus else ""
    return Place(placement.node, tuple(gpu.index for gpu in gpus), ", ".join(models), links)
