"""What a scheduling cycle looks at: plain values, so that it can be saved, replayed and made up in tests."""

from dataclasses import dataclass, field
from functools import cached_property

from portal.scheduler.families import matches

LINKS = ("any", "nvlink", "pcie-switch")


@dataclass(frozen=True)
class JobRequest:
    """What a waiting job asks for. `gpus` is the whole of it, spread evenly over its nodes."""

    id: int
    gpus: int
    models: tuple[str, ...] = ()  # none: any
    memory_bytes: int | None = None  # at least, per GPU
    link: str = "any"
    nodes_min: int = 1
    nodes_max: int = 1
    not_before: float | None = None  # a retry waits a while
    mig: str = ""  # a slice of this profile, not a whole GPU

    @cached_property
    def needs(self) -> "Needs":
        return Needs(self.gpus, self.models, self.memory_bytes, self.link, self.nodes_min, self.nodes_max, self.mig)


@dataclass(frozen=True)
class Needs:
    """The request without whose it is: what fits one job fits every job with equal needs."""

    gpus: int
    models: tuple[str, ...]
    memory_bytes: int | None
    link: str
    nodes_min: int
    nodes_max: int
    mig: str = ""

    def splits(self) -> list[tuple[int, int]]:
        """-> (nodes, GPUs on each), fewest nodes first."""
        counts = range(self.nodes_min, self.nodes_max + 1)
        return [(nodes, self.gpus // nodes) for nodes in counts if self.gpus % nodes == 0]

    def accepts(self, gpu: "GpuView") -> bool:
        if self.mig != gpu.mig:
            return False
        if self.memory_bytes is not None and (gpu.memory_bytes or 0) < self.memory_bytes:
            return False
        return not self.models or any(matches(wish, gpu.name) for wish in self.models)

    def rank_of(self, name: str) -> int:
        """Earlier wishes are preferred."""
        return next((rank for rank, wish in enumerate(self.models) if matches(wish, name)), len(self.models))


@dataclass(frozen=True)
class GpuView:
    uuid: str
    index: int
    name: str  # as the driver says
    model: str  # its family
    memory_bytes: int | None = None
    free: bool = True
    healthy: bool = True
    mig: str = ""  # profile, of a slice
    trouble: str = ""  # what is wrong with it, in a word


@dataclass(frozen=True)
class NodeView:
    name: str
    gpus: tuple[GpuView, ...] = ()
    links: tuple[tuple[str, str, str], ...] = ()  # uuid, uuid, kind
    nvswitch: bool = False
    unavailable: str = ""  # why it gets no new work: "cordoned", "unreachable"
    busy_shares: int = 0  # attempts that have a part of theirs here

    @cached_property
    def kinds(self) -> dict[frozenset[str], str]:
        return {frozenset((a, b)): kind for a, b, kind in self.links}

    def kind(self, a: str, b: str) -> str:
        return self.kinds.get(frozenset((a, b)), "NV" if self.nvswitch else "")


@dataclass(frozen=True)
class Snapshot:
    """`jobs` in the order of the queue."""

    jobs: tuple[JobRequest, ...] = field(default=())
    nodes: tuple[NodeView, ...] = field(default=())
