"""What the control worker does: on a wake-up, and every few seconds anyway."""

import logging
import threading

from django.utils import timezone

from portal.celery import COMPACT_TASK, CONTACT_TASK, CYCLE_TASK, app
from portal.services import broker, desired, nodes, overdue, samples, scheduling

log = logging.getLogger(__name__)

ONE_CYCLE = threading.Lock()
"""A wake-up that arrives during a cycle waits for it and then looks at what the cycle could not see yet."""

LISTENING_SINCE = timezone.now()


@app.task(name=CYCLE_TASK)
def cycle() -> None:
    with ONE_CYCLE:
        scheduling.woken()
        scheduling.run_cycle()


@app.task(name=CONTACT_TASK)
def contact() -> None:
    nodes.sweep(LISTENING_SINCE)
    overdue.note()
    broker.attempt("the nodes' broker accounts", nodes.assert_broker_users)
    desired.publish_all()


@app.task(name=COMPACT_TASK)
def compact() -> None:
    samples.compact()
