"""From a person's words to a command line, and from a log to the line that tells why."""

import tempfile
from pathlib import Path

import pytest
from yard import Yard, output

from workers.launchers import load
from workers.launchers.base import LaunchError, last_error_line, words_of


@pytest.mark.parametrize(("written", "line"), [
    (b"step 1\nstep 2\n", "step 2"),
    (b"Traceback (most recent call last):\n  File x\ntorch.cuda.OutOfMemoryError: no room\nlater noise\n",
     "torch.cuda.OutOfMemoryError: no room"),
    (b"10%\r20%\r\x1b[31mValueError: red\x1b[0m\r\n\n\n", "ValueError: red"),
    (b"10%|#   |\r20%|##  |", "20%|##  |"),
    (b"\xff\xfe\x00binary\n", "\ufffd\ufffdbinary"),
    (b"x" * 100_000, "x" * 500),
    (b"\n\n", None),
    (b"", None),
])
def test_the_last_error_line(tmp_path: Path, written: bytes, line: str | None) -> None:
    (tmp_path / "rank-0.log").write_bytes(written)
    assert last_error_line(tmp_path / "rank-0.log") == line


def test_no_log_has_no_error_line(tmp_path: Path) -> None:
    assert last_error_line(tmp_path / "none.log") is None


def test_no_shell_is_involved() -> None:
    assert words_of("a '$HOME' \"b c\" | d > e; f") == ["a", "$HOME", "b c", "|", "d", ">", "e;", "f"]


@pytest.mark.parametrize("name", ["", "A=B", "A\0"])
def test_a_name_that_no_environment_can_hold_is_refused(tmp_path: Path, name: str) -> None:
    yard = Yard(tmp_path)
    order = yard.order("/bin/true", env={name: "x"})
    with pytest.raises(LaunchError, match="cannot be set in the environment"):
        load("script").plan(order, yard.spool.create(order))
    yard.clear()


def test_a_temporary_folder_leaves_room_for_the_path_of_a_socket(tmp_path: Path) -> None:
    deep = Yard(tmp_path / ("deep" * 20))
    order = deep.order("/bin/true")
    assert "TMPDIR" not in load("script").plan(order, deep.spool.create(order)).env
    deep.clear()
    with tempfile.TemporaryDirectory(prefix="gy") as folder:
        short = Yard(Path(folder))
        attempt = short.python("from multiprocessing import Manager\nwith Manager() as m: print(m.address)\n")
        assert short.ended(attempt).exit_code == 0, output(attempt)
        assert output(attempt).startswith(str(attempt.path / "tmp"))
        short.clear()


def test_a_job_may_bring_its_own_path_and_threads_but_not_its_own_gpus(tmp_path: Path) -> None:
    yard = Yard(tmp_path)
    order = yard.order("true", env={"PATH": "/bin", "OMP_NUM_THREADS": "7", "CUDA_VISIBLE_DEVICES": "0,1"})
    made = load("script").plan(order, yard.spool.create(order), "/opt/env/bin")
    assert made.env["PATH"] == "/bin"
    assert made.env["OMP_NUM_THREADS"] == "7"
    assert made.env["CUDA_VISIBLE_DEVICES"] == ""
    yard.clear()
