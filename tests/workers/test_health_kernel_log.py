"""The kernel log: lines of drivers old and new, rotation, absence, and lines that only look like errors."""

import logging
import os
from pathlib import Path

import pytest

from workers.kernel_log import KernelLog, event_of

XID = b"4,1234,5140900123,-;NVRM: Xid (PCI:0000:07:00): 79, pid=1234, name=python, GPU has fallen off the bus.\n"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "kmsg"
    path.write_bytes(XID)
    return path


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


@pytest.mark.parametrize(("line", "told"), [
    ("NVRM: Xid (PCI:0000:07:00): 79, pid=1234, name=python, GPU has fallen off the bus.",
     ("xid", "0000:07:00", 79, "Xid 79, pid=1234, name=python, GPU has fallen off the bus.")),
    ("[ 12.5] NVRM: Xid (PCI:0000:10:1c GPU-I:05): 94, Contained: SM (0x1)",
     ("xid", "0000:10:1c", 94, "Xid 94, Contained: SM (0x1)")),
    ("6,1,2,-;NVRM: Xid (PCI:0001:c3:00.0): 63", ("xid", "0001:c3:00.0", 63, "Xid 63")),
    ("nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 12028, Non-fatal, Link 47",
     ("sxid", "0000:c1:00.0", 12028, "SXid 12028, Non-fatal, Link 47")),
    ("NVRM: Xid (PCI:0000:07:00): many", None),
    ("NVRM: Xid (PCI:0000:07:00): 99999999999, x", None),
    ("my program prints Xid 79", None),
    ("", None),
])  # fmt: skip
def test_a_line_tells_of_an_event(line: str, told: tuple[str, str, int, str] | None) -> None:
    found = event_of(line, 100.0)
    assert told == (found and (found.kind, found.pci_bus_id, found.code, found.message))


def test_only_what_comes_after_the_first_look_counts(path: Path) -> None:
    log = KernelLog(path)
    assert log.read() == []
    append(path, XID + b"something else\n" + XID.replace(b": 79", b": 48"))
    assert [event.code for event in log.read()] == [79, 48]
    assert log.read() == []
    log.close()


def test_a_line_in_two_pieces_is_one(path: Path) -> None:
    log = KernelLog(path)
    log.read()
    append(path, XID[:40])
    assert log.read() == []
    append(path, XID[40:] + b"\xff\xfe broken\n")
    assert [event.code for event in log.read()] == [79]
    log.close()


def test_a_log_that_appears_later_is_read_from_its_beginning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = KernelLog(tmp_path / "kmsg")
    with caplog.at_level(logging.WARNING):
        assert log.read() == log.read() == []
    assert [record.message for record in caplog.records if "cannot be read" in record.message] == [
        caplog.records[0].message], "it says so once"  # fmt: skip
    append(tmp_path / "kmsg", XID)
    assert [event.code for event in log.read()] == [79]
    log.close()


def test_a_log_that_was_cut_off_or_replaced_is_followed(path: Path) -> None:
    log = KernelLog(path)
    log.read()
    append(path, XID * 3)
    assert len(log.read()) == 3
    path.write_bytes(XID)
    assert log.read() == [], "the cut is noticed"
    assert len(log.read()) == 1
    path.unlink()
    assert log.read() == []
    append(path, XID * 2)
    assert len(log.read()) == 2
    log.close()


def test_a_log_without_end_holds_nobody_up(path: Path) -> None:
    log = KernelLog(path)
    log.read()
    append(path, b"x" * 50_000_000 + b"\n" + XID)
    found = [event for _ in range(4) for event in log.read()]
    assert [event.code for event in found] == [79]
    log.close()


def test_records_that_were_overwritten_unread_are_passed_over(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = KernelLog(path)
    log.read()
    append(path, XID)
    answers = iter([BrokenPipeError(32, "Broken pipe"), BlockingIOError(11, "again")])
    real = os.read

    def read(descriptor: int, size: int) -> bytes:
        if (error := next(answers, None)) is not None and isinstance(error, BrokenPipeError):
            raise error
        return real(descriptor, size)

    monkeypatch.setattr("workers.kernel_log.os.read", read)
    assert [event.code for event in log.read()] == [79]
    log.close()
