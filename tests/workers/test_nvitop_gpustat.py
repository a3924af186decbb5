"""Two well-known monitors run on the simulated boards, unchanged, and show what our own driver shows."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
MIB = 1 << 20


def run(monitor: str, topology: str, script: str = "") -> tuple[list[dict[str, Any]], Any]:
    """-> ours, theirs. The process on GPU 1 is this one: the monitors look its owner and its command up."""
    answer = subprocess.run(
        [sys.executable, HERE / "monitors.py", monitor, topology, str(os.getpid()), script], text=True, check=True,
        capture_output=True, timeout=60, env=os.environ | {"PYTHONPATH": str(HERE.parents[1]), "TERM": "dumb"},
    )
    found = json.loads(answer.stdout.splitlines()[-1])
    return found["ours"], found["theirs"]


@pytest.mark.parametrize("topology", ["DGX-H100-8", "DGX-A100-8", "HGX-B200-8", "RTX4090-8-PCIe", "V100-DGX2-16"])
def test_nvitop_shows_the_same_boards_and_figures(topology: str) -> None:
    ours, theirs = run("nvitop", topology)
    assert [{name: value for name, value in one.items() if name != "parent"} for one in ours] == theirs
    assert theirs[1]["pids"] == [os.getpid()] and theirs[1]["utilization"] == 50
    assert theirs[0]["pids"] == [] and theirs[0]["utilization"] == 0


@pytest.mark.parametrize("topology", ["DGX-H100-8", "RTX4090-8-PCIe"])
def test_gpustat_shows_the_same_boards_and_figures(topology: str) -> None:
    ours, theirs = run("gpustat", topology)
    shown = [
        {
            "uuid": gpu["uuid"], "name": gpu["name"], "temperature": gpu["temperature.gpu"], "fan": gpu["fan.speed"],
            "utilization": gpu["utilization.gpu"], "power": gpu["power.draw"],
            "power_limit": gpu["enforced.power.limit"], "memory_used": gpu["memory.used"],
            "memory_total": gpu["memory.total"],
            "pids": [process["pid"] for process in gpu["processes"]],
        }
        for gpu in theirs["gpus"]
    ]
    units = {"memory_used": MIB, "memory_total": MIB, "power": 1000, "power_limit": 1000}
    assert shown == [{name: value // units[name] if name in units else value for name, value in one.items()
                      if name in shown[0]} for one in ours]
    assert f"/{os.getpid()}(" in theirs["text"] and shown[1]["utilization"] == 50
    assert theirs["driver_version"] == "570.158.01"


def test_nvitop_shows_the_slices_and_that_their_load_is_not_known() -> None:
    ours, theirs = run("nvitop", "A100-2-MIG")
    slices = [one for one in ours if one["parent"]]
    same = ("uuid", "name", "memory_used", "memory_total", "pids", "utilization")
    assert [[one[name] for name in same] for one in theirs[2:]] == [[one[name] for name in same] for one in slices]
    assert [one["pids"] for one in theirs] == [[], [os.getpid()], [os.getpid()], [], []]
    assert {one["utilization"] for one in theirs[1:]} == {None}


def test_the_monitors_survive_a_board_with_slices_and_a_lost_one() -> None:
    ours, theirs = run("gpustat", "A100-2-MIG")
    assert [gpu["utilization.gpu"] for gpu in theirs["gpus"]] == [0, None]
    whole = [one for one in ours if not one["parent"]]
    assert [gpu["memory.used"] for gpu in theirs["gpus"]] == [one["memory_used"] // MIB for one in whole]
    ours, theirs = run("gpustat", "HGX-H100-4", "gpu2:lost")
    assert [gpu.get("uuid") for gpu in theirs["gpus"]] == [
        ours[0]["uuid"], ours[1]["uuid"], None, ours[2]["uuid"]]
