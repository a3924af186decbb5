"""Finding the vendor's binding, and machines that have cards of one maker, of both, or of none."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from wire.hardware import MigOrder
from workers.gpus import AUTO, DriverUnavailable, OrderFailed, amd_library, load, simulated, simulated_amd
from workers.gpus.amdsmi import AmdSmiDriver
from workers.gpus.either import EitherDriver
from workers.gpus.faults import Faults, Return
from workers.gpus.nvml import NvmlDriver

# What the binding does at import when its library is absent: it prints, goes on, and stumbles.
STUMBLES = """
import ctypes
_libraries = {}
try:
    _libraries["libamd_smi.so"] = ctypes.CDLL("/nowhere/libamd_smi.so")
except OSError as error:
    print(error)
    print("Unable to find libamd_smi.so library try installing amd-smi-lib from your package manager")
_libraries["libamd_smi.so"].amdsmi_free_name_value_pairs
"""
OTHER_VERSION = """
import ctypes
ctypes.CDLL(None).amdsmi_function_of_another_release
"""
NVIDIA_MISMATCH = Faults(returns=[Return(symbol=symbol, code=18) for symbol in ("nvmlInitWithFlags", "nvmlInit_v2")])
NVIDIA_ABSENT = Faults(returns=[Return(symbol=symbol, code=12) for symbol in ("nvmlInitWithFlags", "nvmlInit_v2")])
AMD_NOT_LOADED = Faults(returns=[Return(symbol="amdsmi_init", code=34)])

Both = Callable[..., EitherDriver]


@pytest.fixture
def rocm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """A ROCm whose binding does at import what the test says."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "amdsmi", raising=False)
    monkeypatch.setenv("ROCM_PATH", str(tmp_path))

    def install(code: str) -> Path:
        package = tmp_path / "share" / "amd_smi" / "amdsmi"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(code)
        return package

    return install


@pytest.fixture
def both(tmp_path: Path) -> Iterator[Both]:
    """A machine with an NVIDIA node of 4 and an AMD node of 8, each with faults of its own."""

    def make(nvidia: Faults | None = None, amd: Faults | None = None, cards: tuple[str, ...] = ()) -> EitherDriver:
        simulated.install("HGX-H100-4", "both", lambda: nvidia or Faults())
        simulated_amd.install("MI300X-8", "both", lambda: amd or Faults())
        for place, card in enumerate(cards):
            device = tmp_path / f"0000:{place:02x}:00.0"
            device.mkdir()
            vendor, kind = card.split()
            (device / "vendor").write_text(vendor + "\n")
            (device / "class").write_text(kind + "\n")
        return EitherDriver(pci_devices=tmp_path)

    yield make
    simulated.uninstall()
    simulated_amd.uninstall()


def test_a_binding_without_its_library_is_one_sentence_and_prints_nothing(
    rocm: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    rocm(STUMBLES)
    with pytest.raises(DriverUnavailable, match=r"libamd_smi.so was not found: install the package amd-smi-lib"):
        AmdSmiDriver().start()
    assert capsys.readouterr().out == ""


def test_a_binding_of_another_release_than_the_library_is_named(rocm: Callable[[str], Path]) -> None:
    rocm(OTHER_VERSION)
    with pytest.raises(DriverUnavailable, match=r"does not fit its library .*amdsmi_function_of_another_release"):
        AmdSmiDriver().start()


def test_no_binding_at_all_is_named(rocm: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if not (Path(entry) / "amdsmi").is_dir()])
    with pytest.raises(DriverUnavailable, match="binding amdsmi is not installed"):
        AmdSmiDriver().start()


def test_the_binding_of_the_nodes_own_rocm_comes_before_others(
    rocm: Callable[[str], Path], tmp_path: Path
) -> None:
    other = tmp_path / "other" / "amdsmi"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("raise ImportError('of pip')")
    sys.path.insert(0, str(other.parent))
    package = rocm("ORIGIN = __file__")
    assert Path(amd_library.load().ORIGIN) == package / "__init__.py"


def test_a_machine_with_both_makers_lists_both(both: Both) -> None:
    driver = both()
    driver.start()
    gpus = driver.enumerate()
    assert [info.vendor for info in gpus.infos] == ["nvidia"] * 4 + ["amd"] * 8
    assert [info.index for info in gpus.infos] == list(range(12))
    assert (gpus.cuda, gpus.problem) == ("12.8", None) and "ROCm" in (gpus.driver or "")
    assert {link.kind for link in gpus.links} == {"NV6", "XGMI"} and len(gpus.links) == 6 + 28
    readings = driver.read()
    assert [one.uuid for one in readings] == [info.uuid for info in gpus.infos]
    assert all("gpu" not in one.missing for one in readings) and driver.at_work is None
    with pytest.raises(OrderFailed):
        driver.set_mig(MigOrder(id="1", gpu_uuid=gpus.infos[4].uuid))
    driver.close()


@pytest.mark.parametrize("maker", ["nvidia", "amd"])
def test_a_driver_that_goes_away_leaves_the_other_makers_cards_and_may_come_back(both: Both, maker: str) -> None:
    both()
    away = Faults()
    simulated.install("HGX-H100-4", "both", lambda: away if maker == "nvidia" else Faults())
    simulated_amd.install("MI300X-8", "both", lambda: away if maker == "amd" else Faults())
    driver = EitherDriver(pci_devices=Path("/nowhere"))
    driver.start()
    before = driver.enumerate()
    away = Faults(everything=9 if maker == "nvidia" else 34)
    after = driver.enumerate()
    assert {info.vendor for info in after.infos} == {"amd" if maker == "nvidia" else "nvidia"}
    assert "not loaded" in (after.problem or "")
    away = Faults()
    driver.renew()
    assert driver.enumerate() == before


def test_a_gpu_of_the_second_maker_that_must_not_be_asked_keeps_its_index(both: Both) -> None:
    both()
    driver = EitherDriver(skip=[6])
    driver.start()
    gpus = driver.enumerate()
    assert [info.index for info in gpus.infos] == [0, 1, 2, 3, 4, 5, 7, 8, 9, 10, 11]
    assert "GPU 6 does not answer (timeout)" in (gpus.problem or "")


@pytest.mark.parametrize(("cards", "problem"), [
    ((), None),
    (("0x10de 0x030200",), "driver and library versions differ"),
    (("0x1002 0x120000",), None),
])
def test_a_maker_that_fails_is_a_problem_only_where_it_has_a_card(
    both: Both, cards: tuple[str, ...], problem: str | None
) -> None:
    driver = both(nvidia=NVIDIA_MISMATCH, cards=cards)
    driver.start()
    gpus = driver.enumerate()
    assert {info.vendor for info in gpus.infos} == {"amd"} and gpus.infos[0].index == 0
    assert (problem in (gpus.problem or "")) if problem else gpus.problem is None


def test_graphics_of_a_processor_are_no_reason_to_ask_for_the_binding(both: Both) -> None:
    driver = both(amd=AMD_NOT_LOADED, cards=("0x1002 0x030000", "0x10de 0x030200"))
    driver.start()
    gpus = driver.enumerate()
    assert len(gpus.infos) == 4 and gpus.problem is None


@pytest.mark.parametrize(("cards", "sentence"), [
    ((), "NVIDIA"),
    (("0x10de 0x030000",), "NVIDIA"),
    (("0x1002 0x038000",), "amdgpu driver is not loaded"),
])
def test_where_nobody_works_the_maker_whose_card_is_there_is_heard(
    both: Both, cards: tuple[str, ...], sentence: str
) -> None:
    driver = both(nvidia=NVIDIA_ABSENT, amd=AMD_NOT_LOADED, cards=cards)
    with pytest.raises(DriverUnavailable, match=sentence) as caught:
        driver.start()
    assert ("amdgpu" in str(caught.value)) is (sentence != "NVIDIA")


def test_auto_looks_for_both_and_each_maker_can_be_asked_for_alone() -> None:
    assert isinstance(load(AUTO), EitherDriver)
    assert isinstance(load("amdsmi"), AmdSmiDriver) and isinstance(load("nvml"), NvmlDriver)


def test_a_machine_without_gpus_says_one_sentence() -> None:
    if Path("/proc/driver/nvidia").exists() or Path("/sys/module/amdgpu").exists():
        pytest.skip("this machine has GPUs")
    with pytest.raises(DriverUnavailable) as caught:
        load(AUTO).start()
    assert str(caught.value).count(". ") == 0 and os.linesep not in str(caught.value)
