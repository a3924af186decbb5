"""A portal with a node of eight MI300X: listed, wired, placed, and a job that is told of its cards as ROCm wants it."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.system.yard import Yard, running

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def yard() -> Iterator[Yard]:
    with running(simulate="MI300X-8") as yard:
        yield yard


def get(yard: Yard, path: str) -> dict[str, Any]:
    found: dict[str, Any] = yard.bob._json("GET", path)
    return found


def test_its_cards_are_listed_and_wired(yard: Yard) -> None:
    gpus = yard.wait("eight cards are free", lambda: yard.free_gpus() == 8 and yard.bob.gpus())
    assert {(gpu["vendor"], gpu["model"]) for gpu in gpus} == {("amd", "MI300X")}
    name = gpus[0]["node"]

    def told() -> dict[str, Any] | None:
        found = get(yard, f"/nodes/{name}/topology")
        return found if found["nics"] else None

    wired = yard.wait("the details have come", told)
    assert {(pair["kind"], pair["nominal_gbs"]) for pair in wired["links"]} == {("XGMI", 128.0)}
    assert [gpu["nvlinks"] for gpu in wired["gpus"]] == [7] * 8 and len(wired["nics"]) == 8
    assert wired["nics"][3]["distances"][wired["gpus"][3]["uuid"]] == "PIX"


def test_a_job_is_told_of_its_cards_and_is_seen_on_them(yard: Yard) -> None:
    code = yard.state_dir / "hold.py"
    code.write_text("import os, time\nfor name in sorted(os.environ): print(name, os.environ[name], sep='=')\n"
                    "print('up', flush=True)\ntime.sleep(600)\n")
    number = yard.submit(f"python {code}", gpus=2)
    running = yard.reaches(number, "running")
    held = [place["uuid"] for place in running["allocation"]]

    def on_cards() -> bool:
        gpus = {gpu["uuid"]: gpu for gpu in yard.bob.gpus()}
        return all((gpus[uuid]["latest"]["memory_used_bytes"] or 0) > 2**29 for uuid in held)

    yard.wait("its memory is seen on both cards", on_cards)
    yard.bob.cancel(number)
    yard.ended(number, timeout_s=60)
    seen = dict(line.split("=", 1) for line in yard.log(number).decode().splitlines() if "=" in line)
    assert seen["ROCR_VISIBLE_DEVICES"].split(",") == held and seen["HIP_VISIBLE_DEVICES"] == "0,1"
    assert seen["CUDA_VISIBLE_DEVICES"] == ""
    yard.wait("every card is free again", lambda: yard.free_gpus() == 8)
