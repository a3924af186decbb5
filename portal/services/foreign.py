"""What is done about processes on GPUs that belong to no job: nothing, a warning, or their end after a grace.

Whatever the policy, they are shown, and the GPU is not offered while they are there.
"""

from collections.abc import Iterable
from datetime import datetime, timedelta

from django.conf import settings
from django.utils import timezone

from portal.hardware import verdicts
from portal.hardware.verdicts import Unexplained
from portal.models import Gpu, HardwareOrder, Health, Node
from portal.services import orders

OFF, WARN, STOP = "off", "warn", "stop"
ASK_AGAIN_AFTER = timedelta(minutes=5)
"""A process that outlived an order to end it."""


def severity() -> str:
    return verdicts.INFO if settings.FOREIGN_POLICY == OFF else verdicts.WARNING


def enforce(node: Node, uuid: str, found: Iterable[Unexplained], now: datetime | None = None) -> int:
    """Under the policy «stop»: whatever has outstayed its grace is to end. -> how many orders were given."""
    strangers = [one for one in found if one.kind == "foreign" and one.process and one.process.start_time is not None]
    if settings.FOREIGN_POLICY != STOP or not strangers:
        return 0
    now = now or timezone.now()
    gpu = Gpu.objects.select_related("node").filter(node=node, uuid=uuid).first()
    if gpu is None:
        return 0
    return sum(end(gpu, one, now) for one in strangers)


def end(gpu: Gpu, one: Unexplained, now: datetime) -> int:
    process = one.process
    if process is None or process.start_time is None or not has_outstayed(gpu, one, now):
        return 0
    if HardwareOrder.objects.filter(gpu=gpu, kind="stop_foreign", requested_at__gt=now - ASK_AGAIN_AFTER,
                                    order__pid=process.pid).exists():  # fmt: skip
        return 0
    orders.stop_foreign(gpu, process.pid, process.start_time)
    return 1


def has_outstayed(gpu: Gpu, one: Unexplained, now: datetime) -> bool:
    grace = timedelta(seconds=settings.FOREIGN_GRACE_S)
    key = f"{one.identity}/{gpu.uuid}/"
    return Health.objects.filter(gpu=gpu, key__startswith=key, resolved_at=None, at__lte=now - grace).exists()
