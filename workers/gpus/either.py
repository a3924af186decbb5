"""The GPUs of a machine, whoever made them: those of NVIDIA first, then those of AMD.

A maker whose library is absent is worth a sentence only where one of its cards sits on the bus, or where nobody else
has any.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from wire.hardware import GpuHardware, HealthEvent, MigOrder
from wire.reports import GpuReading
from workers.gpus.amdsmi import AmdSmiDriver
from workers.gpus.base import DriverUnavailable, GpuDriver, GpuList, OrderFailed
from workers.gpus.nvml import NvmlDriver

PCI_DEVICES = Path("/sys/bus/pci/devices")
COMPUTE_CLASSES = ("0x0302", "0x0380", "0x1200")
VGA_CLASS = "0x0300"


@dataclass(frozen=True, slots=True)
class Maker:
    name: str
    pci_vendor: str
    pci_classes: tuple[str, ...]

    def has_cards(self, root: Path) -> bool:
        return any(content(card / "vendor") == self.pci_vendor and content(card / "class")[:6] in self.pci_classes
                   for card in sorted(root.glob("*")))


NVIDIA = Maker("nvidia", "0x10de", (VGA_CLASS, *COMPUTE_CLASSES))
# With VGA, a processor's own graphics would count as a card.
AMD = Maker("amd", "0x1002", COMPUTE_CLASSES)


class EitherDriver:
    def __init__(self, skip: Collection[int] = (), *, nvidia: GpuDriver | None = None, amd: AmdSmiDriver | None = None,
                 pci_devices: Path = PCI_DEVICES) -> None:
        self._amd = amd or AmdSmiDriver(skip)
        self._all: list[tuple[Maker, GpuDriver]] = [(NVIDIA, nvidia or NvmlDriver(skip)), (AMD, self._amd)]
        self._pci_devices = pci_devices
        self._awake: list[GpuDriver] = []
        self._problems: list[str] = []

    @property
    def at_work(self) -> int | None:
        return next((driver.at_work for _, driver in self._all if driver.at_work is not None), None)

    def start(self) -> None:
        self._awake, self._problems = [], []
        refusals: dict[str, DriverUnavailable] = {}
        for maker, driver in self._all:
            try:
                driver.start()
            except DriverUnavailable as error:
                refusals[maker.name] = error
                if maker.has_cards(self._pci_devices):
                    self._problems.append(str(error))
            else:
                self._awake.append(driver)
        if not self._awake:
            raise DriverUnavailable(" ".join(self._problems) or str(refusals[NVIDIA.name]))

    def enumerate(self) -> GpuList:
        """A maker without a card here has nothing to say as long as the other one has some."""
        lists: list[GpuList] = []
        refusals: list[str] = []
        for driver in self._awake:
            if driver is self._amd:
                self._amd.first_index = max((info.index + 1 for one in lists for info in one.infos), default=0)
            try:
                lists.append(driver.enumerate())
            except DriverUnavailable as error:  # it may be back at the next look; the other maker's cards are there
                refusals.append(str(error))
        if not lists:
            raise DriverUnavailable(" ".join(refusals))
        full = [one for one in lists if one.infos] or lists
        problems = [*self._problems, *refusals, *(one.problem for one in full if one.problem)]
        return GpuList(
            infos=[info for one in full for info in one.infos], links=[link for one in full for link in one.links],
            nvswitch=any(one.nvswitch for one in full),
            driver=", ".join(one.driver for one in full if one.driver) or None,
            cuda=next((one.cuda for one in full if one.cuda), None), problem=" ".join(problems) or None,
        )

    def read(self) -> list[GpuReading]:
        return list(chain.from_iterable(driver.read() for driver in self._awake))

    def renew(self) -> bool:
        renewed = [driver.renew() for driver in self._awake]  # each of them, not only up to the first
        return any(renewed)

    def hardware(self) -> list[GpuHardware]:
        return list(chain.from_iterable(driver.hardware() for driver in self._awake))

    def events(self) -> list[HealthEvent]:
        return list(chain.from_iterable(driver.events() for driver in self._awake))

    def set_mig(self, order: MigOrder) -> None:
        nvidia = self._all[0][1]
        if nvidia not in self._awake:
            raise OrderFailed("The NVIDIA driver of this node does not work: no GPU of it can be cut.")
        nvidia.set_mig(order)

    def release(self) -> None:
        self._each(lambda driver: driver.release())

    def close(self) -> None:
        self._each(lambda driver: driver.close())

    def _each(self, act: Callable[[GpuDriver], None]) -> None:
        for driver in self._awake:
            act(driver)


def content(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
