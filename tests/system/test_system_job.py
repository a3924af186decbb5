"""A job's life, on real servers, real processes and a simulated DGX."""

import shlex
import sys

import pytest

from client.errors import Refused
from tests.system.yard import Yard, checked_lines

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]


def python(code: str) -> str:
    return f"{shlex.quote(sys.executable)} -c {shlex.quote(code)}"


def test_a_job_is_submitted_runs_and_succeeds(yard: Yard) -> None:
    number = yard.count_job(20, 0.01)
    job = yard.ended(number)
    assert (job["state"], job["exit_code"]) == ("succeeded", 0)
    assert checked_lines(yard.log(number)) == list(range(20))
    assert job["times"]["running_s"] > 0.1
    states = [event["to_state"] for event in yard.bob.events(number) if event["kind"] == "job.state"]
    assert states == ["starting", "running", "succeeded"]


def test_a_job_sees_its_gpus_and_nothing_of_the_portal(yard: Yard) -> None:
    number = yard.submit("env", gpus=2, env={"MINE": "a b"})
    job = yard.ended(number)
    seen = dict(line.split("=", 1) for line in yard.log(number).decode().splitlines() if "=" in line)
    assert seen["CUDA_VISIBLE_DEVICES"].split(",") == [held["uuid"] for held in job["allocation"]]
    assert seen["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID" and seen["MINE"] == "a b"
    text = yard.log(number).decode().lower()
    secrets = [yard.stack.commands.redis_url, yard.stack.commands.database_url, "gy_", "redis://", "postgresql://"]
    assert not [secret for secret in secrets if secret.lower() in text]


def test_a_failing_job_says_how_it_ended(yard: Yard) -> None:
    number = yard.submit(python("print('all well so far'); raise ValueError('the loss is NaN')"))
    job = yard.ended(number)
    assert (job["state"], job["exit_code"]) == ("failed", 1)
    assert "ValueError: the loss is NaN" in job["reason"]["message"] and "1" in job["reason"]["message"]


def test_an_exit_code_and_a_signal_are_told_apart(yard: Yard) -> None:
    code, signal = yard.submit("sh -c 'exit 37'"), yard.submit("sh -c 'kill -SEGV $$'")
    assert yard.ended(code)["exit_code"] == 37
    assert "SIGSEGV" in yard.ended(signal)["reason"]["message"]


def test_a_command_that_does_not_exist_is_named(yard: Yard) -> None:
    job = yard.ended(yard.submit("no-such-program --fast"))
    assert job["state"] == "failed" and "no-such-program" in job["reason"]["message"]


def test_two_jobs_of_eight_gpus_run_one_after_the_other(yard: Yard) -> None:
    first = yard.submit("sleep 1.5", gpus=8)
    second = yard.submit("sleep 0.2", gpus=8, by=yard.charlie)
    held = yard.wait("the second says why it waits", lambda: yard.job(second)["reason"])
    assert "8" in held["message"]
    one, two = yard.ended(first), yard.ended(second)
    assert (one["state"], two["state"]) == ("succeeded", "succeeded")
    assert two["times"]["started_at"] >= one["times"]["ended_at"]


def test_a_waiting_job_is_cancelled_and_never_starts(yard: Yard) -> None:
    first = yard.submit("sleep 60", gpus=8)
    second = yard.submit("sleep 60", gpus=8)
    yard.reaches(first, "running")
    assert yard.bob.cancel(second)["state"] == "stopped"
    yard.bob.cancel(first)
    yard.ended(first)
    job = yard.job(second)
    assert job["state"] == "stopped" and job["attempts"] == [] and "bob" in job["reason"]["message"]


def test_a_job_is_cancelled_while_it_starts(yard: Yard) -> None:
    for _ in range(5):
        number = yard.submit("sleep 60", gpus=1)
        yard.wait("it is allocated", lambda number=number: yard.job(number)["state"] != "waiting")
        yard.bob.cancel(number)
        assert yard.ended(number)["state"] == "stopped"
        yard.wait("nothing of it lives", lambda number=number: not yard.processes(number), 5)


def test_a_running_job_is_cancelled_with_everything_it_started(yard: Yard) -> None:
    """A child in a session of its own and a daemon whose parent is gone end as well."""
    code = (
        "import subprocess, time, os\n"
        "subprocess.Popen(['sleep', '300'], start_new_session=True)\n"
        "subprocess.Popen(['sh', '-c', 'setsid sh -c \"sleep 300 & sleep 300 & wait\" & exit 0'])\n"
        "print('up', flush=True)\n"
        "time.sleep(300)\n"
    )
    number = yard.submit(python(code), gpus=2)
    yard.wait("all of it runs", lambda: len(yard.processes(number)) >= 5)
    assert yard.free_gpus() == 6
    yard.bob.cancel(number)
    job = yard.ended(number)
    assert job["state"] == "stopped" and not yard.processes(number)
    assert yard.free_gpus() == 8
    assert yard.bob.cancel(number)["state"] == "stopped"


def test_leftovers_of_a_job_that_ended_by_itself_end_too(yard: Yard) -> None:
    number = yard.submit("sh -c 'setsid sleep 300 & echo left one behind'")
    assert yard.ended(number)["state"] == "succeeded"
    assert not yard.processes(number)


def test_a_time_limit_ends_a_job(yard: Yard) -> None:
    job = yard.ended(yard.submit("sleep 60", time_limit="1s"))
    assert job["state"] == "failed" and "limit" in job["reason"]["message"].lower()


def test_somebody_elses_job_cannot_be_seen_or_cancelled(yard: Yard) -> None:
    number = yard.submit("sleep 1")
    for call in (yard.charlie.job, yard.charlie.cancel, yard.charlie.logs):
        with pytest.raises(Refused) as caught:
            call(number)
        assert caught.value.status == 404
    assert yard.ended(number)["state"] == "succeeded"


def test_telemetry_of_a_running_job_arrives(yard: Yard) -> None:
    number = yard.submit(python("import time\nend = time.time() + 6\nwhile time.time() < end: pass"), gpus=2)
    yard.ended(number)
    metrics = yard.wait("samples are there", lambda: (found := yard.bob.metrics(number))["sample_count"] >= 4 and found)
    busy = [value for gpu in metrics["gpus"] for value in gpu["utilization_percent"] if value is not None]
    assert max(busy) > 20
    assert all(len(gpu["at"]) == len(gpu["power_mw"]) for gpu in metrics["gpus"])
