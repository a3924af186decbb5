"""The list of jobs: filtered, paged and counted in a fixed number of queries."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from django.db.models import Count, Q

from portal.models import JOB_ACTIVE, JOB_ENDED, Allocation, Job, JobState, User
from portal.models.jobs import JobQuerySet
from portal.services.text import storable

PAGE_SIZE = 50
GROUPS: dict[str, frozenset[JobState]] = {
    "waiting": frozenset({JobState.WAITING}),
    "active": JOB_ACTIVE,
    "succeeded": frozenset({JobState.SUCCEEDED}),
    "failed": frozenset({JobState.FAILED}),
    "stopped": frozenset({JobState.STOPPED}),
    "ended": JOB_ENDED,
}
LARGEST_ID = 2**63 - 1


@dataclass(frozen=True)
class JobFilter:
    """The filters of the list, as its address holds them. `who` is mine, all or the name of a project."""

    state: str = ""
    who: str = "mine"
    text: str = ""
    before: int | None = None

    @classmethod
    def of(cls, query: Mapping[str, str]) -> "JobFilter":
        state = query.get("state", "")
        return cls(
            state=state if state in GROUPS else "",
            who=storable(query.get("who", ""), 40) or "mine",
            text=storable(query.get("q", ""), 200).strip(),
            before=whole_number(query.get("before", "")),
        )


@dataclass(frozen=True)
class JobRow:
    job: Job
    mine: bool
    nodes: tuple[str, ...]
    models: str

    @property
    def reason(self) -> str:
        """The one sentence of the row: why it waits, or how it ended."""
        return self.job.hold_message if self.job.state == JobState.WAITING else self.job.end_message


@dataclass(frozen=True)
class JobList:
    rows: list[JobRow]
    counts: dict[str, int]
    total: int
    next_before: int | None


def listing(user: User, wanted: JobFilter) -> JobList:
    """One page of the jobs that the user may see, newest first. Always the same number of queries."""
    scope = in_scope(user, wanted)
    counts = {row["state"]: row["n"] for row in scope.order_by().values("state").annotate(n=Count("id", distinct=True))}
    if wanted.state:
        scope = scope.filter(state__in=GROUPS[wanted.state])
    if wanted.before is not None:
        scope = scope.filter(pk__lt=wanted.before)
    jobs = list(scope.select_related("owner", "project", "cancelled_by").order_by("-pk")[: PAGE_SIZE + 1])
    shown = jobs[:PAGE_SIZE]
    places = newest_places(shown)
    rows = [JobRow(job, job.owner_id == user.pk, *places.get(job.pk, ((), asked_models(job)))) for job in shown]
    grouped = {name: sum(counts.get(state, 0) for state in states) for name, states in GROUPS.items()}
    return JobList(rows, grouped, sum(counts.values()), shown[-1].pk if len(jobs) > PAGE_SIZE else None)


# --- helpers ----------------------------------------------------------------------------------------------------------


def whole_number(text: str) -> int | None:
    text = text.strip().removeprefix("#")
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        return None
    number = int(text)
    return number if number <= LARGEST_ID else None


def in_scope(user: User, wanted: JobFilter) -> JobQuerySet:
    jobs = Job.objects.visible_to(user)
    if wanted.who == "mine":
        jobs = jobs.filter(owner=user)
    elif wanted.who != "all":
        jobs = jobs.filter(project__name=wanted.who)
    if wanted.text:
        number = whole_number(wanted.text)
        by_id = Q(pk=number) if number is not None else Q()
        jobs = jobs.filter(by_id | Q(name__icontains=wanted.text))
    return jobs


def newest_places(jobs: list[Job]) -> dict[int, tuple[tuple[str, ...], str]]:
    """Job id -> nodes and GPU models of its newest attempt."""
    ids = [job.pk for job in jobs]
    held = Allocation.objects.filter(attempt__job__in=ids).order_by("attempt__number", "rank")
    found: dict[int, tuple[int, dict[str, None], list[str]]] = {}
    for job_id, number, node, model in held.values_list(
        "attempt__job_id", "attempt__number", "gpu__node__name", "gpu__model"
    ):
        newest, nodes, models = found.get(job_id, (0, {}, []))
        if number > newest:
            nodes, models = {}, []
        nodes[node] = None
        models.append(model)
        found[job_id] = (number, nodes, models)
    return {job_id: (tuple(nodes), counted(models)) for job_id, (_, nodes, models) in found.items()}


def asked_models(job: Job) -> str:
    resources = job.spec.get("resources") or {}
    models = resources.get("gpu") or []
    wanted = [models] if isinstance(models, str) else models
    return f"{job.gpu_count}× {' or '.join(wanted) or 'any GPU'}" if job.gpu_count else "no GPU"


def counted(models: Iterable[str]) -> str:
    """["H100", "H100"] -> "2× H100"."""
    counts: dict[str, int] = {}
    for model in models:
        counts[model] = counts.get(model, 0) + 1
    return ", ".join(f"{count}× {model}" for model, count in counts.items())
