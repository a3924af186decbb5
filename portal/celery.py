"""The control plane's Celery. What it carries is only ever «look now»; the beat looks anyway.

`celery -A portal.celery worker -B -Q control -P threads -c 2` runs the control worker.
"""

import ctypes
import os
import signal
from typing import Any

from celery import Celery
from celery.signals import beat_embedded_init
from django.conf import settings

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "portal.settings")

CONTROL_QUEUE = "control"
CYCLE_TASK = "portal.cycle"
CONTACT_TASK = "portal.contact"
HISTORY_TASK = "portal.history"
HISTORY_EVERY_S = 10.0


PR_SET_PDEATHSIG = 1


@beat_embedded_init.connect
def end_with_worker(**_: Any) -> None:
    """The beat is a child process of the worker. If the worker is killed it must not tick on beside its successor."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def make_app(name: str, timeout_s: float, **conf: Any) -> Celery:
    made = Celery(name, set_as_current=False)
    made.conf.update(
        broker_url=settings.REDIS_URL,
        broker_transport_options={
            "socket_timeout": timeout_s,
            "socket_connect_timeout": settings.BROKER_TIMEOUT_S,
            "socket_keepalive": True,
            "health_check_interval": 5,
            "ack_emulation": False,  # a hint that gets lost is made up for by the periodic pass
            "max_retries": 0,
        },
        task_serializer="json",
        accept_content=["json"],
        result_backend=None,
        task_ignore_result=True,
        task_default_queue=CONTROL_QUEUE,
        task_send_sent_event=False,
        **conf,
    )
    return made


def beat(task: str, every_s: float) -> dict[str, Any]:
    return {"task": task, "schedule": every_s, "options": {"queue": CONTROL_QUEUE, "expires": max(10.0, 3 * every_s)}}


app = make_app(
    "portal",
    10.0,
    include=["portal.tasks"],
    broker_connection_retry_on_startup=True,
    broker_connection_max_retries=None,
    broker_channel_error_retry=True,
    task_acks_late=False,
    task_reject_on_worker_lost=False,
    worker_prefetch_multiplier=1,
    # Fetching only with an idle thread would leave the queue unread for up to a second after two tasks at once.
    worker_disable_prefetch=False,
    worker_enable_remote_control=False,
    worker_send_task_events=False,
    worker_hijack_root_logger=False,
    task_soft_time_limit=None,  # a threads pool cannot enforce it; the database's statement_timeout does
    beat_schedule={
        "cycle": beat(CYCLE_TASK, settings.CYCLE_S),
        "contact": beat(CONTACT_TASK, settings.DESIRED_REPUBLISH_S),
        "history": beat(HISTORY_TASK, HISTORY_EVERY_S),
    },
)
"""The control worker's app."""

sender = make_app("portal-sender", settings.BROKER_TIMEOUT_S)
"""For those who only send: a request must not wait for a broker that does not answer."""
