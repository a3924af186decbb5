"""One scheduling cycle: a snapshot in, decisions out. No clock, no randomness, nothing is touched.

Gang FIFO: a job gets all its GPUs or none. A job that waits claims every GPU that it could use, so later jobs take only
what it could not. A job that fits no machine, or no machine that is there now, claims nothing and blocks nobody.
"""

from dataclasses import replace
from datetime import UTC, datetime

from portal.scheduler import wording
from portal.scheduler.decisions import Decision, Hold, Placement, Start
from portal.scheduler.placement import claimable, place
from portal.scheduler.snapshot import GpuView, JobRequest, Needs, NodeView, Snapshot


def decide(snapshot: Snapshot, now: float) -> list[Decision]:
    """-> one decision per job, in the order of the queue."""
    ground = Ground(snapshot.nodes)
    return [ground.decide(job, now) for job in snapshot.jobs]


def why_never(needs: Needs, nodes: tuple[NodeView, ...]) -> tuple[str, str] | None:
    """-> (field, sentence) if not even the empty cluster could host this, else None."""
    if needs.gpus == 0 or place(needs, nodes, {node.name: node.gpus for node in nodes}) is not None:
        return None
    return wording.impossible(needs, nodes)


class Ground:
    """What is left to give away, while one cycle goes down the queue."""

    def __init__(self, nodes: tuple[NodeView, ...]) -> None:
        self.nodes = tuple(sorted(nodes, key=lambda node: node.name))
        self.ready = tuple(node for node in self.nodes if not node.unavailable)
        self.healthy = {node.name: [gpu for gpu in node.gpus if gpu.healthy] for node in self.ready}
        self.open = {name: [gpu for gpu in gpus if gpu.free] for name, gpus in self.healthy.items()}
        self.claims: dict[str, JobRequest] = {}  # GPU -> who waits for it first
        self.waiters: dict[int, JobRequest] = {}  # in the order of the queue
        self.full_for: set[Needs] = set()
        self.holds: dict[Needs, tuple[str, str]] = {}  # the same answer for every job of equal needs

    def decide(self, job: JobRequest, now: float) -> Decision:
        if job.not_before is not None and now < job.not_before:
            at = datetime.fromtimestamp(job.not_before, UTC)
            return Hold(job.id, "wait_retry", f"The next try starts at {at:%H:%M:%S} UTC.")
        if job.needs not in self.full_for:
            placements = place(job.needs, self.ready, self.open)
            if placements is not None:
                self.take(placements)
                return Start(job.id, placements)
            self.full_for.add(job.needs)  # what is left only shrinks within a cycle
        return self.hold(job)

    def take(self, placements: tuple[Placement, ...]) -> None:
        for placement in placements:
            taken = set(placement.gpus)
            self.open[placement.node] = [gpu for gpu in self.open[placement.node] if gpu.uuid not in taken]
        if not placements[0].gpus:
            names = {placement.node for placement in placements}
            self.ready = tuple(
                replace(node, busy_shares=node.busy_shares + 1) if node.name in names else node for node in self.ready
            )

    def hold(self, job: JobRequest) -> Hold:
        if job.needs not in self.holds:
            first, self.holds[job.needs] = self.explain(job)
            return Hold(job.id, *first)
        return Hold(job.id, *self.holds[job.needs])

    def explain(self, job: JobRequest) -> tuple[tuple[str, str], tuple[str, str]]:
        """-> (code, sentence) for this job, and for those of equal needs after it."""
        impossible = why_never(job.needs, self.nodes)
        if impossible is not None:
            return same(("never_fits", f"Can never start: {impossible[1]}"))
        claimed = claimable(job.needs, self.ready, self.healthy)
        if not claimed:
            every = {node.name: node.gpus for node in self.nodes}
            return same(("wait_node", wording.node_needed(job.needs, self.nodes, every)))
        first = self.claimant(claimed)
        own = ("wait_gpus", wording.waiting(job.needs, self.ready, self.open))
        self.claim(job, claimed)
        if first is not None:
            return same(("wait_behind", wording.behind(first.id, first.needs)))
        return own, ("wait_behind", wording.behind(job.id, job.needs))

    def claimant(self, gpus: list[GpuView]) -> JobRequest | None:
        """The job furthest ahead in the queue that waits for one of these GPUs."""
        holders = {job.id: job for gpu in gpus if (job := self.claims.get(gpu.uuid)) is not None}
        return next((job for job_id, job in self.waiters.items() if job_id in holders), None)

    def claim(self, job: JobRequest, gpus: list[GpuView]) -> None:
        claimed = {gpu.uuid for gpu in gpus}
        self.waiters[job.id] = job
        for uuid in claimed:
            self.claims.setdefault(uuid, job)
        for name, left in self.open.items():
            self.open[name] = [gpu for gpu in left if gpu.uuid not in claimed]


def same(answer: tuple[str, str]) -> tuple[tuple[str, str], tuple[str, str]]:
    return answer, answer
