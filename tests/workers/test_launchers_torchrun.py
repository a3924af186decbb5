"""torchrun for real: one file per rank, the first rank to fail by name, nothing left after an end."""

import importlib.util
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from yard import Yard, alive, is_running, output, slots

from wire.states import EndReason
from workers.launchers import load
from workers.launchers.base import LaunchError
from workers.launchers.torchrun import failures

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")

TALKS = """
import os, sys
for line in range(100):
    print(os.environ["RANK"], "out", line)
    print(os.environ["RANK"], "err", line, file=sys.stderr)
print("omp", os.environ["OMP_NUM_THREADS"], "world", os.environ["WORLD_SIZE"], sys.argv[1:])
"""

FAILS = """
import os, sys, time
if os.environ["RANK"] == "2":
    print("starting")
    raise RuntimeError("loss is nan")
time.sleep(600)
"""

SUMMARY = b"""
============================================================
train.py FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-01-01_00:00:00
  host      : a
  rank      : 3 (local_rank: 3)
  exitcode  : -15 (pid: 12)
  error_file: <N/A>
  traceback : Signal 15 (SIGTERM) received by PID 12
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-01-01_00:00:00
  host      : a
  rank      : 1 (local_rank: 1)
  exitcode  : 7 (pid: 11)
  error_file: <N/A>
============================================================
"""


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[Yard]:
    yard = Yard(tmp_path)
    yield yard
    yard.clear()


@needs_torch
def test_four_ranks_write_each_into_its_own_file_in_order(yard: Yard, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TALKS)
    attempt = yard.start("train.py --epochs 1", launcher="torchrun", gpus=slots(4), world_size=4, workdir=str(tmp_path))
    end = yard.ended(attempt, 60.0)
    assert (end.reason, end.message) == (EndReason.EXITED, None)
    for rank in range(4):
        lines = [f"{rank} {kind} {line}\n" for line in range(100) for kind in ("out", "err")]
        assert output(attempt, f"rank-{rank}") == "".join(lines) + "omp 1 world 4 ['--epochs', '1']\n"
    assert set(end.log_sizes) == {"launcher", "rank-0", "rank-1", "rank-2", "rank-3"}
    assert [(one.rank, one.exit_code) for one in end.ranks] == [(rank, 0) for rank in range(4)]


@needs_torch
def test_the_first_rank_to_fail_is_named_with_its_error(yard: Yard, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(FAILS)
    attempt = yard.start("train.py", launcher="torchrun", gpus=slots(4), world_size=4, workdir=str(tmp_path))
    end = yard.ended(attempt, 60.0)
    assert (end.reason, end.exit_code) == (EndReason.EXIT_CODE, 1)
    assert (end.ranks[0].rank, end.ranks[0].exit_code, end.ranks[0].signal) == (2, 1, None)
    assert end.message == end.ranks[0].message == "RuntimeError: loss is nan"
    assert not alive(attempt)


@needs_torch
def test_a_rank_that_is_killed_is_named_with_its_signal(yard: Yard, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os, time\nif os.environ['RANK'] == '1': os.kill(os.getpid(), 9)\ntime.sleep(600)\n")
    attempt = yard.start("train.py", launcher="torchrun", gpus=slots(2), world_size=2, workdir=str(tmp_path))
    end = yard.ended(attempt, 60.0)
    assert (end.ranks[0].rank, end.ranks[0].signal, end.ranks[0].exit_code) == (1, signal.SIGKILL, None)
    assert not alive(attempt)


@needs_torch
def test_a_stop_ends_torchrun_and_every_rank(yard: Yard, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import os, time\nprint('pid', os.getpid())\ntime.sleep(600)\n")
    attempt = yard.start("train.py", launcher="torchrun", gpus=slots(2), world_size=2, workdir=str(tmp_path))
    for rank in range(2):
        yard.until(lambda rank=rank: output(attempt, f"rank-{rank}").endswith("\n"), 60.0)
    ranks = [int(output(attempt, f"rank-{rank}").split()[1]) for rank in range(2)]
    yard.stop(attempt, grace_s=20.0)
    end = yard.ended(attempt, 30.0)
    assert end.reason is EndReason.STOP_REQUESTED
    assert end.signal != signal.SIGKILL, "torchrun ended its ranks within the grace"
    assert not any(is_running(rank) for rank in ranks)


@needs_torch
def test_a_file_from_record_tells_the_error_better_than_the_log(yard: Yard, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import atexit\natexit.register(print, 'RuntimeError: noise at the end')\n"
        "from torch.distributed.elastic.multiprocessing.errors import record\n"
        "@record\ndef main(): raise KeyError('weights')\nmain()\n")
    attempt = yard.start("train.py", launcher="torchrun", gpus=slots(1), workdir=str(tmp_path))
    assert yard.ended(attempt, 60.0).message == "KeyError: 'weights'"


@needs_torch
def test_ranks_of_two_nodes_get_the_numbers_of_their_orders(yard: Yard, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os\nimport torch.distributed as dist\ndist.init_process_group('gloo')\n"
        "everyone = [None] * dist.get_world_size()\n"
        "dist.all_gather_object(everyone, (dist.get_rank(), os.environ['GPUYARD_NODE_RANK']))\nprint(everyone)\n"
        "dist.barrier()\ndist.destroy_process_group()\n")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    other = Yard(tmp_path / "other-node")
    shares = [(each, each.start("train.py", attempt="the-same", launcher="torchrun", gpus=slots(2), node_rank=node,
                                node_count=2, first_rank=2 * node, world_size=4, master_port=port,
                                workdir=str(tmp_path))) for node, each in ((1, other), (0, yard))]
    for each, share in shares:
        assert each.ended(share, 60.0).reason is EndReason.EXITED, output(share, "launcher")
    for (_, share), ranks in zip(shares, [(2, 3), (0, 1)], strict=True):
        for rank in ranks:
            assert output(share, f"rank-{rank}").endswith("[(0, '0'), (1, '0'), (2, '1'), (3, '1')]\n")
    other.clear()


def test_a_missing_script_is_told_before_anything_starts(yard: Yard, tmp_path: Path) -> None:
    end = yard.run("nope.py", launcher="torchrun", gpus=slots(2), workdir=str(tmp_path))
    assert end.reason is EndReason.LAUNCH_FAILED
    assert f"{tmp_path}/nope.py does not exist" in (end.message or "")


def test_several_nodes_meet_where_the_order_says(yard: Yard, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    order = yard.order("train.py", launcher="torchrun", gpus=slots(2), node_rank=1, node_count=2, first_rank=2,
                       world_size=4, master_address="10.0.0.1", master_port=4711, workdir=str(tmp_path))
    attempt = yard.spool.create(order)
    plan = load("torchrun").plan(order, attempt)
    assert {"--master-addr=10.0.0.1", "--master-port=4711", "--node-rank=1", "--nnodes=2"} <= set(plan.argv)
    assert f"--rdzv-id={order.attempt}" in plan.argv
    assert plan.streams == ["launcher", "rank-2", "rank-3"]
    order.master_port = None
    with pytest.raises(LaunchError, match="port of its first node"):
        load("torchrun").plan(order, attempt)


def test_the_summary_gives_the_root_cause_first(tmp_path: Path) -> None:
    (tmp_path / "launcher.log").write_bytes(b"noise\n" * 1000 + SUMMARY)
    assert failures(tmp_path / "launcher.log") == [(1, 7), (3, -15)]
    assert failures(tmp_path / "none.log") == []


@pytest.mark.parametrize(("command", "words"), [
    ("-m pkg.train --x 1", ["-u", "-m", "pkg.train", "--x", "1"]),
    ("train.py --x 1", ["-u", "train.py", "--x", "1"]),
    ("/bin/echo hi", ["hi"]),
])
def test_a_command_may_be_a_module_a_file_or_a_program(
        yard: Yard, tmp_path: Path, command: str, words: list[str]) -> None:
    (tmp_path / "train.py").touch()
    order = yard.order(command, launcher="torchrun", workdir=str(tmp_path))
    argv = load("torchrun").plan(order, yard.spool.create(order)).argv
    assert argv[-len(words):] == words
    assert argv[0] == sys.executable or argv[0].endswith("/python")
