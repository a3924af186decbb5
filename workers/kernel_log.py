"""Xid and SXid lines of the kernel log. NVML does not tell of every one, and of none once it hangs."""

import errno
import logging
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from wire.hardware import HealthEvent

PATH_VARIABLE = "GPUYARD_KMSG"
DEFAULT_PATH = Path("/dev/kmsg")
LINE = re.compile(r"(?P<kind>NVRM: Xid|SXid) \(PCI:(?P<place>[0-9a-fA-F:.]+)[^)]*\): (?P<code>\d+)(?:, ?(?P<said>.*))?")
KINDS = {"NVRM: Xid": "xid", "SXid": "sxid"}
RECORD_BYTES = 16 * 1024  # more than the kernel writes in one; a shorter read would be refused
READS_MOST = 2000  # in one turn: a flood must not hold up the rest
LOOK_AGAIN_S = 5.0
MESSAGE_CHARS = 300

logger = logging.getLogger(__name__)


class KernelLog:
    """Follows the log from where it ends now. Nothing here blocks or raises."""

    def __init__(self, path: Path | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path or Path(os.environ.get(PATH_VARIABLE) or DEFAULT_PATH)
        self._clock = clock
        self._descriptor: int | None = None
        self._rest = b""
        self._complained = False
        self._tried_at = float("-inf")
        self._was_absent = False

    def read(self) -> list[HealthEvent]:
        """What was written since the call before."""
        if self._descriptor is None and not self._open():
            return []
        at = time.time()
        return [found for line in self._lines() if (found := event_of(line, at))]

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor, self._rest = None, b""

    def _open(self) -> bool:
        if self._clock() - self._tried_at < LOOK_AGAIN_S and not self._was_absent:
            return False
        self._tried_at = self._clock()
        try:
            self._descriptor = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            self._complain(error)
            return False
        if not self._was_absent:  # of one that was made after the first look, every line is new
            os.lseek(self._descriptor, 0, os.SEEK_END)
        return True

    def _complain(self, error: OSError) -> None:
        self._was_absent = error.errno == errno.ENOENT
        if not self._complained:
            self._complained = True
            logger.warning("%s cannot be read (%s): Xid errors are seen only as far as NVML tells of them; let the "
                           "node's account read it (group adm, or CAP_SYSLOG)", self._path, error.strerror)

    def _lines(self) -> Iterator[str]:
        for piece in self._pieces():
            *whole, self._rest = (self._rest + piece).split(b"\n")
            for line in whole:
                yield line.decode("utf-8", "replace")
            self._rest = self._rest[-RECORD_BYTES:]

    def _pieces(self) -> Iterator[bytes]:
        assert self._descriptor is not None
        for _ in range(READS_MOST):
            try:
                data = os.read(self._descriptor, RECORD_BYTES)
            except OSError as error:
                if error.errno == errno.EPIPE:
                    continue  # older records were overwritten before they were read: the next read goes on after them
                if error.errno not in (errno.EAGAIN, errno.EINTR):
                    self.close()
                return
            if not data:
                self._follow_rotation()
                return
            yield data

    def _follow_rotation(self) -> None:
        """A regular file in its place may be cut off or replaced."""
        assert self._descriptor is not None
        mine = os.fstat(self._descriptor)
        if not stat.S_ISREG(mine.st_mode):
            return
        if os.lseek(self._descriptor, 0, os.SEEK_CUR) > mine.st_size:
            os.lseek(self._descriptor, 0, os.SEEK_SET)
        elif not mine.st_nlink:
            self.close()
            self._was_absent = True


def event_of(line: str, at: float) -> HealthEvent | None:
    """-> the event that a line tells of, as in "NVRM: Xid (PCI:0000:07:00): 79, pid=1234, GPU has fallen off"."""
    found = LINE.search(line)
    if found is None or len(found["code"]) > 6:
        return None
    kind, code = KINDS[found["kind"]], int(found["code"])
    said = (found["said"] or "").strip()[:MESSAGE_CHARS]
    return HealthEvent(
        at=at, key=f"{kind}/{found['place']}/{code}/{round(at * 1000)}", kind=kind, pci_bus_id=found["place"],
        code=code, message=f"{kind.upper().replace('XID', 'Xid')} {code}" + (f", {said}" if said else ""),
        source="kernel_log",
    )
