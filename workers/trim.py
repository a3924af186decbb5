"""Keeps a flood of output inside its cap: the middle of the file becomes a hole, offsets stay as they are.

A rank writes straight into its file, so nothing can hold it back; cutting a hole takes the blocks away beneath it. Each
hole is written down first, as a line `from to` in `NAME.drops`: who reads zeros can see that they are not the rank's.
"""

import ctypes
import os

EDGE_BYTES = 64 * 1024 * 1024
"""Kept at the head and at the tail, less where the cap is small."""

BLOCK_BYTES = 4096
PUNCH_HOLE_KEEP_SIZE = 0x03


class Trimmer:
    def __init__(self, path: str, cap_bytes: int) -> None:
        self.path = path
        self.drops_path = path.removesuffix(".log") + ".drops"
        self._cap_bytes = cap_bytes
        self._edge_bytes = max(BLOCK_BYTES, min(EDGE_BYTES, cap_bytes // 4) // BLOCK_BYTES * BLOCK_BYTES)
        self._dropped_to = self._edge_bytes
        self._libc = ctypes.CDLL(None, use_errno=True)

    def trim(self) -> None:
        """Cuts the middle out if the file holds more than its cap. Raises OSError where files cannot have holes."""
        size = self._size()
        if size < self._dropped_to and self._dropped_to > self._edge_bytes:
            self._restart()  # the job cut its own log: the holes went with the bytes
        kept = size - (self._dropped_to - self._edge_bytes)
        if kept <= self._cap_bytes:
            return
        end = (size - self._edge_bytes) // BLOCK_BYTES * BLOCK_BYTES
        if end > self._dropped_to:
            self._drop(self._dropped_to, end)
            self._dropped_to = end

    def _size(self) -> int:
        try:
            return os.stat(self.path).st_size
        except FileNotFoundError:
            return 0

    def _drop(self, start: int, end: int) -> None:
        self._note(start, end)
        fd = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            arguments = (ctypes.c_int(fd), ctypes.c_int(PUNCH_HOLE_KEEP_SIZE),
                         ctypes.c_int64(start), ctypes.c_int64(end - start))
            if self._libc.fallocate(*arguments) != 0:
                number = ctypes.get_errno()
                raise OSError(number, f"cannot cut a hole: {os.strerror(number)}", self.path)
        finally:
            os.close(fd)

    def _note(self, start: int, end: int) -> None:
        fd = os.open(self.drops_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, b"%d %d\n" % (start, end))
        finally:
            os.close(fd)

    def _restart(self) -> None:
        self._dropped_to = self._edge_bytes
        os.truncate(self.drops_path, 0)
