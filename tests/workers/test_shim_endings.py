"""How a run ends, and what is told of it."""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from yard import Yard, alive, output, slots, states

from wire.states import AttemptState, EndReason

STANDARD_SIGNALS = (1 << 31) - 1  # those from 32 on are the C library's own


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[Yard]:
    yard = Yard(tmp_path)
    yield yard
    yard.clear()


def test_a_run_that_ends_well_tells_its_three_steps(yard: Yard) -> None:
    attempt = yard.start("/bin/echo hello world")
    end = yard.ended(attempt)
    assert states(attempt) == ["starting", "running", "succeeded"]
    assert [event.seq for event in attempt.events()] == [1, 2, 3]
    assert (end.reason, end.exit_code, end.signal) == (EndReason.EXITED, 0, None)
    assert output(attempt) == "hello world\n"
    assert end.log_sizes == {"rank-0": 12}
    assert attempt.events()[1].pid


@pytest.mark.parametrize("code", [1, 3, 127, 255])
def test_an_exit_code_is_told_with_the_last_error_line(yard: Yard, code: int) -> None:
    attempt = yard.python(f"import sys\nprint('ValueError: bad shape', file=sys.stderr)\nprint()\nsys.exit({code})\n")
    end = yard.ended(attempt)
    assert (end.state, end.reason, end.exit_code) == (AttemptState.FAILED, EndReason.EXIT_CODE, code)
    assert end.message == "ValueError: bad shape"
    assert [(one.rank, one.exit_code) for one in end.ranks] == [(0, code)]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_a_signal_from_elsewhere_is_told_as_such(yard: Yard, number: int) -> None:
    attempt = yard.python(f"import os\nos.kill(os.getpid(), {int(number)})\n")
    end = yard.ended(attempt)
    assert (end.reason, end.signal, end.exit_code) == (EndReason.SIGNAL, number, None)


def test_runs_that_end_at_once_are_each_told_whole(yard: Yard) -> None:
    attempts = [yard.start("/bin/true") for _ in range(20)]
    for attempt in attempts:
        yard.ended(attempt)
        assert states(attempt) == ["starting", "running", "succeeded"]


@pytest.mark.parametrize(("command", "said"), [
    ("no-such-program --now", "no-such-program was not found"),
    ("./missing.sh", "missing.sh does not exist"),
    ("echo 'unbalanced", "cannot be split into words"),
    ("", "the command is empty"),
    ("nul\0byte", "nul\ufffdbyte was not found"),
    ("x" * 5000, "name too long"),
])
def test_a_command_that_cannot_start_says_why(yard: Yard, command: str, said: str) -> None:
    attempt = yard.start(command)
    end = yard.ended(attempt)
    assert (end.state, end.reason) == (AttemptState.FAILED, EndReason.LAUNCH_FAILED)
    assert said.lower() in (end.message or "").lower()
    assert states(attempt) == ["starting", "failed"]


def test_a_file_without_the_right_to_run_says_what_to_do(yard: Yard, tmp_path: Path) -> None:
    (tmp_path / "tool").write_text("#!/bin/sh\necho no\n")
    end = yard.run("./tool", workdir=str(tmp_path))
    assert end.reason is EndReason.LAUNCH_FAILED
    assert "is not executable; use chmod +x" in (end.message or "")


def test_a_file_that_is_no_program_says_so(yard: Yard, tmp_path: Path) -> None:
    (tmp_path / "tool").write_bytes(b"neither this nor that\n")
    (tmp_path / "tool").chmod(0o755)
    end = yard.run("./tool", workdir=str(tmp_path))
    assert end.reason is EndReason.LAUNCH_FAILED
    assert "neither a program nor a script" in (end.message or "")


def test_a_working_directory_that_is_not_there_says_so(yard: Yard) -> None:
    end = yard.run("/bin/true", workdir="/nowhere/at/all")
    assert end.reason is EndReason.LAUNCH_FAILED
    assert "/nowhere/at/all does not exist on this node" in (end.message or "")


def test_an_unknown_launcher_and_an_unknown_runtime_are_refused_by_name(yard: Yard) -> None:
    assert "no launcher 'abacus'" in (yard.run("/bin/true", launcher="abacus").message or "")
    assert "no runtime 'tent'" in (yard.run("/bin/true", runtime="tent").message or "")


def test_a_stop_lets_the_run_finish_its_own_way(yard: Yard) -> None:
    attempt = yard.python("import signal, sys, time\n"
                          "signal.signal(signal.SIGTERM, lambda *_: (print('saved'), sys.exit(0)))\n"
                          "print('ready')\nwhile True: time.sleep(1)\n")
    yard.until_output(attempt, "ready")
    asked_at = time.monotonic()
    yard.stop(attempt)
    end = yard.ended(attempt)
    assert (end.state, end.reason, end.exit_code) == (AttemptState.STOPPED, EndReason.STOP_REQUESTED, 0)
    assert output(attempt).endswith("saved\n")
    assert time.monotonic() - asked_at < 1.0


def test_a_run_that_ignores_the_stop_is_killed_after_its_grace(yard: Yard) -> None:
    attempt = yard.python("import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('ready')\n"
                          "while True: time.sleep(1)\n")
    yard.until_output(attempt, "ready")
    asked_at = time.monotonic()
    yard.stop(attempt, grace_s=0.5)
    end = yard.ended(attempt)
    assert (end.reason, end.signal) == (EndReason.STOP_REQUESTED, signal.SIGKILL)
    assert 0.5 <= time.monotonic() - asked_at < 2.5
    assert not alive(attempt)


def test_a_second_stop_may_shorten_the_grace(yard: Yard) -> None:
    attempt = yard.python("import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('ready')\n"
                          "while True: time.sleep(1)\n")
    yard.until_output(attempt, "ready")
    yard.stop(attempt, grace_s=60.0)
    yard.stop(attempt, grace_s=0.1)
    assert yard.ended(attempt, 5.0).reason is EndReason.STOP_REQUESTED


def test_a_stop_after_the_end_changes_nothing(yard: Yard) -> None:
    attempt = yard.start("/bin/false")
    end = yard.ended(attempt)
    yard.stop(attempt)
    yard.supervisor.poll()
    assert attempt.events()[-1] == end
    assert end.reason is EndReason.EXIT_CODE


def test_a_stop_right_behind_the_launch_always_ends_it(yard: Yard) -> None:
    for _ in range(10):
        attempt = yard.start("/bin/sleep 600")
        yard.stop(attempt)
        assert yard.ended(attempt).reason is EndReason.STOP_REQUESTED


def test_the_time_limit_ends_a_run(yard: Yard) -> None:
    attempt = yard.start("/bin/sleep 600", time_limit_s=0.4)
    end = yard.ended(attempt, 5.0)
    assert (end.state, end.reason) == (AttemptState.FAILED, EndReason.TIME_LIMIT)
    assert 0.4 <= (end.monotonic_s or 0) < 3.0


def test_nothing_of_the_workers_environment_reaches_a_job(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CANARY_SECRET", "redis://user:password@broker")
    attempt = yard.start("/usr/bin/env", gpus=slots(2), env={"MINE": "a=b\nc", "GPUYARD_JOB_ID": "999", "ünï": "ç"},
                         layout={"data": 2, "tensor": 1})
    yard.ended(attempt)
    seen = output(attempt)
    assert "CANARY" not in seen
    assert "password" not in seen
    assert "MINE=a=b\nc\n" in seen
    assert "ünï=ç\n" in seen
    for line in ("CUDA_VISIBLE_DEVICES=GPU-00000000-test,GPU-00000001-test", "CUDA_DEVICE_ORDER=PCI_BUS_ID",
                 f"GPUYARD_JOB_ID={attempt.launch.job}", f"GPUYARD_ATTEMPT_ID={attempt.launch.attempt}",
                 "GPUYARD_DATA_PARALLEL=2", "PYTHONUNBUFFERED=1"):
        assert f"{line}\n" in seen
    shim_saw = [name for name in os.environ if f"{name}=" in seen]
    assert set(shim_saw) <= {"PATH", "HOME", "USER", "LOGNAME", "LANG", "TZ", "TMPDIR", "PYTHONUNBUFFERED"}


def test_a_job_without_gpus_sees_none(yard: Yard) -> None:
    attempt = yard.start("/usr/bin/env")
    yard.ended(attempt)
    assert "CUDA_VISIBLE_DEVICES=\n" in output(attempt)


def test_a_job_inherits_three_descriptors_and_plain_signals(yard: Yard) -> None:
    attempt = yard.python("import os, signal\n"
                          "print(sorted(int(n) for n in os.listdir('/proc/self/fd'))[:-1])\n"
                          "print([l for l in open('/proc/self/status') if l.startswith('SigIgn')])\n"
                          "print(os.getsid(0) == os.getpid())\n"
                          "print(os.readlink('/proc/self/fd/0'), os.path.basename(os.readlink('/proc/self/fd/1')))\n")
    yard.ended(attempt)
    lines = output(attempt).splitlines()
    assert lines[0] == "[0, 1, 2]"
    ignored = int(lines[1].split("\\t")[1][:16], 16) & STANDARD_SIGNALS
    assert ignored == 0x1001000, "only what Python itself ignores: SIGPIPE and SIGXFSZ"
    assert lines[2:] == ["True", "/dev/null rank-0.log"]


def test_a_job_does_not_inherit_the_workers_umask_or_its_shield(yard: Yard) -> None:
    adjustment = Path("/proc/self/oom_score_adj")
    before, umask = adjustment.read_text(), os.umask(0o077)
    try:
        with contextlib.suppress(PermissionError):
            adjustment.write_text("-500")
        attempt = yard.start("/bin/sh -c 'umask; cat /proc/self/oom_score_adj'")
        yard.ended(attempt)
    finally:
        os.umask(umask)
        adjustment.write_text(before)
    assert output(attempt) == "0022\n0\n"


def test_output_and_errors_share_one_file_in_their_order(yard: Yard) -> None:
    attempt = yard.python("import sys\nfor i in range(200):\n  print('out', i, flush=True)\n"
                          "  print('err', i, file=sys.stderr, flush=True)\n")
    yard.ended(attempt)
    assert output(attempt) == "".join(f"out {i}\nerr {i}\n" for i in range(200))


def test_any_bytes_are_kept_as_they_are(yard: Yard) -> None:
    attempt = yard.python("import os\nos.write(1, b'\\x00\\xff\\x80\\r\\r\\n' * 1000)\n")
    end = yard.ended(attempt)
    assert attempt.log_path("rank-0").read_bytes() == b"\x00\xff\x80\r\r\n" * 1000
    assert end.log_sizes == {"rank-0": 6000}


def test_a_python_file_runs_without_being_executable(yard: Yard, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import sys\nprint(sys.argv[1:])\n")
    attempt = yard.start("train.py --name 'two words' \"$HOME\"", workdir=str(tmp_path))
    assert yard.ended(attempt).reason is EndReason.EXITED
    assert output(attempt) == "['--name', 'two words', '$HOME']\n"


def test_strange_words_arrive_as_they_were_given(yard: Yard) -> None:
    attempt = yard.start(f"{sys.executable} -c 'import sys; print(sys.argv[1:])' 'a\nb' 'back\\slash\\n' '' end 'k=v'")
    yard.ended(attempt)
    assert output(attempt) == repr(["a\nb", "back\\slash\\n", "", "end", "k=v"]) + "\n"


def test_the_shim_takes_no_notice_of_a_terminals_signals(yard: Yard) -> None:
    attempt = yard.start("/bin/sleep 600")
    yard.until(lambda: "running" in states(attempt))
    shim = attempt.shim()
    assert shim is not None
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        os.kill(int(shim["pid"]), number)
    yard.stop(attempt)
    assert yard.ended(attempt).reason is EndReason.STOP_REQUESTED
