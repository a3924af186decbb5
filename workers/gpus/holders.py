"""Which processes of this machine hold which simulated GPUs, by what their environment gave them."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePath

from workers.gpus import procfs

VISIBLE = "CUDA_VISIBLE_DEVICES"
ROCR_VISIBLE = "ROCR_VISIBLE_DEVICES"
ATTEMPT = "GPUYARD_ATTEMPT_ID"
YOUNG_LOOKS, STRANGERS_EVERY = 10, 10
"""A process may become another by exec, most do so when they are young. Later it is read at every tenth look."""

LAUNCHER_WORDS = frozenset({"torchrun", "torch.distributed.run", "torch.distributed.launch"})


@dataclass(frozen=True, slots=True)
class Holder:
    pid: int
    uuids: tuple[str, ...]
    stat: procfs.Stat
    team: str = ""  # what works together: an attempt, or the children of one process


@dataclass(frozen=True, slots=True)
class Candidate:
    pid: int
    visible: tuple[str, ...]
    local_rank: int | None
    stat: procfs.Stat
    attempt: str | None = None

    def team(self) -> str:
        return self.attempt or f"{self.stat.parent if self.local_rank is not None else -self.pid}"

    def devices(self) -> tuple[str, ...]:
        """A rank opens the GPU of its local rank, or the only one it sees; any other process opens all of them."""
        if self.local_rank is None:
            return self.visible
        if self.local_rank < len(self.visible):
            return self.visible[self.local_rank:self.local_rank + 1]
        return self.visible if len(self.visible) == 1 else ()


class Scanner:
    """Looks at the processes again and again. Those that hold nothing are not read each time.

    `variable` is the one in which the maker's software reads what it may see.
    """

    def __init__(self, variable: str = VISIBLE) -> None:
        self._variable = variable
        self._uuids: frozenset[str] = frozenset()
        self._strangers: dict[int, tuple[int, int]] = {}  # pid -> its inode, looks at it
        self._turn = 0

    def __call__(self, uuids: frozenset[str]) -> list[Holder]:
        if uuids != self._uuids:
            self._uuids, self._strangers = uuids, {}
        self._turn += 1
        before, self._strangers = self._strangers, {}
        found = []
        for pid, inode in procfs.entries():
            known, looks = before.get(pid, (0, 0))
            if known == inode and looks >= YOUNG_LOOKS and (pid + self._turn) % STRANGERS_EVERY:
                self._strangers[pid] = (inode, looks)
            elif one := candidate(pid, uuids, self._variable):
                found.append(one)
            else:
                self._strangers[pid] = (inode, looks + 1 if known == inode else 1)
        return holders_among(found, uuids)


def scan(uuids: frozenset[str], variable: str = VISIBLE) -> list[Holder]:
    """One look at every process."""
    return Scanner(variable)(uuids)


def holders_among(candidates: list[Candidate], uuids: frozenset[str]) -> list[Holder]:
    above_ranks = ancestors_of_ranks({one.pid: one for one in candidates})
    return [
        Holder(one.pid, held, one.stat, one.team())
        for one in candidates
        if not (one.local_rank is None and (one.pid in above_ranks or is_launcher(one.pid)))
        and (held := tuple(uuid for uuid in one.devices() if uuid in uuids))
    ]


def candidate(pid: int, uuids: frozenset[str], variable: str = VISIBLE) -> Candidate | None:
    environment = procfs.environment(pid)
    if not environment or f"{variable}=".encode() not in environment:
        return None
    visible = tuple(word.strip() for word in (procfs.variable(environment, variable) or "").split(","))
    if uuids.isdisjoint(visible):
        return None
    rank = procfs.variable(environment, "LOCAL_RANK")
    stat = procfs.stat(pid)
    if stat is None:
        return None
    attempt = procfs.variable(environment, ATTEMPT)
    return Candidate(pid, visible, int(rank) if rank and rank.isdecimal() else None, stat, attempt)


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
