"""The control worker as a real process: woken by a submit, killed, restarted, and its broker flushed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import psutil
import pytest
import redis
from django.conf import settings
from django.db import connection
from django.utils import timezone

from portal.models import Job, JobState, Node
from portal.services import accounts, jobs
from tests.portal.conftest import make_node
from tests.portal.orders import fresh, submitted
from wire.names import desired_key, hint_queue

DEADLINE_S = 60.0


def wait(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {DEADLINE_S:.0f} s"
        time.sleep(0.02)


@contextmanager
def control_worker(folder: Path, **variables: str) -> Iterator[psutil.Process]:
    parts = urlsplit(os.environ["DATABASE_URL"])
    database = urlunsplit(parts._replace(path="/" + str(connection.settings_dict["NAME"])))
    options = ["-B", "-Q", "control", "-P", "threads", "-c", "2", "--schedule", str(folder / "beat")]
    quiet = ["--without-gossip", "--without-mingle", "--without-heartbeat", "-l", "WARNING"]
    process = subprocess.Popen(
        [sys.executable, "-m", "celery", "-A", "portal.celery", "worker", *options, *quiet],
        cwd=settings.BASE_DIR,
        env=os.environ | {"DATABASE_URL": database} | variables,
        start_new_session=True,
    )
    try:
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(30)


@pytest.mark.django_db(transaction=True)
def test_jobs_start_through_a_kill_of_the_worker_and_a_flush_of_the_broker(broker_url: str, tmp_path: Path) -> None:
    make_node(gpus=2)
    bob = accounts.create_user("bob", "correct-horse-battery")
    client = redis.Redis.from_url(broker_url)

    def begun(job: Job) -> bool:
        Node.objects.update(last_heartbeat_at=timezone.now(), state="ready")
        return fresh(job).state == JobState.STARTING

    # Without the beat's help: the first tick of the scheduler is an hour away.
    with control_worker(tmp_path, GPUYARD_CYCLE_S="3600", GPUYARD_DESIRED_REPUBLISH_S="1") as worker:
        wait(lambda: client.exists(desired_key("n1")), "the first periodic pass")
        first = submitted(bob)
        wait(lambda: begun(first), "the start after a wake-up")
        wait(lambda: client.llen(hint_queue("n1")), "the hint")
        client.flushall()
        wait(lambda: client.exists(desired_key("n1")), "the order after the flush")
        children = worker.children(recursive=True)
        worker.send_signal(signal.SIGKILL)
        wait(lambda: not any(alive(child) for child in children), "the end of the killed worker's beat")

    second, third = submitted(bob), submitted(bob)
    client.flushall()  # the wake-up is lost as well
    with control_worker(tmp_path, GPUYARD_CYCLE_S="1"):
        wait(lambda: begun(second), "the start by the beat alone")
        wait(lambda: fresh(third).hold_code == "wait_gpus", "the reason of the job that does not fit")
        jobs.cancel(third, actor=bob)
    assert fresh(first).attempts.count() == fresh(second).attempts.count() == 1


def alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
