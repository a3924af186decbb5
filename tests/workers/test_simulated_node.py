"""A fault script on a whole node: from its settings to what the portal hears."""

from pathlib import Path

from node_harness import MiniPortal, NodeProcess, node_url, wait_until


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
