"""The example is right: four ranks with a quarter of the batch learn what one rank learns with all of it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SCRIPT = str(EXAMPLES / "train_ddp.py")
STEPS = 12
# In double precision the two runs differ by the order of additions alone: some 1e-16 per step.
TOLERANCE = 1e-10
Parameters = dict[str, torch.Tensor]


def run(*options: str, ranks: int = 1, code: int = 0, **environment: str) -> str:
    launch = [sys.executable]
    if ranks > 1:
        launch += ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--rdzv-backend=c10d",
                   "--rdzv-endpoint=localhost:0", "--local-addr=localhost"]
    done = subprocess.run(
        [*launch, SCRIPT, "--hidden=48", f"--steps={STEPS}", *options], capture_output=True, text=True, timeout=150,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment, check=False,
    )
    assert done.returncode == code, done.stderr[-2000:]
    return done.stdout + done.stderr


def trained(folder: Path, *options: str, ranks: int = 1) -> tuple[Parameters, str]:
    path = folder / f"{ranks}-{len(list(folder.iterdir()))}.pt"
    output = run("--dtype=float64", f"--save={path}", *options, ranks=ranks)
    return torch.load(path, weights_only=True), output


def furthest(one: Parameters, other: Parameters) -> float:
    assert one.keys() == other.keys()
    return max((one[name] - other[name]).abs().max().item() for name in one)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trained")


@pytest.fixture(scope="module")
def four(folder: Path) -> tuple[Parameters, str]:
    return trained(folder, "--global-batch=1024", ranks=4)


def test_four_ranks_of_256_learn_what_one_rank_of_1024_learns(folder: Path, four: tuple[Parameters, str]) -> None:
    alone, _ = trained(folder, "--global-batch=1024")
    assert furthest(four[0], alone) < TOLERANCE
    untrained, _ = trained(folder, "--global-batch=1024", "--steps=0")
    assert furthest(alone, untrained) > 0.01  # the parameters did move


@pytest.mark.parametrize("options", [
    ("--global-batch=1024", "--seed=1"),
    ("--global-batch=256",),  # what four ranks would do if each saw the same quarter
    ("--global-batch=1024", "--lr=0.4"),  # if gradients were added up instead of averaged
    ("--global-batch=1024", f"--steps={STEPS - 1}"),
])
def test_the_comparison_would_notice_another_training(
    folder: Path, four: tuple[Parameters, str], options: tuple[str, ...]
) -> None:
    other, _ = trained(folder, *options)
    assert furthest(four[0], other) > 1000 * TOLERANCE


def test_every_rank_tells_of_itself_and_ends_with_the_same_parameters(four: tuple[Parameters, str]) -> None:
    output = four[1]
    starts = re.findall(r"start rank=(\d) local_rank=(\d) world=4 device=\S+ host=\S+ pid=(\d+) shard=256", output)
    assert sorted(start[:2] for start in starts) == [(str(rank), str(rank)) for rank in range(4)]
    assert len({start[2] for start in starts}) == 4
    ends = re.findall(rf"done rank=(\d) steps={STEPS} seconds=[\d.]+ checksum=([0-9a-f]{{16}})", output)
    assert sorted(rank for rank, _ in ends) == ["0", "1", "2", "3"]
    assert len({checksum for _, checksum in ends}) == 1


def test_rank_0_logs_each_step_once_and_the_loss_falls(four: tuple[Parameters, str]) -> None:
    pattern = r"^gpuyard_step step=(\d+) loss=([\d.]+) seconds=([\d.]+) samples_per_s=\d+ comm_seconds=([\d.]+)$"
    steps = re.findall(pattern, four[1], re.MULTILINE)
    assert [int(step[0]) for step in steps] == list(range(1, STEPS + 1))
    assert float(steps[-1][1]) < 0.8 * float(steps[0][1])
    assert all(0 < float(comm) < float(seconds) for _, _, seconds, comm in steps)


def test_a_batch_that_cannot_be_cut_evenly_is_refused_with_the_way_out() -> None:
    output = run("--global-batch=1022", code=2, WORLD_SIZE="4")
    assert "--global-batch 1022 cannot be cut evenly over 4 ranks: choose a multiple of 4" in output
    assert "start rank" not in output


@pytest.mark.parametrize("batch", ["0", "-4"])
def test_a_batch_of_nothing_is_refused(batch: str) -> None:
    assert f"--global-batch {batch} cannot be cut evenly" in run(f"--global-batch={batch}", code=2)


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.yaml")))
def test_the_job_files_name_what_is_there(name: str) -> None:
    job = yaml.safe_load((EXAMPLES / name).read_text())
    assert job["resources"]["gpus"] == job.get("layout", {"data": 1})["data"]
    script = job["command"].split()[0]
    assert script == "sh" or (EXAMPLES / script).is_file()
