"""How the portal itself is doing, in figures: jobs, nodes and GPUs by state, the queue, the way in."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import redis
from django.db.models import Count, DurationField, F, Min
from django.db.models.aggregates import Aggregate

from portal.models import Allocation, Gpu, Job, JobState, Node
from portal.services import ingest
from wire.states import GpuState, NodeState

Labels = dict[str, str]
WAITS_OVER = timedelta(hours=1)
QUANTILES = (0.5, 0.95)


@dataclass
class Family:
    """One name with all its samples. Without any, nothing is said of it."""

    name: str
    kind: str  # gauge | counter
    said: str
    samples: list[tuple[Labels, float]] = field(default_factory=list)

    def add(self, value: float | None, labels: Labels | None = None) -> None:
        if value is not None and math.isfinite(value):
            self.samples.append((labels or {}, value))

    def lines(self) -> Iterator[str]:
        if self.samples:
            yield f"# HELP {self.name} {self.said}\n# TYPE {self.name} {self.kind}\n"
        for labels, value in self.samples:
            inside = ",".join(f'{name}="{escaped(text)}"' for name, text in labels.items())
            yield f"{self.name}{{{inside}}} {value!r}\n" if inside else f"{self.name} {value!r}\n"


def escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def families(now: float) -> Iterator[Family]:
    yield by_state("gpuyard_jobs", "Jobs by state.", dict(counted(Job)), [state.value for state in JobState])
    yield by_state("gpuyard_nodes", "Nodes by state of contact.", dict(counted(Node)), [s.value for s in NodeState])
    yield by_state("gpuyard_gpus", "GPUs by state.", dict(counted(Gpu)), [state.value for state in GpuState])
    held = Family("gpuyard_gpus_held", "gauge", "GPUs that an attempt holds.")
    held.add(Allocation.objects.filter(released_at=None).count())
    cordoned = Family("gpuyard_nodes_cordoned", "gauge", "Nodes that get no new work.")
    cordoned.add(Node.objects.filter(schedulable=False).count())
    lag = Family("gpuyard_ingest_lag_seconds", "gauge", "How far the taking in of reports is behind.")
    lag.add(ingest_lag_s())
    yield from (held, cordoned, lag, *queue(datetime.fromtimestamp(now, UTC)))


def counted(model: type[Job] | type[Node] | type[Gpu]) -> list[tuple[str, int]]:
    rows = Gpu.objects.present() if model is Gpu else model.objects.all()
    return list(rows.order_by("state").values_list("state").annotate(Count("pk")))


def by_state(name: str, said: str, found: dict[str, int], states: list[str]) -> Family:
    family = Family(name, "gauge", said)
    for state in states:
        family.add(found.get(state, 0), {"state": state})
    return family


def ingest_lag_s() -> float | None:
    try:
        return ingest.lag_s()
    except redis.RedisError:
        return None


class Percentile(Aggregate):
    function = "PERCENTILE_CONT"
    name = "percentile"
    template = "%(function)s(%(quantile)s) WITHIN GROUP (ORDER BY %(expressions)s)"


def queue(now: datetime) -> Iterator[Family]:
    longest = Family("gpuyard_queue_longest_wait_seconds", "gauge", "How long the oldest waiting job has been waiting.")
    oldest = Job.objects.waiting().aggregate(at=Min("submitted_at"))["at"]
    longest.add(max(0.0, (now - oldest).total_seconds()) if oldest else None)
    waits = Family("gpuyard_queue_wait_seconds", "gauge", "How long those waited that got their GPUs in the last hour.")
    recent = Job.objects.filter(allocated_at__gt=now - WAITS_OVER)
    waited = F("allocated_at") - F("submitted_at")
    for quantile in QUANTILES:
        percentile = Percentile(waited, quantile=quantile, output_field=DurationField())
        wait = recent.aggregate(wait=percentile)["wait"]
        waits.add(wait.total_seconds() if wait is not None else None, {"quantile": str(quantile)})
    yield from (longest, waits)
