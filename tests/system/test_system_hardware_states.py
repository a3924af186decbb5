"""Every state of a GPU and of its driver, made by a scripted fault, read over REST and by Prometheus.

What the page shows of them is in test_browser_hardware.
"""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.system.yard import Yard, running

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

FAULTS = (
    "gpu0:hang@20s+300s gpu1:lost@14s gpu2:memstuck gpu3:xid79@14s+5s gpu4:ecc@14s gpu5:nvlink2down@14s gpu6:throttle "
    "gpu7:badpids"
)
STATES = {0: "suspect", 1: "lost", 2: "dirty", 3: "quarantined", 4: "suspect", 5: "suspect", 6: "ok", 7: "ok"}


@pytest.fixture(scope="module")
def yard() -> Iterator[Yard]:
    with running(simulate="DGX-H100-8", faults=FAULTS) as yard:
        yard.wait("every fault has shown", lambda: states(yard) == STATES, 120)
        yield yard


def test_each_fault_gives_its_gpu_a_state_with_a_reason_and_harms_no_other(yard: Yard) -> None:
    gpus = {gpu["index"]: gpu for gpu in yard.bob.gpus()}
    assert {index: gpu["state"] for index, gpu in gpus.items()} == STATES
    assert all(gpu["state_reason"] for gpu in gpus.values() if gpu["state"] != "ok")
    assert [index for index, gpu in gpus.items() if gpu["free"]] == [6, 7]
    for index in (2, 3, 4, 5, 6, 7):
        reading = gpus[index]["latest"]
        assert reading["power_mw"] > 0 and reading["temperature_c"] > 0, "a neighbour's fault hides nothing of it"
    assert gpus[1]["latest"].get("power_mw") is None, "what is not known is not zero"


def test_what_happened_is_told_with_its_meaning_and_advice(yard: Yard) -> None:
    expected = {(0, "hang"), (1, "lost"), (2, "memory"), (3, "xid"), (4, "ecc"), (5, "xid"), (6, "throttle")}
    found = yard.wait("all is told", lambda: expected <= set(told := findings(yard)) and told, 60)
    assert found[3, "xid"]["code"] == 79 and found[3, "xid"]["meaning"] and found[3, "xid"]["advice"]


def test_prometheus_reads_the_same_states_and_leaves_out_what_is_not_known(yard: Yard) -> None:
    samples = scrape(yard)
    by_state = {labels["state"]: value for name, labels, value in samples if name == "gpuyard_gpus"}
    assert {state: by_state[state] for state in ("suspect", "lost", "dirty", "quarantined", "ok")} == {
        "suspect": 3, "lost": 1, "dirty": 1, "quarantined": 1, "ok": 2,
    }  # fmt: skip
    xids = {labels["xid"] for name, labels, _ in samples if name == "gpuyard_gpu_xid_errors_total"}
    assert "79" in xids
    power = {labels["gpu"] for name, labels, _ in samples if name == "DCGM_FI_DEV_POWER_USAGE"}
    assert {"2", "3", "4", "5", "6", "7"} <= power and "1" not in power


def test_jobs_run_on_the_healthy_ones_alone(yard: Yard) -> None:
    number = yard.submit("true", gpus=2)
    job = yard.ended(number, timeout_s=60)
    assert job["state"] == "succeeded" and {held["index"] for held in job["allocation"]} == {6, 7}
    waiting = yard.submit("true", gpus=3)
    reason = yard.wait("the reason", lambda: yard.job(waiting)["reason"])
    assert "GPU" in reason["message"]
    yard.bob.cancel(waiting)
    yard.ended(waiting)


@pytest.mark.parametrize(("fault", "word"), [("mismatch", "differ"), ("unloaded", "not loaded")])
def test_a_driver_that_goes_is_a_sentence_about_the_node_and_not_a_node_without_gpus(fault: str, word: str) -> None:
    with running(simulate="HGX-H100-4", faults=f"node:{fault}@8s") as yard:
        assert len(yard.bob.gpus()) == 4
        node = yard.wait("the node says what is wrong", lambda: (one := yard.bob.nodes()[0])["problem"] and one, 60)
        assert word in node["problem"] and node["state"] == "ready"
        number = yard.submit("echo the node still works", gpus=0)
        assert yard.ended(number)["state"] == "succeeded"


def states(yard: Yard) -> dict[int, str]:
    return {gpu["index"]: gpu["state"] for gpu in yard.bob.gpus()}


def findings(yard: Yard) -> dict[tuple[int, str], dict[str, Any]]:
    name = yard.bob.nodes()[0]["name"]
    listed = yard.bob._json("GET", f"nodes/{name}/health")["findings"]
    return {(finding["gpu_index"], finding["kind"]): finding for finding in listed}


def scrape(yard: Yard) -> list[tuple[str, dict[str, str], float]]:
    admin = {"Authorization": f"Bearer {yard.stack.token('alice')}"}
    answer = httpx.get(f"{yard.stack.options.url}/metrics", headers=admin, timeout=10)
    assert answer.status_code == 200
    families = text_string_to_metric_families(answer.text)
    return [(sample.name, sample.labels, sample.value) for family in families for sample in family.samples]
