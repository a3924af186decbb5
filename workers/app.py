"""`python -m workers.app`: the node's Celery worker. It takes hints from its own queue; the steps do the work."""

import fcntl
import logging
import os
import sys
import time
import warnings
from pathlib import Path
from typing import IO

from celery import Celery

from wire import names
from workers import steps, tasks
from workers.agent import Agent
from workers.gpus import fault_script
from workers.publish import CONNECT_TIMEOUT_S, SOCKET_TIMEOUT_S
from workers.settings import Settings, SettingsError
from workers.spool import SpoolError

EXIT_SETTINGS = 78
EXIT_TAKEN = 69

CELERY_OVERRIDES = ("CELERY_BROKER_URL", "CELERY_BROKER_READ_URL", "CELERY_BROKER_WRITE_URL", "CELERY_RESULT_BACKEND")
"""Celery prefers these to its configuration; a node has one broker, that of its settings."""


class StateDirTaken(Exception):
    """Another worker uses the state directory."""


def create(settings: Settings) -> Celery:
    app = Celery("workers", set_as_current=True)
    app.conf.update(
        broker_url=settings.broker_url,
        # Without the timeouts a half-open connection leaves the worker deaf for ever. Hints need no acknowledgement:
        # the node's broker user then needs no key that other nodes use.
        broker_transport_options={
            "socket_timeout": SOCKET_TIMEOUT_S, "socket_connect_timeout": CONNECT_TIMEOUT_S, "socket_keepalive": True,
            "health_check_interval": 5, "ack_emulation": False,
        },
        broker_connection_retry_on_startup=True, broker_connection_max_retries=None, broker_channel_error_retry=True,
        task_serializer="json", accept_content=["json"], result_backend=None, task_ignore_result=True,
        task_acks_late=False, task_reject_on_worker_lost=False,
        # Fetching only with an idle thread would leave the queue unread for up to a second after every hint.
        worker_prefetch_multiplier=1, worker_disable_prefetch=False,
        worker_enable_remote_control=False, worker_send_task_events=False, task_send_sent_event=False,
        task_soft_time_limit=10, task_time_limit=20, worker_hijack_root_logger=False, worker_redirect_stdouts=False,
        task_default_queue=names.hint_queue(settings.node),
    )
    if settings.simulate:
        fault_script.pass_on(os.environ, settings.faults, settings.state_dir, time.monotonic())
    agent = Agent(settings)
    tasks.register(app, agent.doorbell)
    steps.install(app, agent)
    return app


def run(app: Celery, settings: Settings) -> int:
    worker = app.Worker(
        hostname=f"node@{settings.node}", queues=[names.hint_queue(settings.node)], pool_cls="threads", concurrency=1,
        loglevel=settings.log_level, quiet=True, without_heartbeat=True, without_gossip=True, without_mingle=True,
    )
    worker.start()
    return int(worker.exitcode or 0)


def claim(state_dir: Path) -> IO[bytes]:
    """-> the open lock file; the claim ends with the process. Raises StateDirTaken."""
    state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    file = (state_dir / "agent.lock").open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise StateDirTaken(f"another worker already runs with the state directory {state_dir}: "
                            "stop it, or give this one a directory of its own") from None
    return file


def main() -> int:
    for name in CELERY_OVERRIDES:
        os.environ.pop(name, None)
    try:
        settings = Settings.load()
        lock = claim(settings.state_dir)
        app = create(settings)
    except (SettingsError, SpoolError, OSError) as error:
        print(f"node worker: {error}", file=sys.stderr)
        return EXIT_SETTINGS
    except StateDirTaken as error:
        print(f"node worker: {error}", file=sys.stderr)
        return EXIT_TAKEN
    logging.basicConfig(level=settings.log_level, format="%(asctime)s %(levelname)s %(threadName)s: %(message)s")
    for name in ("celery.worker.strategy", "celery.app.trace"):  # two lines for every hint
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("py.warnings").setLevel(logging.ERROR)  # Celery's advice for its next version
    # A node that starts jobs for several accounts runs as root; what it takes from the broker is JSON and signed.
    warnings.filterwarnings("ignore", message="You're running the worker with superuser privileges")
    with lock:
        return run(app, settings)


if __name__ == "__main__":
    sys.exit(main())
