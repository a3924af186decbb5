"""What is looked at before anything starts, so that a failure is a sentence and not a half-started portal."""

import fcntl
import importlib.util
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from allinone.faults import ALREADY_RUNNING, USAGE, Fault, disk_errors_named
from allinone.options import Options
from allinone.valkey import is_free, some_free_port

LEAST_FREE_BYTES = 1024**3
AMD_VENDOR = "0x1002"
COMPUTE_CLASSES = ("0x0302", "0x0380", "0x1200")
NEEDED = ("django", "celery", "uvicorn", "redis", "psycopg", "msgspec", "pynvml", "psutil")


def before_start(options: Options) -> None:
    packages_there()
    disk_has_room(options.state_dir)
    port_is_free(options)


def packages_there() -> None:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise Fault(f"The Python packages {', '.join(missing)} are not installed here: run `make setup`.")


def disk_has_room(state_dir: Path, least_bytes: int = LEAST_FREE_BYTES) -> None:
    with disk_errors_named(state_dir):
        state_dir.mkdir(parents=True, exist_ok=True)
        free_bytes = shutil.disk_usage(state_dir).free
    if free_bytes < least_bytes:
        free_mib, least_mib = free_bytes // 1024**2, least_bytes // 1024**2
        raise Fault(
            f"The disk that holds {state_dir} has {free_mib} MiB free, {least_mib} MiB are needed: "
            "free some space, or set GPUYARD_STATE_DIR to a folder on another disk."
        )


def port_is_free(options: Options) -> None:
    if is_free(options.port, options.host):
        return
    try:
        other = options.port + 1 if is_free(options.port + 1, options.host) else some_free_port(options.host)
    except OSError as error:
        raise Fault(
            f"HOST={options.host} is not an address of this machine ({error.strerror}): "
            "write 127.0.0.1, or 0.0.0.0 for every address.",
            USAGE,
        ) from error
    raise Fault(f"Port {options.port} is taken by another program: run `PORT={other} make up`, or stop that program.")


@contextmanager
def only_one(options: Options) -> Iterator[None]:
    """Holds the state directory. A second start beside a running one learns where that one is, and changes nothing."""
    path = options.state_dir / "lock"
    with disk_errors_named(path):
        options.state_dir.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    with os.fdopen(handle, "r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise Fault(
                f"gpuyard is already running from {options.state_dir}: {holder(file.read())}. "
                "Nothing was changed; stop it with Ctrl-C there.",
                ALREADY_RUNNING,
            ) from error
        file.truncate(0)
        json.dump({"pid": os.getpid(), "url": options.url}, file)
        file.flush()
        yield
        file.seek(0)
        file.truncate(0)


def holder(text: str) -> str:
    try:
        known = json.loads(text)
    except ValueError:
        return "it is just starting"
    return f"{known['url']} (process {known['pid']})"


def has_nvidia_gpus(proc: Path = Path("/proc/driver/nvidia/gpus"), dev: Path = Path("/dev")) -> bool:
    return any(proc.glob("*")) or any(path.name[6:].isdigit() for path in dev.glob("nvidia*"))


def has_amd_gpus(pci_devices: Path = Path("/sys/bus/pci/devices")) -> bool:
    """Cards that compute: the graphics of a processor are no reason not to simulate some."""
    return any(text_of(card / "vendor") == AMD_VENDOR and text_of(card / "class")[:6] in COMPUTE_CLASSES
               for card in pci_devices.glob("*"))  # fmt: skip


def text_of(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
