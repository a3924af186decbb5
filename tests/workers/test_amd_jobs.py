"""What a job on AMD GPUs is told of them."""

from pathlib import Path

import pytest
from yard import Yard

from wire.desired import GpuSlot
from workers.launchers import load

AMD = [GpuSlot(f"GPU-{serial:016x}", index, "amd") for index, serial in enumerate((0xABC, 0xDEF, 0x123))]
NVIDIA = [GpuSlot(f"GPU-0000000{index}-0000-0000-0000-000000000000", index) for index in range(2)]


@pytest.mark.parametrize("launcher", ["script", "torchrun"])
@pytest.mark.parametrize(("gpus", "cuda", "rocr", "hip"), [
    (AMD[1:], "", "GPU-0000000000000def,GPU-0000000000000123", "0,1"),
    (NVIDIA[:1], NVIDIA[0].uuid, "", None),
    ([], "", "", None),
    ([NVIDIA[0], AMD[2]], NVIDIA[0].uuid, "GPU-0000000000000123", "0"),
    ([GpuSlot("GPU-0000000000000abc/3", 3, "amd"), AMD[1]], "", "3,GPU-0000000000000def", "0,1"),
])
def test_each_maker_is_told_of_its_own_cards_and_of_no_others(
    tmp_path: Path, launcher: str, gpus: list[GpuSlot], cuda: str, rocr: str, hip: str | None
) -> None:
    yard = Yard(tmp_path)
    order = yard.order("true", gpus=gpus, env={"ROCR_VISIBLE_DEVICES": "7"})
    env = load(launcher).plan(order, yard.spool.create(order)).env
    assert (env["CUDA_VISIBLE_DEVICES"], env["ROCR_VISIBLE_DEVICES"]) == (cuda, rocr)
    assert env.get("HIP_VISIBLE_DEVICES") == hip
    yard.clear()
