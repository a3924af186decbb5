"""Which processes of this machine hold which simulated GPUs, by what they were given in CUDA_VISIBLE_DEVICES."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePath

from workers.gpus import procfs

VISIBLE = "CUDA_VISIBLE_DEVICES"
LAUNCHER_WORDS = frozenset({"torchrun", "torch.distributed.run", "torch.distributed.launch"})


@dataclass(frozen=True, slots=True)
class Holder:
    pid: int
    uuids: tuple[str, ...]
    stat: procfs.Stat


@dataclass(frozen=True, slots=True)
class Candidate:
    pid: int
    visible: tuple[str, ...]
    local_rank: int | None
    stat: procfs.Stat

    def devices(self) -> tuple[str, ...]:
        """A rank opens the GPU of its local rank, or the only one it sees; any other process opens all of them."""
        if self.local_rank is None:
            return self.visible
        if self.local_rank < len(self.visible):
            return self.visible[self.local_rank:self.local_rank + 1]
        return self.visible if len(self.visible) == 1 else ()


def scan(uuids: frozenset[str]) -> list[Holder]:
    candidates = [found for pid in procfs.pids() if (found := candidate(pid, uuids))]
    above_ranks = ancestors_of_ranks({one.pid: one for one in candidates})
    return [
        Holder(one.pid, held, one.stat)
        for one in candidates
        if not (one.local_rank is None and (one.pid in above_ranks or is_launcher(one.pid)))
        and (held := tuple(uuid for uuid in one.devices() if uuid in uuids))
    ]


def candidate(pid: int, uuids: frozenset[str]) -> Candidate | None:
    environment = procfs.environment(pid)
    if not environment or b"CUDA_VISIBLE_DEVICES=" not in environment:
        return None
    visible = tuple(word.strip() for word in (procfs.variable(environment, VISIBLE) or "").split(","))
    if uuids.isdisjoint(visible):
        return None
    rank = procfs.variable(environment, "LOCAL_RANK")
    stat = procfs.stat(pid)
    if stat is None:
        return None
    return Candidate(pid, visible, int(rank) if rank and rank.isdecimal() else None, stat)


def ancestors_of_ranks(candidates: dict[int, Candidate]) -> set[int]:
    """Shells and launchers above ranks were given the GPUs only to pass them on."""
    above: set[int] = set()
    for one in candidates.values():
        if one.local_rank is not None:
            above.update(ancestors(one, candidates))
    return above


def ancestors(one: Candidate, candidates: dict[int, Candidate]) -> Iterable[int]:
    seen: set[int] = set()
    parent = one.stat.parent
    while parent in candidates and parent not in seen:
        seen.add(parent)
        parent = candidates[parent].stat.parent
    return seen


def is_launcher(pid: int) -> bool:
    """A launcher whose ranks have not started yet."""
    return any(PurePath(word).name in LAUNCHER_WORDS for word in procfs.arguments(pid)[:8])
