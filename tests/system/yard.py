"""The whole portal as real processes, and a person's view of it, for tests that break things."""

import dataclasses
import os
import shutil
import signal
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest
import redis

from allinone.children import Child
from allinone.options import Options
from allinone.stack import Stack
from allinone.terminal import Terminal
from allinone.valkey import some_free_port
from client.api import ENDED, Client

T = TypeVar("T")

FAULTS, KERNEL_LOG = "faults.json", "kernel_log"
"""In the state directory: what the simulated driver is to suffer from, and what stands for /dev/kmsg."""

# Prints numbered lines whose checksum tells a missing, doubled or torn one; flushes each.
COUNTING = (
    "import sys, time, zlib\n"
    "for n in range(int(sys.argv[1])):\n"
    "    text = f'{n} ' + 'x' * 40\n"
    "    print(zlib.crc32(text.encode()), text, flush=True)\n"
    "    time.sleep(float(sys.argv[2]))\n"
)


@contextmanager
def running(**options: Any) -> Iterator["Yard"]:
    """A portal of its own with these options, and nothing of it left afterwards."""
    # Not in pytest's own folder: that is closed to the account that PostgreSQL runs as when we are root.
    state_dir = Path(tempfile.mkdtemp(prefix="gpuyard-yard-"))
    state_dir.chmod(0o711)
    (state_dir / KERNEL_LOG).touch()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("GPUYARD_SIM_FAULTS", str(state_dir / FAULTS))
            patch.setenv("GPUYARD_KMSG", str(state_dir / KERNEL_LOG))
            given = dataclasses.replace(Options.load({}), state_dir=state_dir, port=some_free_port(), **options)
            with Stack(given, Terminal()) as stack:
                yield Yard(stack)
    finally:
        shutil.rmtree(state_dir, ignore_errors=True)


class Yard:
    """A running stack. Waiting is done through it, so that whatever fell over is started again meanwhile."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.bob: Client = stack.client("bob")
        self.charlie: Client = stack.client("charlie")
        self.state_dir: Path = stack.options.state_dir
        self.counting = self.state_dir / "counting.py"
        self.counting.write_text(COUNTING)

    def wait(self, what: str, look: Callable[[], T], timeout_s: float = 30.0) -> T:
        """-> the first true answer of `look`."""
        deadline = time.monotonic() + timeout_s
        while True:
            answer = look()
            if answer:
                return answer
            assert time.monotonic() < deadline, f"after {timeout_s} s: {what}; last answer {answer!r}"
            self.stack.tend()
            time.sleep(0.05)

    def submit(self, command: str, gpus: int = 1, by: Client | None = None, **spec: Any) -> int:
        job = (by or self.bob).submit({"name": "test", "command": command, "resources": {"gpus": gpus}, **spec})
        return int(job["id"])

    def job(self, number: int) -> dict[str, Any]:
        return self.bob.job(number) if self._bobs(number) else self.charlie.job(number)

    def reaches(self, number: int, *states: str, timeout_s: float = 30.0) -> dict[str, Any]:
        def look() -> dict[str, Any] | None:
            job = self.job(number)
            assert job["state"] in states or job["state"] not in ENDED, (
                f"job {number} ended: {job['state']} {job['reason']}"
            )
            return job if job["state"] in states else None

        return self.wait(f"job {number} is {' or '.join(states)}", look, timeout_s)

    def ended(self, number: int, timeout_s: float = 40.0) -> dict[str, Any]:
        return self.reaches(number, *ENDED, timeout_s=timeout_s)

    def log(self, number: int, rank: int | str = 0, timeout_s: float = 20.0) -> bytes:
        """The whole log, once the portal says that it is whole."""
        data = bytearray()

        def whole() -> bool:
            piece = self.bob.logs(number, rank, len(data))
            data.extend(piece.data)
            return piece.complete and piece.next_offset == len(data)

        self.wait(f"the log of job {number} is whole", whole, timeout_s)
        return bytes(data)

    def processes(self, number: int) -> list[psutil.Process]:
        """Every live process of this job on this machine, by its environment."""
        marks = {f"GPUYARD_ATTEMPT_ID={attempt['id']}".encode() for attempt in self.job(number)["attempts"]}
        found = []
        for process in psutil.process_iter():
            try:
                words = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if marks.intersection(words):
                found.append(process)
        return [process for process in found if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]

    def free_gpus(self) -> int:
        return len(self.bob.gpus(free="true"))

    def service(self, name: str) -> Child:
        return next(watch.service for watch in self.stack.supervision.watches if watch.service.name == name)  # type: ignore[return-value]

    def kill(self, name: str) -> int:
        """SIGKILL to a service; it is started again by the next wait. -> the pid that was killed."""
        pid = self.service(name).pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        self.wait(f"{name} runs again", lambda: self.service(name).pid not in {None, pid})
        return pid

    def broker(self) -> redis.Redis:
        return redis.Redis.from_url(self.stack.commands.redis_url)

    def count_job(self, lines: int, pause_s: float) -> int:
        return self.submit(f"python {self.counting} {lines} {pause_s}")

    def _bobs(self, number: int) -> bool:
        return any(job["id"] == number for job in self.bob.jobs(limit=200))


def checked_lines(log: bytes) -> list[int]:
    """-> the numbers of the lines of COUNTING, each line whole."""
    numbers = []
    for line in log.decode().splitlines():
        checksum, text = line.split(" ", 1)
        assert int(checksum) == zlib.crc32(text.encode()), line
        numbers.append(int(text.split(" ", 1)[0]))
    return numbers
