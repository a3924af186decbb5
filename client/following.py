"""Following a job: its states and every rank's new lines, each byte once, through losses of the connection."""

import codecs
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from client.api import ENDED, Client, Rank
from client.errors import Refused, Unreachable

LONGEST_LINE = 64 * 1024  # of one line on a terminal; what a rank prints without end is cut there
LONGEST_IDLE_S, IDLE_STEP_S = 2.0, 0.1
SETTLE_S = 20.0  # how long the last bytes may take after the end


@dataclass(frozen=True)
class LogLine:
    rank: Rank
    text: str


@dataclass(frozen=True)
class StateChange:
    state: str
    job: dict[str, Any]


@dataclass(frozen=True)
class Away:
    """The portal is out of reach; following goes on by itself."""

    message: str


Item = LogLine | StateChange | Away


class Lines:
    """Bytes in, whole lines out. A carriage return starts its line anew, as on a terminal."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""

    def feed(self, data: bytes, final: bool = False) -> list[str]:
        text = self._rest + self._decoder.decode(data, final)
        *whole, self._rest = text.split("\n")
        if len(self._rest) > LONGEST_LINE or (final and self._rest):
            whole.append(self._rest)
            self._rest = ""
        return [as_shown(line) for line in whole]


def as_shown(line: str) -> str:
    """What a progress bar leaves standing after its carriage returns."""
    return line.rstrip("\r").rpartition("\r")[2]


@dataclass
class Reader:
    """One rank's place in its log."""

    rank: Rank
    offset: int = 0
    complete: bool = False
    lines: Lines = field(default_factory=Lines)
    look_at: float = 0.0
    idle_s: float = 0.0

    def due(self, now: float) -> bool:
        return not self.complete and now >= self.look_at

    def rest(self, now: float, got: int) -> None:
        """A silent rank is asked ever more rarely, so that hundreds of them cost little."""
        self.idle_s = 0.0 if got else min(LONGEST_IDLE_S, self.idle_s + IDLE_STEP_S)
        self.look_at = now + self.idle_s

    def read(self, portal: Client, job_id: int) -> Iterator[LogLine]:
        """Everything there is by now."""
        while not self.complete:
            piece = portal.logs(job_id, self.rank, self.offset)
            self.offset, self.complete = piece.next_offset, piece.complete
            for text in self.lines.feed(piece.data, final=piece.complete):
                yield LogLine(self.rank, text)
            if not piece.data:
                return


@dataclass
class Following:
    portal: Client
    job_id: int
    ranks: list[Rank] | None = None  # None: every rank and the launcher
    clock: Callable[[], float] = time.monotonic
    pause: Callable[[float], None] = time.sleep
    interval_s: float = 0.25
    readers: dict[Rank, Reader] = field(default_factory=dict)

    def items(self) -> Iterator[Item]:
        """Ends when the job has ended and its logs are whole. Raises Refused if the job may not be seen (any more)."""
        state, ended_at, away = "", 0.0, False
        while True:
            try:
                job = self.portal.job(self.job_id)
                if job["state"] != state:
                    state = job["state"]
                    yield StateChange(state, job)
                yield from self.new_lines(job)
                away = False
            except Unreachable as error:
                if not away:
                    yield Away(str(error))
                away = True
                continue
            if state in ENDED:
                ended_at = ended_at or self.clock()
                if self.whole() or self.clock() - ended_at > SETTLE_S:
                    return
            self.pause(self.interval_s)

    def new_lines(self, job: dict[str, Any]) -> Iterator[LogLine]:
        if not job["attempts"]:
            return
        ended = job["state"] in ENDED
        for rank in self.ranks if self.ranks is not None else [*range(job["world_size"]), "launcher"]:
            reader = self.readers.setdefault(rank, Reader(rank))
            if not reader.due(self.clock()) and not (ended and not reader.complete):
                continue
            before = reader.offset
            try:
                yield from reader.read(self.portal, self.job_id)
            except Refused as refused:
                if refused.status != 404 or self.ranks is not None:
                    raise
                reader.complete = ended  # this rank never wrote anything
            reader.rest(self.clock(), reader.offset - before)

    def unfinished(self) -> Iterator[LogLine]:
        """Last lines that no newline has ended yet."""
        for reader in self.readers.values():
            yield from (LogLine(reader.rank, text) for text in reader.lines.feed(b"", final=True))

    def whole(self) -> bool:
        return all(reader.complete for reader in self.readers.values())

    @property
    def bytes_read(self) -> int:
        return sum(reader.offset for reader in self.readers.values())
