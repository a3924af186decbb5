"""Log bytes: written once by offset, read by offset. Files hold the bytes, `LogStream.size_bytes` says how many count.

Bytes reach the disk before the size reaches the database, so what is acknowledged to a node is never more than what is
stored. After a crash a file may be longer than its size; those bytes are written again, identically, and never read.
"""

import logging
import os
import re
import uuid
import zlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from django.conf import settings
from django.db import transaction
from django.db.models import F
from django.utils import timezone

from portal.models import Attempt, Job, LogStream
from portal.services.errors import Problem
from portal.services.text import counted
from wire.reports import LogChunk

STREAM_NAME = re.compile(r"rank-(?:0|[1-9][0-9]{0,5})|launcher")
MAX_CHUNK_BYTES = 1024 * 1024
MAX_STREAM_BYTES = 1 << 40
READ_LIMIT_BYTES = 4 * 1024 * 1024
TAIL_BYTES = 4096
ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_])")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LogSlice:
    """`data` begins at `offset`, which is later than was asked for where bytes were cut from a flood on the node."""

    data: bytes
    next_offset: int
    complete: bool  # nothing will ever come after next_offset
    offset: int = 0
    size_bytes: int = 0


@dataclass
class Progress:
    """One stream while a batch of chunks is written to it."""

    attempt_id: uuid.UUID
    name: str
    before: int = 0
    size: int = 0
    lines: int = 0
    dropped: list[list[int]] = field(default_factory=list)

    @property
    def moved(self) -> bool:
        return self.size > self.before


@dataclass
class Batch:
    """What one batch of chunks wrote, and why some of it was not taken (code -> count)."""

    progress: list[Progress]
    refused: Counter[str]

    def save(self) -> list[LogStream]:
        """Inside the transaction: make the written bytes count. -> the streams that grew."""
        return [stream for progress in self.progress if progress.moved and (stream := save_size(progress))]


# --- writing ----------------------------------------------------------------------------------------------------------
def append(chunks: Iterable[LogChunk]) -> Batch:
    batch = write(chunks)
    with transaction.atomic():
        batch.save()
    return batch


def write(chunks: Iterable[LogChunk]) -> Batch:
    """Bytes to the disk, outside of any transaction. The caller has checked that the attempts are the sender's own."""
    grouped: dict[tuple[uuid.UUID, str], list[LogChunk]] = {}
    refused: Counter[str] = Counter()
    for chunk in chunks:
        if fault := fault_of(chunk):
            refused[fault] += 1
        else:
            grouped.setdefault((uuid.UUID(chunk.attempt), chunk.stream), []).append(chunk)
    known = known_streams({attempt for attempt, _ in grouped})
    progress = []
    for key, own in grouped.items():
        stream = known.get(key)
        size, dropped = (stream.size_bytes, list(stream.dropped)) if stream else (0, [])
        progress.append(Progress(*key, before=size, size=size, dropped=dropped))
        write_stream(progress[-1], own, refused)
    return Batch(progress, refused)


def fault_of(chunk: LogChunk) -> str | None:
    if not STREAM_NAME.fullmatch(chunk.stream):
        return "bad_stream"
    if chunk.offset < 0 or chunk.dropped_bytes < 0 or chunk.offset + len(chunk.data) > MAX_STREAM_BYTES:
        return "bad_offset"
    if len(chunk.data) > MAX_CHUNK_BYTES:
        return "too_long"
    if zlib.crc32(chunk.data) != chunk.crc32:
        return "bad_crc"
    return None


def known_streams(attempts: set[uuid.UUID]) -> dict[tuple[uuid.UUID, str], LogStream]:
    return {(stream.attempt_id, stream.name): stream for stream in LogStream.objects.filter(attempt_id__in=attempts)}


def write_stream(progress: Progress, chunks: list[LogChunk], refused: Counter[str]) -> None:
    """A full or broken disk leaves this stream where it was: the node keeps the bytes and sends them again."""
    dropped_before = list(progress.dropped)
    try:
        handle = open_for_writing(path_of(progress.attempt_id, progress.name))
        try:
            for chunk in chunks:
                if not write_chunk(handle, progress, chunk):
                    refused["gap"] += 1
            if progress.moved:
                os.fdatasync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        log.error("The log %s of attempt %s cannot be written: %s. The node keeps it until it can.",
                  progress.name, progress.attempt_id, error)
        refused["disk"] += 1
        progress.size, progress.lines, progress.dropped = progress.before, 0, dropped_before


def write_chunk(handle: int, progress: Progress, chunk: LogChunk) -> bool:
    """-> False if bytes before it are still to come. What is stored already is never written over."""
    if chunk.offset > progress.size:
        if chunk.offset - chunk.dropped_bytes > progress.size:
            return False
        progress.dropped.append([progress.size, chunk.offset])
        progress.size = chunk.offset
    fresh = memoryview(chunk.data)[progress.size - chunk.offset :]
    while fresh:
        count = os.pwrite(handle, fresh, progress.size)
        progress.lines += bytes(fresh[:count]).count(b"\n")
        progress.size += count
        fresh = fresh[count:]
    return True


def open_for_writing(path: Path) -> int:
    try:
        return os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o750)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o640)
        for folder in (path.parent, path.parent.parent):
            sync_folder(folder)  # else the name itself could be lost with the power
        return handle


def sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def save_size(progress: Progress) -> LogStream | None:
    stream, _ = LogStream.objects.get_or_create(attempt_id=progress.attempt_id, name=progress.name)
    moved = LogStream.objects.filter(pk=stream.pk, size_bytes=progress.before).update(
        size_bytes=progress.size, dropped=progress.dropped, line_count=F("line_count") + progress.lines,
        updated_at=timezone.now(),
    )
    if not moved:
        log.warning("Log %s of attempt %s was moved by another writer meanwhile; its chunks come again.",
                    progress.name, progress.attempt_id)
        return None
    stream.size_bytes = progress.size
    return stream


# --- reading ----------------------------------------------------------------------------------------------------------
def path_of(attempt_id: uuid.UUID, name: str) -> Path:
    return Path(settings.LOG_ROOT) / str(attempt_id) / f"{name}.log"


def newest_attempt(job: Job) -> Attempt | None:
    return job.attempts.order_by("-number").first()


def streams(job: Job) -> list[LogStream]:
    """Of the newest attempt: ranks in order, the launcher's own output last."""
    attempt = newest_attempt(job)
    found = list(attempt.log_streams.all()) if attempt else []
    return sorted(found, key=lambda stream: (stream.name == "launcher", len(stream.name), stream.name))


def read(job: Job, rank: int | str, offset: int, limit: int) -> LogSlice:
    """Bytes of the newest attempt from `offset` on."""
    reader = Reader(job.pk, stream_name(job, rank))
    checked(offset, reader.size())
    return reader.read(offset, limit)


class Reader:
    """Follows one stream of what was the job's newest attempt at the first look. One query a look, once it exists."""

    def __init__(self, job_id: int, name: str) -> None:
        self._job_id = job_id
        self._name = name
        self._attempt_id: uuid.UUID | None = None

    def size(self) -> int:
        stream = self._stream()
        return stream.size_bytes if stream else 0

    def read(self, offset: int, limit: int) -> LogSlice:
        stream = self._stream()
        if stream is not None:
            return slice_of(stream, min(offset, stream.size_bytes), min(limit, READ_LIMIT_BYTES))
        # In this order: what the attempt wrote before it ended is there when its end is.
        over = self._never_comes()
        return LogSlice(b"", 0, complete=over) if self._stream() is None else self.read(offset, limit)

    def _stream(self) -> LogStream | None:
        if self._attempt_id is None:
            attempts = Attempt.objects.filter(job_id=self._job_id).order_by("-number")
            self._attempt_id = attempts.values_list("pk", flat=True).first()
            if self._attempt_id is None:
                return None
        return LogStream.objects.filter(attempt_id=self._attempt_id, name=self._name).order_by("pk").first()

    def _never_comes(self) -> bool:
        if self._attempt_id is None:
            return Job.objects.get(pk=self._job_id).has_ended
        return Attempt.objects.get(pk=self._attempt_id).has_ended


def slice_of(stream: LogStream, offset: int, limit: int) -> LogSlice:
    start, end = readable(stream, offset, limit)
    data = read_file(path_of(stream.attempt_id, stream.name), start, end - start)
    reached = start + len(data)
    return LogSlice(data, reached, complete=stream.complete and reached >= stream.size_bytes, offset=start,
                    size_bytes=stream.size_bytes)


def last_line(stream: LogStream) -> str:
    """The last line with something in it, without its colours: for one-line summaries."""
    start = max(0, stream.size_bytes - TAIL_BYTES)
    text = slice_of(stream, start, TAIL_BYTES).data.decode("utf-8", "replace")
    lines = [ESCAPE.sub("", line).strip() for line in re.split(r"[\r\n]", text)]
    return next((line for line in reversed(lines) if line), "")[:300]


def stream_name(job: Job, rank: int | str) -> str:
    if rank == "launcher":
        return "launcher"
    ranks = max(1, job.gpu_count)
    if not isinstance(rank, int) or not 0 <= rank < ranks:
        raise Problem(404, "no_such_rank", f"Job {job.pk} has {counted(ranks, 'rank')}, from 0 on; there is no {rank}.")
    return f"rank-{rank}"


def checked(offset: int, size: int) -> int:
    if not 0 <= offset <= size:
        raise Problem(400, "bad_offset", f"Offset {offset} is outside of this log, which has {size} bytes so far.")
    return offset


def readable(stream: LogStream, offset: int, limit: int) -> tuple[int, int]:
    """-> (start, end) of the bytes that exist at or after `offset`, without those that were cut out."""
    for begin, end in stream.dropped:
        if begin <= offset < end:
            offset = end
    later = (begin for begin, _ in stream.dropped if begin > offset)
    end = min(offset + max(0, limit), stream.size_bytes, *later)
    return offset, max(offset, end)


def read_file(path: Path, offset: int, count: int) -> bytes:
    if count <= 0:
        return b""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(count)
    except FileNotFoundError as error:
        raise Problem(410, "log_gone", "The bytes of this log were removed from the portal's disk.") from error
