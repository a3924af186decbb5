"""Faults of the simulated driver, so that what real GPUs do in the field can be tried on a desk.

The file that GPUYARD_SIM_FAULTS names is read again whenever it changes, also by a reader that is running:

    {"lost": [3], "everything": 18, "missing": ["nvmlDeviceGetMemoryInfo_v2"],
     "returns": [{"symbol": "nvmlDeviceGetPowerUsage", "gpu": 2, "code": 3}],
     "delays": [{"symbol": "nvmlDeviceGetUtilizationRates", "gpu": "GPU-…", "seconds": 3600}],
     "texts": [{"symbol": "nvmlDeviceGetName", "gpu": 0, "hex": "ff0041"}]}

`everything` is the code that every call answers. A GPU is named by index or UUID; without `gpu` a fault meets every
GPU and the calls that are about none.
"""

import os
from collections.abc import Callable
from pathlib import Path

import msgspec

FAULTS_VARIABLE = "GPUYARD_SIM_FAULTS"

GpuName = int | str


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    symbol: str
    gpu: GpuName | None = None

    def meets(self, symbol: str, names: tuple[GpuName, ...]) -> bool:
        return self.symbol == symbol and (self.gpu is None or self.gpu in names)


class Return(Fault, frozen=True, kw_only=True):
    code: int


class Delay(Fault, frozen=True, kw_only=True):
    seconds: float


class Text(Fault, frozen=True, kw_only=True):
    hex: str


class Faults(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    lost: list[GpuName] = []
    missing: list[str] = []
    returns: list[Return] = []
    delays: list[Delay] = []
    texts: list[Text] = []
    everything: int | None = None

    def code(self, symbol: str, names: tuple[GpuName, ...]) -> int | None:
        return next((fault.code for fault in self.returns if fault.meets(symbol, names)), None)

    def delay_s(self, symbol: str, names: tuple[GpuName, ...]) -> float:
        return sum(fault.seconds for fault in self.delays if fault.meets(symbol, names))

    def text(self, symbol: str, names: tuple[GpuName, ...]) -> bytes | None:
        return next((bytes.fromhex(fault.hex) for fault in self.texts if fault.meets(symbol, names)), None)

    def is_lost(self, names: tuple[GpuName, ...]) -> bool:
        return any(name in self.lost for name in names)


FaultSource = Callable[[], Faults]
NONE = Faults()


def no_faults() -> Faults:
    return NONE


class FaultFile:
    """A source that follows a file. A file that is absent means no faults; one half written leaves the ones before."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int] | None = None
        self._faults = NONE

    def __call__(self) -> Faults:
        try:
            status = self._path.stat()
        except OSError:
            self._seen, self._faults = None, NONE
            return NONE
        seen = (status.st_mtime_ns, status.st_size)
        if seen != self._seen:
            self._read(seen)
        return self._faults

    def _read(self, seen: tuple[int, int]) -> None:
        try:
            self._faults = msgspec.json.decode(self._path.read_bytes(), type=Faults)
            self._seen = seen
        except (OSError, msgspec.MsgspecError):
            self._seen = None


def source_from_environment() -> FaultSource:
    path = os.environ.get(FAULTS_VARIABLE)
    return FaultFile(Path(path)) if path else no_faults
