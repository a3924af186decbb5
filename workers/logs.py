"""Log shipping: a rank's file is the truth, and every byte of it has an address that never changes its meaning.

Chunks go out from what was sent last, and again from what is durable if they were lost. Two things may happen to a file
beneath us: the flood guard cuts holes into its middle, and the job truncates it. Neither stops the shipping.
"""

import contextlib
import logging
import os
import stat
import threading
import time
import zlib
from dataclasses import dataclass
from pathlib import Path

from wire.desired import Launch
from wire.reports import LogChunk
from workers.outbox import Clock, Cursor, Pulse
from workers.publish import Publisher
from workers.spool import AttemptDir, Spool

CHUNK_BYTES = 64 * 1024
STREAM_WINDOW_BYTES = 2 * 1024 * 1024
TOTAL_WINDOW_BYTES = 16 * 1024 * 1024
BATCH_CHUNKS = 16

PRIME_S = 10.0
"""How long a fresh worker waits to hear what is durable before it sends everything from the start."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Piece:
    offset: int
    data: bytes
    dropped_bytes: int

    @property
    def end(self) -> int:
        return self.offset + len(self.data)


class StreamFile:
    """One file read as an endless stream. `base` is the stream's offset of the file's first byte: it grows when the job
    truncates its log, so that new bytes never take the address of old ones."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._base_path = path.with_suffix(".base")
        self._holes_path = path.with_suffix(".drops")
        self._seen = 0
        self.base = read_number(self._base_path)

    def end(self, acknowledged: int = 0) -> int:
        """-> the stream's length by now. `acknowledged` tells what an earlier worker had seen."""
        try:
            size = self._path.lstat().st_size
        except OSError:  # deleted, or not made yet: nothing new either way
            return self.base + self._seen
        return self.length(size, acknowledged)

    def length(self, size: int, acknowledged: int = 0) -> int:
        seen = max(self._seen, acknowledged - self.base)
        if size < seen:
            logger.warning("%s shrank from %d to %d bytes: going on with what it holds now", self._path, seen, size)
            self.base += seen
            write_number(self._base_path, self.base)
        self._seen = size
        return self.base + size

    def read(self, offset: int, limit: int) -> Piece | None:
        """-> the next bytes at or after `offset`; what can never come is counted as dropped. None: nothing now."""
        piece = self._read_once(offset, limit, holes_before := self._holes())
        holes = self._holes()
        if holes != holes_before:  # a hole may have been cut between looking and reading
            piece = self._read_once(offset, limit, holes)
        return piece if piece.data or piece.dropped_bytes else None

    def _read_once(self, offset: int, limit: int, holes: list[tuple[int, int]]) -> Piece:
        position = max(0, offset - self.base)
        for start, stop in holes:
            if start <= position < stop:
                position = min(stop, self._seen)
        until = min([position + limit, self._seen, *(start for start, _ in holes if start > position)])
        data = read_range(self._path, position, until - position)
        if data is None:  # the job deleted it
            return Piece(self.base + self._seen, b"", self.base + self._seen - offset)
        return Piece(self.base + position, data, self.base + position - offset)

    def _holes(self) -> list[tuple[int, int]]:
        try:
            lines = self._holes_path.read_text().splitlines()
        except OSError:
            return []
        pairs = (line.split() for line in lines)
        return sorted((int(pair[0]), int(pair[1])) for pair in pairs if len(pair) == 2)


class Feed:
    """One stream on its way home."""

    def __init__(self, launch: Launch, stream: str, path: Path, pulse: Pulse) -> None:
        self._launch, self.stream = launch, stream
        self.file = StreamFile(path)
        self.cursor = Cursor(pulse)

    def next_chunk(self, sent: int, room: int) -> LogChunk | None:
        """`sent` counts what is already in the batch, which the cursor learns of only after the sending."""
        room = min(room, STREAM_WINDOW_BYTES - (sent - self.cursor.acknowledged), CHUNK_BYTES)
        if room <= 0 or sent >= self.file.end(self.cursor.acknowledged):
            return None
        piece = self.file.read(sent, room)
        if piece is None:
            return None
        return LogChunk(
            attempt=self._launch.attempt, job=self._launch.job, epoch=self._launch.epoch, stream=self.stream,
            offset=piece.offset, data=piece.data, crc32=zlib.crc32(piece.data), dropped_bytes=piece.dropped_bytes,
        )


class Shipper:
    def __init__(self, spool: Spool, publisher: Publisher, pulse: Pulse, clock: Clock = time.monotonic) -> None:
        self._spool, self._publisher, self._pulse, self._clock = spool, publisher, pulse, clock
        self._feeds: dict[tuple[str, str], Feed] = {}
        self._noted: dict[tuple[str, str], int] = {}
        self._lock = threading.RLock()
        self._turn = 0
        self._started_at = clock()
        self._primed = False
        self.outstanding = False

    def acknowledge(self, attempt: str, offsets: dict[str, int]) -> None:
        with self._lock:
            self._noted.update({(attempt, stream): offset for stream, offset in offsets.items()})

    def prime(self) -> None:
        """The portal's acknowledgements have been read: sending on from them repeats nothing."""
        self._primed = True

    def run_once(self) -> int:
        """-> how many chunks were sent. Raises BrokerDown; nothing is lost by it."""
        if not self._primed and self._clock() - self._started_at < PRIME_S:
            return 0
        with self._lock:
            self._update_feeds()
            batch = self._collect()
        if batch:
            self._publisher.send_all([chunk for _, chunk in batch])
        with self._lock:
            for feed, chunk in batch:
                feed.cursor.advance(chunk.offset + len(chunk.data))
            self.outstanding = any(feed.cursor.in_flight for feed in self._feeds.values())
        return len(batch)

    def stream_sizes(self, attempt: str, sizes: dict[str, int]) -> dict[str, int]:
        """Final sizes of files -> final lengths of their streams: they differ where a job truncated its log."""
        with self._lock:
            self._update_feeds()
            feeds = {stream: self._feeds.get((attempt, stream)) for stream in sizes}
            return {stream: feed.file.length(sizes[stream], feed.cursor.acknowledged) if feed else sizes[stream]
                    for stream, feed in feeds.items()}

    def _update_feeds(self) -> None:
        present = {(directory.path.name, stream): directory
                   for directory in self._spool.attempts() for stream in directory.streams()}
        for key in self._feeds.keys() - present.keys():
            del self._feeds[key]
        for key in present.keys() - self._feeds.keys():
            with contextlib.suppress(OSError, ValueError):
                self._feeds[key] = feed_of(present[key], key[1], self._pulse)
        self._apply_noted()

    def _apply_noted(self) -> None:
        for key, offset in self._noted.items():
            if key in self._feeds:
                self._feeds[key].cursor.acknowledge(offset)
        self._noted = {}

    def _collect(self) -> list[tuple[Feed, LogChunk]]:
        """One chunk of each feed in turn, beginning with another feed each time: no stream starves the others."""
        feeds = list(self._feeds.values())
        self._turn = (self._turn + 1) % max(1, len(feeds))
        waiting = feeds[self._turn:] + feeds[:self._turn]
        for feed in waiting:
            if feed.cursor.rewind_if_lost():
                logger.info("sending %s again from byte %d", feed.stream, feed.cursor.sent)
        sent = {feed: feed.cursor.sent for feed in waiting}
        room = TOTAL_WINDOW_BYTES - sum(feed.cursor.in_flight for feed in waiting)
        batch: list[tuple[Feed, LogChunk]] = []
        while waiting and len(batch) < BATCH_CHUNKS:
            feed = waiting.pop(0)
            chunk = feed.next_chunk(sent[feed], room)
            if chunk is not None:
                batch.append((feed, chunk))
                room -= len(chunk.data)
                sent[feed] = chunk.offset + len(chunk.data)
                waiting.append(feed)
        return batch


def feed_of(directory: AttemptDir, stream: str, pulse: Pulse) -> Feed:
    return Feed(directory.launch, stream, directory.log_path(stream), pulse)


def read_range(path: Path, position: int, length: int) -> bytes | None:
    """-> bytes, fewer at the end of the file; None if it is gone or no longer a plain file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
        return os.pread(descriptor, max(0, length), position)
    finally:
        os.close(descriptor)


def read_number(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0


def write_number(path: Path, number: int) -> None:
    draft = path.with_name(path.name + ".new")
    draft.write_text(str(number))
    draft.replace(path)
