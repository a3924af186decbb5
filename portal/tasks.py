"""What the control worker does: on a wake-up, and every few seconds anyway."""

import logging
import threading

from django.utils import timezone

from portal.celery import CONTACT_TASK, CYCLE_TASK, HISTORY_TASK, app
from portal.services import broker, desired, history, mig, nodes, overdue, scheduling

log = logging.getLogger(__name__)

ONE_CYCLE = threading.Lock()
"""A wake-up that arrives during a cycle waits for it and then looks at what the cycle could not see yet."""

ONE_ROLLUP = threading.Lock()

LISTENING_SINCE = timezone.now()


@app.task(name=CYCLE_TASK)
def cycle() -> None:
    with ONE_CYCLE:
        scheduling.woken()
        mig.advance()
        scheduling.run_cycle()


@app.task(name=CONTACT_TASK)
def contact() -> None:
    nodes.sweep(LISTENING_SINCE)
    overdue.note()
    broker.attempt("the nodes' broker accounts", nodes.assert_broker_users)
    desired.publish_all()


@app.task(name=HISTORY_TASK)
def keep_history() -> None:
    if ONE_ROLLUP.acquire(blocking=False):  # a run that takes long is not joined by a second one
        try:
            history.keep_house()
        finally:
            ONE_ROLLUP.release()
