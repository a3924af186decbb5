"""The simulated binding answers in the shape of AMD's own, as recorded from its package."""

import ast
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from amd_desk import Desk, desk

from workers.gpus import simulated_amd_names as names
from workers.gpus.amd_boards import AMD_CATALOGUE
from workers.gpus.simulated_amd_answers import Answers

__all__ = ["desk"]

RECORDED: dict[str, dict[str, list[str]]] = json.loads(
    Path(__file__).with_name("amdsmi_binding.json").read_text())["functions"]
FUNCTIONS = sorted(f"amdsmi_{name}" for name in vars(Answers) if not name.startswith("_"))
GPUS = Path(names.__file__).parent
SECOND: dict[str, Any] = {
    "amdsmi_get_temp_metric": (names.AmdSmiTemperatureType.HOTSPOT, names.AmdSmiTemperatureMetric.CURRENT),
    "amdsmi_get_clock_info": (names.AmdSmiClkType.GFX,),
    "amdsmi_get_gpu_memory_total": (names.AmdSmiMemoryType.VRAM,),
    "amdsmi_get_gpu_memory_usage": (names.AmdSmiMemoryType.VRAM,),
    "amdsmi_get_cpu_affinity_with_scope": (names.AmdSmiAffinityScope.NUMA_SCOPE,),
    "amdsmi_get_gpu_fan_speed": (0,), "amdsmi_get_gpu_fan_speed_max": (0,),
}


def keys(answer: Any) -> Iterator[str]:
    if isinstance(answer, dict):
        for key, value in answer.items():
            yield key
            yield from keys(value)
    elif isinstance(answer, list):
        for value in answer:
            yield from keys(value)


@pytest.mark.parametrize("topology", sorted(AMD_CATALOGUE.topologies))
@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_answer_has_the_keys_of_the_real_one(
    desk: Callable[[str], Desk], function: str, topology: str
) -> None:
    bench = desk(topology)
    bench.library.amdsmi_init()
    bench.machine.gpus[0].bad_pages = [0]
    first, second = bench.library.amdsmi_get_processor_handles()[:2]
    parameters = RECORDED[function]["parameters"]
    more = (second,) if "processor_handle_dst" in parameters else SECOND.get(function, ())
    assert len(parameters) == 1 + len(more)
    try:
        answer = getattr(bench.library, function)(first, *more)
    except names.AmdSmiLibraryException as error:
        assert error.err_code == 2  # not supported: of this board that is the answer
        return
    found, real = set(keys(answer)), set(RECORDED[function]["keys"])
    assert found <= real
    if function not in ("amdsmi_get_gpu_metrics_info", "amdsmi_get_gpu_process_list"):  # a wide table; none is there
        assert found == real


def test_the_driver_asks_for_nothing_that_the_real_binding_does_not_have() -> None:
    asked = {
        node.attr
        for path in (GPUS / "amdsmi.py", GPUS / "amd_details.py", GPUS / "amd_readings.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr.startswith("amdsmi_")
    }
    assert len(asked) > 20
    assert asked <= set(RECORDED)


def test_the_library_is_used_only_between_its_opening_and_its_closing(desk: Callable[[str], Desk]) -> None:
    library = desk("MI300X-8").library
    with pytest.raises(names.AmdSmiLibraryException) as caught:
        library.amdsmi_get_processor_handles()
    assert caught.value.err_code == 32
    with pytest.raises(names.AmdSmiParameterException):
        library.amdsmi_init(2)
    library.amdsmi_init()
    (old, *_) = library.amdsmi_get_processor_handles()
    with pytest.raises(names.AmdSmiParameterException):
        library.amdsmi_get_gpu_device_bdf("0000:0c:00.0")
    library.amdsmi_shut_down()
    library.amdsmi_init()
    with pytest.raises(names.AmdSmiLibraryException):
        library.amdsmi_get_gpu_device_bdf(old)
    with pytest.raises(AttributeError):
        library.amdsmi_get_gpu_horoscope(old)


@pytest.mark.parametrize(("code", "kind"), [(8, names.AmdSmiTimeoutException), (9, names.AmdSmiRetryException),
                                            (-12, names.AmdSmiLibraryException)])
def test_codes_become_the_exceptions_of_the_binding(code: int, kind: type[names.AmdSmiLibraryException]) -> None:
    error = names.library_exception(code)
    assert type(error) is kind and error.err_code == abs(code)
