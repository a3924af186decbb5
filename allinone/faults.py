"""What can be wrong around us. Each fault is one sentence that names the thing and the way out."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

USAGE = 2
ALREADY_RUNNING = 75  # EX_TEMPFAIL


class Fault(Exception):
    """`str(fault)` is shown to the person as it is; `exit_code` becomes the exit status."""

    def __init__(self, sentence: str, exit_code: int = 1) -> None:
        super().__init__(sentence)
        self.exit_code = exit_code


@contextmanager
def disk_errors_named(path: Path) -> Iterator[None]:
    """A full, read-only or closed disk becomes a sentence about `path`."""
    try:
        yield
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise Fault(f"The disk that holds {path} is full; free some space there and start again.") from error
        if error.errno in {errno.EROFS, errno.EACCES, errno.EPERM}:
            where = error.filename or path
            raise Fault(
                f"{where} cannot be written ({error.strerror}); make it writable, or set GPUYARD_STATE_DIR "
                "to a folder that is."
            ) from error
        raise
