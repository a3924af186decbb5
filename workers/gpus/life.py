"""One life of the process that reads the GPUs, seen from the worker that started it."""

import logging
import os
import selectors
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from workers.gpus.frames import Command, Frame, frames, pack

log = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parent.parent.parent
INHERITED = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "ROCM_PATH", "ROCM_HOME",
             "GPUYARD_KMSG")
SIMULATION = "GPUYARD_SIM_"
"""The broker's address and the node's key stay out of the reader's environment."""


class Hung(Exception):
    def __init__(self, gpu: int | None) -> None:
        super().__init__(gpu)
        self.gpu = gpu


class Died(Exception):
    pass


class Life:
    """One reading process and its pipe. It ends at the end of its input, so it never outlives this process."""

    def __init__(self, command: list[str], patience_s: float) -> None:
        environment = {name: value for name, value in os.environ.items()
                       if name in INHERITED or name.startswith(SIMULATION)}
        environment["PYTHONPATH"] = str(ROOT)
        self._patience_s = patience_s
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True, bufsize=0,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def frames(self, deadline_s: float, first_deadline_s: float) -> Iterator[Frame | None]:
        """Frames as they come, None when there is none for a while. Raises Hung after the deadline, Died at the end."""
        stream = frames()
        due = time.monotonic() + first_deadline_s + deadline_s
        for data in self._pieces():
            for frame in stream.feed(data):
                due = time.monotonic() + deadline_s
                yield frame
            yield None
            if time.monotonic() > due:
                raise Hung(None)

    def command(self, order: Command) -> None:
        """A pipe holds many orders, so this does not wait."""
        assert self._process.stdin is not None
        os.write(self._process.stdin.fileno(), pack(order))

    def _pieces(self) -> Iterator[bytes]:
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while True:
                if not selector.select(0.1):
                    yield b""
                elif data := os.read(self._process.stdout.fileno(), 1 << 16):
                    yield data
                else:
                    raise Died(f"the GPU reader ended ({self._exit()}); it is started again")

    def _exit(self) -> str:
        try:
            code = self._process.wait(self._patience_s)
        except subprocess.TimeoutExpired:
            return "it closed its output"
        return f"signal {-code}" if code < 0 else f"exit status {code}"

    def is_over(self) -> bool:
        return self._process.poll() is not None

    def end(self) -> bool:
        """False for a process that not even a kill ends."""
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe:
                pipe.close()
        try:
            self._process.wait(self._patience_s)
        except subprocess.TimeoutExpired:
            log.error("the GPU reader (pid %d) sleeps inside the driver and cannot be killed: left behind", self.pid)
            return False
        return True
