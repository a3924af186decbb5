"""The simulated node of the all-in-one: what it is told."""

import json
from pathlib import Path

import pytest

from allinone.commands import Commands
from allinone.faults import Fault
from allinone.options import Options
from wire import names


def commands(state_dir: Path, monkeypatch: pytest.MonkeyPatch, **env: str) -> Commands:
    for key, value in env.items():
        monkeypatch.setenv(key, value)
    return Commands(Options.load({"GPUYARD_STATE_DIR": str(state_dir), **env}), "postgresql://none/none", "redis://none")


def joined(options: Commands, monkeypatch: pytest.MonkeyPatch) -> str:
    """Joins without a portal; -> what the node keeps."""
    answer = {"node": "node1", "portal_public_key": "ab" * 32, "broker_url": "redis://none", "protocol": names.PROTOCOL}
    monkeypatch.setattr(Commands, "manage", lambda *_: json.dumps(answer))
    options.join_node()
    return (options.node_dir / "node.json").read_text()


def test_faults_reach_the_node_and_are_gone_when_they_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faulty = commands(tmp_path, monkeypatch, GPUYARD_SIMULATE="HGX-H100-4", GPUYARD_FAULTS="gpu3:lost@60s gpu1:ecc@5s")
    assert '"faults": "gpu3:lost@60s gpu1:ecc@5s"' in joined(faulty, monkeypatch)
    assert "GPUYARD_FAULTS" not in faulty.node_env()
    monkeypatch.delenv("GPUYARD_FAULTS")
    assert '"faults"' not in joined(commands(tmp_path, monkeypatch, GPUYARD_SIMULATE="HGX-H100-4"), monkeypatch)


def test_a_wrong_fault_stops_the_start_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = commands(tmp_path, monkeypatch, GPUYARD_SIMULATE="HGX-H100-4", GPUYARD_FAULTS="gpu4:lost@60s")
    with pytest.raises(Fault, match="names GPU 4, but the node has 4, counted from 0"):
        joined(wrong, monkeypatch)
