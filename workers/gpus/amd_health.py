"""What has become worse with an AMD GPU since it was looked at last, as events."""

from typing import Any

from wire.hardware import GpuHardware, HealthEvent
from workers.gpus.amd_library import whole

SOURCE = "amdsmi"


class Watch:
    """The first look is only remembered: what was so before the reader started is no news."""

    def __init__(self) -> None:
        self._before: dict[str, GpuHardware] = {}
        self._uncorrected: dict[str, int] = {}
        self._events: list[HealthEvent] = []

    def drain(self) -> list[HealthEvent]:
        events, self._events = self._events, []
        return events

    def look(self, now: GpuHardware, ecc: dict[str, Any], bus: str | None, at: float) -> None:
        before = self._before.get(now.uuid)
        self._before[now.uuid] = now
        for kind, message in self._news(before, now, ecc):
            self._events.append(HealthEvent(at=at, key=f"{kind}:{now.uuid}:{round(at)}", kind=kind, gpu_uuid=now.uuid,
                                            pci_bus_id=bus, message=message, source=SOURCE))

    def _news(self, before: GpuHardware | None, now: GpuHardware, ecc: dict[str, Any]) -> list[tuple[str, str]]:
        news = self._ecc_news(now.uuid, whole(ecc.get("uncorrectable_count"), 64))
        if before is None:
            return news
        up = {link.link for link in before.links if link.active}
        fallen = [str(link.link) for link in now.links if link.active is False and link.link in up]
        if fallen:
            news.append(("link_down", f"XGMI link {', '.join(fallen)} went down."))
        if now.row_remap_failed and not before.row_remap_failed:
            news.append(("row_remap", "A bad memory page could not be taken out of use."))
        elif (now.rows_remapped_uncorrectable or 0) > (before.rows_remapped_uncorrectable or 0):
            news.append(("row_remap", f"{now.rows_remapped_uncorrectable} bad memory pages are out of use now."))
        return news

    def _ecc_news(self, uuid: str, uncorrected: int | None) -> list[tuple[str, str]]:
        if uncorrected is None:
            return []
        before = self._uncorrected.get(uuid)
        self._uncorrected[uuid] = uncorrected
        if before is None or uncorrected <= before:
            return []
        return [("ecc", f"{uncorrected - before} uncorrectable memory errors.")]
