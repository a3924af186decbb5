"""Health over REST: everyone signed in may look, only an administrator may act."""

import time
from typing import Any

from portal.models import HardwareOrder, Node
from portal.services import health
from tests.portal.conftest import Api, make_node
from wire.hardware import HealthEvent


def fenced() -> Node:
    node = make_node(gpus=2)
    gpu = node.gpus.get(index=0)
    health.report(node, HealthEvent(at=time.time(), key="k", kind="xid", code=79, gpu_uuid=gpu.uuid, source="nvml"))
    return node


def uuid(node: Node, index: int = 0) -> str:
    return node.gpus.get(index=index).uuid


def test_states_and_findings_are_shown_with_meaning_and_advice(api: dict[str, Api]) -> None:
    node = fenced()
    shown = api["charlie"].get("/nodes/n1/health").json()
    assert [(gpu["index"], gpu["state"]) for gpu in shown["gpus"]] == [(0, "quarantined"), (1, "ok")]
    assert shown["gpus"][0]["state_reason"].startswith("Xid 79: ")
    (one,) = shown["findings"]
    assert (one["gpu_uuid"], one["code"], one["severity"], one["resolved_at"]) == (uuid(node), 79, "critical", None)
    assert "restart" in one["advice"].lower() and one["meaning"]
    assert api["nobody"].get("/nodes/n1/health").status_code == 401
    assert api["bob"].get("/nodes/n2/health").status_code == 404


def test_an_administrator_releases_a_gpu_and_a_member_does_not(api: dict[str, Api]) -> None:
    node = fenced()
    refused = api["bob"].post(f"/gpus/{uuid(node)}/release")
    assert (refused.status_code, refused.json()["type"]) == (403, "not_permitted")
    assert api["nobody"].post(f"/gpus/{uuid(node)}/release").status_code == 401
    released = api["alice"].post(f"/gpus/{uuid(node)}/release")
    assert (released.status_code, released.json()["state"]) == (200, "ok")
    assert api["alice"].post(f"/gpus/{uuid(node)}/release").json()["state"] == "ok", "once more is harmless"
    (one,) = api["bob"].get("/nodes/n1/health").json()["findings"]
    assert one["resolved_by"] == "alice"
    assert api["alice"].post("/gpus/GPU-none/release").status_code == 404


def test_a_quarantine_needs_a_reason(api: dict[str, Api]) -> None:
    node = fenced()
    path = f"/gpus/{uuid(node, 1)}/quarantine"
    assert api["alice"].post(path, {"reason": ""}).status_code in {400, 422}
    assert api["alice"].post(path, {"why": "x"}).status_code in {400, 422}
    assert api["bob"].post(path, {"reason": "x"}).status_code == 403
    taken: Any = api["alice"].post(path, {"reason": "fan rattles"}).json()
    assert (taken["state"], taken["state_reason"]) == ("quarantined", "Quarantined by alice: fan rattles")


def test_the_driver_is_let_go_of_by_an_order(api: dict[str, Api]) -> None:
    make_node(gpus=1)
    assert api["bob"].post("/nodes/n1/release-driver", {"seconds": 30}).status_code == 403
    answer = api["alice"].post("/nodes/n1/release-driver", {"seconds": 30})
    assert (answer.status_code, answer.json()["kind"], answer.json()["state"]) == (200, "release", "sent")
    assert HardwareOrder.objects.get().order["duration_s"] == 30.0
    assert api["alice"].post("/nodes/n1/release-driver", {"seconds": 1e9}).status_code == 422
