"""A fault script on a whole node: from its settings to what the portal hears."""

import os
import signal
from pathlib import Path

import pytest
from node_harness import MiniPortal, NodeProcess, node_url, wait_until

from wire.hardware import MigOrder, MigSlice
from workers.gpus.fault_script import STATE_VARIABLE
from workers.telemetry import Limits, Reader


def test_a_node_tells_the_portal_of_the_gpu_that_its_script_loses(
    tmp_path: Path, portal: MiniPortal, broker_url: str
) -> None:
    node = NodeProcess(tmp_path, portal, node_url(broker_url, portal), GPUYARD_NODE_FAULTS="gpu3:lost@3s gpu1:xid94@3s")
    portal.meet(node.public_key)
    node.start()
    try:
        portal.wait(lambda: portal.inventories and len(portal.inventories[-1].gpus) == 7)
        newest = portal.inventories[-1]
        assert [gpu.index for gpu in newest.gpus] == [0, 1, 2, 4, 5, 6, 7]
        assert newest.simulated and "GPU 3" in (newest.problem or "")
        portal.wait(lambda: {(event.kind, event.code) for event in portal.health} >= {("xid", 79), ("xid", 94)})
        wait_until(lambda: (node.state_dir / "simulated.told.json").exists())
    finally:
        node.leave_nothing()


def slices(reader: Reader) -> list[tuple[str, str | None]]:
    gpus = reader.inventory()
    return [(info.uuid, info.mig_profile) for info in gpus.infos if info.parent_uuid] if gpus else []


def test_slices_that_an_order_cut_survive_the_process_that_cut_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(STATE_VARIABLE, str(tmp_path / "simulated.json"))
    reader = Reader("simulated", "DGX-H100-8", "cut", interval_s=0.1,
                    limits=Limits(start_deadline_s=20.0, restart_delays_s=(0.05,)))
    reader.start()
    try:
        wait_until(lambda: reader.status == "ok")
        uuid = next(info.uuid for info in (reader.inventory() or pytest.fail("nothing listed")).infos)
        layout = [MigSlice("3g.40gb", 0), MigSlice("2g.20gb", 4), MigSlice("1g.10gb", 6)]
        reader.carry_out(MigOrder(id="o1", gpu_uuid=uuid, layout=layout))
        results: list[str] = []
        wait_until(lambda: results.extend(result.state for result in reader.results()) or "done" in results)
        wait_until(lambda: len(slices(reader)) == 3)
        cut, pid = slices(reader), reader.pid
        assert sorted(profile or "" for _, profile in cut) == ["1g.10gb", "2g.20gb", "3g.40gb"]
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: reader.pid not in (None, pid) and reader.status == "ok")
        assert sorted(slices(reader)) == sorted(cut)
    finally:
        reader.stop()
