"""What every driver of GPUs offers, whoever made the cards."""

from dataclasses import dataclass, field
from typing import Protocol

from wire.hardware import GpuHardware, HealthEvent, MigOrder
from wire.reports import GpuInfo, GpuReading, Link


class DriverUnavailable(Exception):
    """The vendor's library cannot be used. The message is one sentence that names the cause and the way out."""


class OrderFailed(Exception):
    """A change that was ordered did not happen. `undone`: it had begun, and what was before is back."""

    def __init__(self, sentence: str, undone: bool = False) -> None:
        super().__init__(sentence)
        self.undone = undone


@dataclass(frozen=True, slots=True)
class GpuList:
    """One enumeration. A GPU that does not answer is left out of `infos` and named in `problem`."""

    infos: list[GpuInfo] = field(default_factory=list)
    links: list[Link] = field(default_factory=list)
    nvswitch: bool = False
    driver: str | None = None
    cuda: str | None = None
    problem: str | None = None


class GpuDriver(Protocol):
    """Used by one thread of one process. Any call may hang in the vendor's library: the caller watches it."""

    at_work: int | None
    """Index of the GPU being asked now, so that a watcher can name the one that hangs."""

    def start(self) -> None:
        """Raises DriverUnavailable."""

    def enumerate(self) -> GpuList:
        """Lists the GPUs anew. Raises DriverUnavailable."""

    def read(self) -> list[GpuReading]:
        """One reading per GPU that is known, also of those that do not answer. Never raises for one of them."""

    def renew(self) -> bool:
        """Opens the library anew if what it answered calls for that, else does nothing. Raises DriverUnavailable."""

    def hardware(self) -> list[GpuHardware]:
        """The slow-moving details of every whole GPU that answers. Never raises for one of them."""

    def events(self) -> list[HealthEvent]:
        """What the driver has to tell since the call before. Never waits."""

    def set_mig(self, order: MigOrder) -> None:
        """Raises OrderFailed. Afterwards the GPUs have to be listed anew, whatever came out."""

    def release(self) -> None:
        """Lets go of the library, so that a GPU can be reset, until `start` and `enumerate` are called again."""

    def close(self) -> None: ...
