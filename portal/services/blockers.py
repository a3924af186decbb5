"""Who is in the way of a change of a card: jobs that hold it or a slice of it, and processes that no job explains."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime

from portal.models import Allocation, Gpu, Job, User


@dataclass(frozen=True)
class Blocker:
    """Who is on the card. The job is named only to those who may see it; `process` is one that no job explains."""

    owner: str
    since: datetime | None
    slice_uuid: str | None = None
    job: Job | None = None
    process: int | None = None
    command: str | None = None


def blockers_of(gpu: Gpu, viewer: User | None = None) -> list[Blocker]:
    """Jobs that hold the card or a slice of it, then processes that no job explains."""
    devices = [gpu, *slices_of(gpu)]
    held = Allocation.objects.filter(gpu__in=devices, released_at=None).select_related("gpu", "attempt__job__owner")
    rows = list(held.order_by("gpu__index", "allocated_at"))
    held_by = {row.attempt.job_id for row in rows}
    visible = set(Job.objects.visible_to(viewer).filter(pk__in=held_by)) if viewer else set()
    found = [
        Blocker(
            job.owner.username, row.allocated_at, row.gpu.uuid if row.gpu_id != gpu.pk else None,
            job if job in visible else None,
        )
        for row in rows for job in [row.attempt.job]
    ]  # fmt: skip
    # A card lists the processes of its slices too; of the two, what the slice says is more exact.
    unexplained = {one.process: one for device in devices for one in strangers(device, gpu)}
    return found + list(unexplained.values())


def slices_of(gpu: Gpu) -> list[Gpu]:
    return list(Gpu.objects.present().filter(node=gpu.node_id, parent_uuid=gpu.uuid).order_by("index", "uuid"))


# --- helpers ----------------------------------------------------------------------------------------------------------


def strangers(device: Gpu, card: Gpu) -> list[Blocker]:
    return [
        Blocker(
            str(process.get("user") or "an unknown user"), moment(process.get("start_time")),
            device.uuid if device.pk != card.pk else None, None, int(process["pid"]), process.get("command"),
        )
        for process in device.latest.get("processes") or [] if not process.get("attempt")
    ]  # fmt: skip


def moment(seconds: object) -> datetime | None:
    return datetime.fromtimestamp(seconds, UTC) if isinstance(seconds, int | float) else None


def waits_for(blockers: Iterable[Blocker]) -> str:
    """-> "Waits for 2 jobs (bob, charlie) and process 4711 of root." Names of people, not of their jobs."""
    every = list(blockers)
    owners = [one.owner for one in every if one.process is None]
    jobs = f"{len(owners)} {'job' if len(owners) == 1 else 'jobs'} ({', '.join(sorted(set(owners)))})"
    parts = [jobs] if owners else []
    parts += [f"process {one.process} of {one.owner}" for one in every if one.process is not None]
    return f"Waits for {' and '.join(parts)}."
