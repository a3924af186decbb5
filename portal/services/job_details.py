"""What the page of one job shows: ranks, timeline, allocation. Read only, in a fixed number of queries."""

from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from django.utils import timezone

from portal.models import Allocation, Attempt, Event, Gpu, Job, LogStream, Share, User
from portal.services.endings import first_failing
from portal.services.job_lists import asked_models, counted
from portal.services.spec_values import duration_s

EVENTS_SHOWN = 60
METRICS = ("utilization_percent", "memory_used_bytes", "power_mw")


@dataclass(frozen=True)
class RankView:
    """A rank with one of its GPUs. A script is one rank with all GPUs of its node: further ones are not `leading`."""

    rank: int
    node: str
    state: str
    color: int = 1  # 1…8, one per node
    gpu_index: int | None = None
    gpu_uuid: str = ""
    latest: dict[str, Any] = field(default_factory=dict)
    memory_total_bytes: int | None = None
    power_limit_mw: int | None = None
    exit_code: int | None = None
    signal: int | None = None
    message: str = ""
    ended_at: float | None = None
    log_bytes: int | None = None
    last_output_at: datetime | None = None
    first_to_fail: bool = False
    leading: bool = True

    @property
    def utilization_percent(self) -> float | None:
        return self.latest.get("utilization_percent")

    @property
    def memory_used_bytes(self) -> int | None:
        return self.latest.get("memory_used_bytes")

    @property
    def power_mw(self) -> int | None:
        return self.latest.get("power_mw")

    @property
    def missing(self) -> dict[str, str]:
        """Metric -> why there is no value."""
        reasons = self.latest.get("missing") or {}
        return {name: str(reasons.get(name, "no reading yet")).replace("_", " ") for name in METRICS}


@dataclass(frozen=True)
class Bar:
    """A stretch of an attempt's life on the timeline. `weight` is its share of the whole line."""

    kind: str  # before, waiting, starting, running
    weight: float
    seconds: float
    open: bool = False

    @property
    def exact(self) -> str:
        """Short stretches with a tenth: most of what happens before a run is over in less than a second."""
        return f"{self.seconds:.1f} s" if self.seconds < 10 else ""


@dataclass(frozen=True)
class AttemptLine:
    attempt: Attempt | None
    bars: list[Bar]


@dataclass(frozen=True)
class NodeShare:
    node: str
    color: int
    simulated: bool
    first_rank: int
    last_rank: int
    gpus: list[Gpu]
    links: str


@dataclass(frozen=True)
class JobDetail:
    job: Job
    attempt: Attempt | None
    attempt_count: int
    ranks: list[RankView]
    lines: list[AttemptLine]
    shares: list[NodeShare]
    streams: list[LogStream]
    mine: bool

    @property
    def failing(self) -> RankView | None:
        return next((rank for rank in self.ranks if rank.first_to_fail), None)

    @property
    def models(self) -> str:
        return counted(gpu.model for share in self.shares for gpu in share.gpus)

    @property
    def asked(self) -> str:
        return asked_models(self.job)

    @property
    def asked_ranks(self) -> int:
        """Exact once it has its place; until then what the request says."""
        if self.ranks:
            return sum(1 for rank in self.ranks if rank.leading)
        return 1 if self.job.spec.get("launcher", "script") == "script" else max(1, self.job.gpu_count)

    @property
    def held(self) -> bool:
        return self.attempt is not None and not self.attempt.has_ended

    @property
    def time_limit_s(self) -> int | None:
        limit = self.job.spec.get("time_limit")
        return duration_s(limit) if limit is not None else None

    @property
    def last_error(self) -> str:
        """The last line of the rank that failed first, if the sentence above it does not say it already."""
        line = (self.failing.message if self.failing else "") or (self.attempt.message if self.attempt else "")
        return "" if line in self.job.end_message else line

    @property
    def layout(self) -> str:
        degrees = self.job.spec.get("layout") or {}
        return " · ".join(f"{name} {size}" for name, size in degrees.items() if size)

    @property
    def source(self) -> str:
        return str((self.job.spec.get("source") or {}).get("path") or "")

    @property
    def log_bytes(self) -> int:
        return sum(stream.size_bytes for stream in self.streams)


def detail(user: User, job: Job) -> JobDetail:
    attempts = list(job.attempts.order_by("number"))
    attempt = attempts[-1] if attempts else None
    shares = list(attempt.shares.select_related("node").order_by("node_rank")) if attempt else []
    allocations = list(attempt.allocations.select_related("gpu", "gpu__node").order_by("rank")) if attempt else []
    streams = sorted(attempt.log_streams.all(), key=stream_order) if attempt else []
    return JobDetail(
        job=job,
        attempt=attempt,
        attempt_count=len(attempts),
        ranks=rank_views(shares, allocations, streams),
        lines=timeline(job, attempts, timezone.now()),
        shares=[node_share(share, allocations, color_of(number)) for number, share in enumerate(shares)],
        streams=streams,
        mine=job.owner_id == user.pk,
    )


def events(job: Job) -> list[Event]:
    """The newest ones, newest first."""
    told = job.events.exclude(kind="share.state", node__isnull=False) if one_node(job) else job.events
    return list(told.select_related("actor", "node", "gpu").order_by("-id")[:EVENTS_SHOWN])


# --- helpers ----------------------------------------------------------------------------------------------------------


def one_node(job: Job) -> bool:
    """What its only node reports is what the attempt's own events say again."""
    return not Share.objects.filter(attempt__job=job, node_rank__gt=0).exists()


def color_of(number: int) -> int:
    return number % 8 + 1


def stream_order(stream: LogStream) -> tuple[int, int]:
    """Ranks in order, the launcher's own output last."""
    tail = stream.name.removeprefix("rank-")
    return (0, int(tail)) if tail.isdigit() else (1, 0)


def rank_views(shares: list[Share], allocations: list[Allocation], streams: list[LogStream]) -> list[RankView]:
    held: dict[int, list[Gpu | None]] = {}
    for allocation in allocations:
        held.setdefault(allocation.rank, []).append(allocation.gpu)
    logs = {stream.name: stream for stream in streams}
    first = first_to_fail(shares)
    return [
        replace(
            rank_view(share, rank, gpu, logs.get(f"rank-{rank}"), rank == first),
            color=color_of(number), leading=nth == 0,
        )
        for number, share in enumerate(shares)
        for rank in range(share.first_rank, share.first_rank + share.rank_count)
        for nth, gpu in enumerate(held.get(rank, [None]))
    ]


def rank_view(share: Share, rank: int, gpu: Gpu | None, log: LogStream | None, first: bool) -> RankView:
    ended: dict[str, Any] = next((entry for entry in share.ranks if entry.get("rank") == rank), {})
    return RankView(
        rank=rank,
        node=share.node.name,
        state=rank_state(share, ended, first),
        gpu_index=gpu.index if gpu else None,
        gpu_uuid=gpu.uuid if gpu else "",
        latest=(gpu.latest or {}) if gpu else {},
        memory_total_bytes=gpu.memory_total_bytes if gpu else None,
        power_limit_mw=gpu.power_limit_mw if gpu else None,
        exit_code=ended.get("exit_code"),
        signal=ended.get("signal"),
        message=ended.get("message") or "",
        ended_at=ended.get("ended_at"),
        log_bytes=log.size_bytes if log else None,
        last_output_at=log.updated_at if log and log.size_bytes else None,
        first_to_fail=first,
    )


def rank_state(share: Share, ended: dict[str, Any], first: bool) -> str:
    """A rank that was ended by SIGTERM, or has no status at all, did not fail by itself."""
    if not ended:
        return share.state
    if ended.get("exit_code") == 0:
        return "succeeded"
    by_itself = first or (ended.get("exit_code") or 0) > 0 or ended.get("signal") not in (None, 15)
    return "failed" if by_itself else "stopped"


def first_to_fail(shares: list[Share]) -> int | None:
    """The rank that went down first, if it went down by itself."""
    first = first_failing(entry for share in shares if share.state == "failed" for entry in share.ranks)
    return first["rank"] if first else None


def node_share(share: Share, allocations: list[Allocation], color: int) -> NodeShare:
    gpus = [allocation.gpu for allocation in allocations if allocation.gpu.node_id == share.node_id]
    return NodeShare(
        node=share.node.name,
        color=color,
        simulated=share.node.simulated,
        first_rank=share.first_rank,
        last_rank=share.first_rank + share.rank_count - 1,
        gpus=gpus,
        links=link_kinds({gpu.uuid for gpu in gpus}, share.node.links),
    )


def link_kinds(uuids: set[str], links: list[list[str]]) -> str:
    """The kinds of link among these GPUs, most frequent first: "NV18", "NV4, SYS"."""
    counts: dict[str, int] = {}
    for a, b, kind in links:
        if a in uuids and b in uuids:
            counts[kind] = counts.get(kind, 0) + 1
    return ", ".join(sorted(counts, key=lambda kind: (-counts[kind], kind)))


def timeline(job: Job, attempts: list[Attempt], now: datetime) -> list[AttemptLine]:
    """A line per attempt, all on one scale from the submit to the end (or to now)."""
    end = job.ended_at or now
    whole_s = max((end - job.submitted_at).total_seconds(), 0.001)
    if not attempts:
        return [AttemptLine(None, [Bar("waiting", 100, whole_s, open=not job.has_ended)])]
    lines, waited_from = [], job.submitted_at
    for attempt in attempts:
        lines.append(AttemptLine(attempt, bars_of(attempt, job.submitted_at, waited_from, end, whole_s)))
        waited_from = attempt.ended_at or end
    return lines


def bars_of(
    attempt: Attempt, origin: datetime, waited_from: datetime, end: datetime, whole_s: float
) -> list[Bar]:
    stop = attempt.ended_at or end
    started = attempt.started_at or stop
    marks = [
        ("before", origin, waited_from), ("waiting", waited_from, attempt.created_at),
        ("starting", attempt.created_at, started), ("running", started, stop), ("after", stop, end),
    ]
    bars = []
    for kind, start, until in marks:
        seconds = max((until - start).total_seconds(), 0.0)
        is_open = attempt.ended_at is None and kind == ("running" if attempt.started_at else "starting")
        if seconds > 0 or is_open:
            bars.append(Bar(kind, round(100 * seconds / whole_s, 2), seconds, is_open))
    return bars
