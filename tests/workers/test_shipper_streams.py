"""Bytes of a log on their way home: every one once at its address, whatever happens to the file or to the broker."""

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from node_harness import AttemptRecord

from wire.desired import Launch
from wire.reports import LogChunk, Report
from workers import logs
from workers.logs import Shipper, StreamFile
from workers.outbox import Cursor, Pulse
from workers.publish import BrokerDown
from workers.spool import Spool


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Wire:
    """Stands where the publisher does: keeps what was sent, loses it on demand, may be down."""

    def __init__(self) -> None:
        self.sent: list[LogChunk] = []
        self.down = False

    def send_all(self, reports: list[Report]) -> None:
        if self.down:
            raise BrokerDown("down")
        self.sent += [report for report in reports if isinstance(report, LogChunk)]


class Bench:
    """A shipper over a real spool."""

    def __init__(self, root: Path) -> None:
        self.spool = Spool(root)
        self.wire, self.pulse, self.record = Wire(), Pulse(), AttemptRecord()
        self.launch = Launch(attempt="a1", job=1, epoch=1, name="n", user="u", launcher="script", command="x")
        self.path = self.spool.create(self.launch).log_path("rank-0")
        self.restart()

    def restart(self) -> None:
        self.shipper = Shipper(self.spool, self.wire, self.pulse)  # type: ignore[arg-type]
        self.shipper.acknowledge("a1", {"rank-0": len(self.record.logs.get("rank-0", b""))})
        self.shipper.prime()

    def write(self, data: bytes, mode: str = "ab") -> None:
        with self.path.open(mode) as file:
            file.write(data)

    def ship(self) -> None:
        while self.shipper.run_once():
            pass

    def deliver(self) -> None:
        for chunk in self.wire.sent:
            self.record.take_chunk(chunk)
        self.wire.sent.clear()
        self.shipper.acknowledge("a1", {name: len(log) for name, log in self.record.logs.items()})

    def settle(self) -> bytes:
        for _ in range(1000):
            self.ship()
            if not self.wire.sent:
                break
            self.deliver()
        return bytes(self.record.logs.get("rank-0", b""))


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path / "spool")


def lose_and_rewind(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.wire.sent.clear()
    monkeypatch.setattr("workers.outbox.RESEND_AFTER_S", 0.0)
    bench.pulse.heard(bench.pulse.beat())


def test_bytes_arrive_as_they_were_written(bench: Bench) -> None:
    data = os.urandom(300_000)
    bench.write(data)
    assert bench.settle() == data
    bench.write(b"and more\n")
    assert bench.settle() == data + b"and more\n"
    assert bench.record.repeated_bytes == 0


def test_a_window_holds_back_what_is_not_acknowledged(bench: Bench) -> None:
    bench.write(bytes(3 * logs.STREAM_WINDOW_BYTES))
    bench.ship()
    assert sum(len(chunk.data) for chunk in bench.wire.sent) == logs.STREAM_WINDOW_BYTES
    assert len(bench.settle()) == 3 * logs.STREAM_WINDOW_BYTES


def test_a_broker_that_is_down_costs_nothing(bench: Bench) -> None:
    bench.write(b"x" * 100_000)
    bench.wire.down = True
    with pytest.raises(BrokerDown):
        bench.shipper.run_once()
    bench.wire.down = False
    assert bench.settle() == b"x" * 100_000


def test_what_the_broker_lost_is_sent_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    data = os.urandom(200_000)
    bench.write(data)
    bench.ship()
    lose_and_rewind(bench, monkeypatch)
    assert bench.settle() == data


def test_a_lost_chunk_is_not_repeated_while_the_portal_is_silent() -> None:
    clock, pulse = Clock(), Pulse()
    cursor = Cursor(pulse, clock)
    nonce = pulse.beat()
    cursor.advance(100)
    pulse.heard(nonce)  # sent before the bytes: proves nothing about them
    clock.now += 30
    assert not cursor.rewind_if_lost()
    pulse.heard(pulse.beat())
    assert cursor.rewind_if_lost() and cursor.sent == 0
    cursor.advance(100)
    clock.now += 61
    assert cursor.rewind_if_lost(), "without any sign from the portal it is tried again each minute"


def test_progress_puts_the_repetition_off() -> None:
    clock, pulse = Clock(), Pulse()
    cursor = Cursor(pulse, clock)
    cursor.advance(100)
    pulse.heard(pulse.beat())
    for acknowledged in (20, 40, 60):
        clock.now += 4
        cursor.acknowledge(acknowledged)
        assert not cursor.rewind_if_lost()
    clock.now += 6
    assert cursor.rewind_if_lost() and cursor.sent == 60


def test_a_portal_that_takes_nothing_is_sent_it_ever_more_rarely() -> None:
    clock, pulse = Clock(), Pulse()
    cursor = Cursor(pulse, clock)
    resent_at = []
    cursor.advance(100)
    for second in range(300):
        clock.now += 1
        pulse.heard(pulse.beat())
        if cursor.rewind_if_lost():
            resent_at.append(second + 1)
            cursor.advance(100)
    assert resent_at == [5, 15, 35, 75, 135, 195, 255]
    cursor.acknowledge(50)
    clock.now += 5
    assert cursor.rewind_if_lost(), "progress makes it patient again"


def test_a_portal_restored_from_a_backup_gets_the_rest_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.write(b"0123456789")
    bench.settle()
    bench.record.logs["rank-0"] = bytearray(b"0123")
    bench.shipper.acknowledge("a1", {"rank-0": 4})
    bench.ship()
    lose_and_rewind(bench, monkeypatch)
    assert bench.settle() == b"0123456789"


def test_a_restarted_worker_goes_on_from_what_is_durable(bench: Bench) -> None:
    bench.write(b"a" * 1000)
    bench.settle()
    bench.write(b"b" * 1000)
    bench.restart()
    assert bench.settle() == b"a" * 1000 + b"b" * 1000
    assert bench.record.repeated_bytes == 0


def test_a_fresh_worker_waits_to_hear_what_is_durable(bench: Bench) -> None:
    bench.write(b"data")
    clock = Clock()
    shipper = Shipper(bench.spool, bench.wire, bench.pulse, clock)  # type: ignore[arg-type]
    assert shipper.run_once() == 0
    clock.now += logs.PRIME_S
    assert shipper.run_once() == 1, "a portal that is away for long does not keep bytes from the stream"


def test_a_hole_is_counted_and_not_sent(bench: Bench) -> None:
    bench.write(b"H" * 100 + b"\0" * 50 + b"T" * 100)
    bench.path.with_suffix(".drops").write_text("100 120\n120 150\n")
    assert bench.settle() == b"H" * 100 + b"\0" * 50 + b"T" * 100
    assert bench.record.dropped == {"rank-0": 50}


def test_a_hole_cut_while_reading_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rank-0.log"
    path.write_bytes(b"x" * 100)
    stream = StreamFile(path)
    stream.end()
    real = logs.read_range

    def cut_first(path: Path, position: int, length: int) -> bytes | None:
        monkeypatch.setattr(logs, "read_range", real)
        path.with_suffix(".drops").write_text("10 60\n")
        path.write_bytes(b"x" * 10 + b"\0" * 50 + b"x" * 40)
        return real(path, position, length)

    monkeypatch.setattr(logs, "read_range", cut_first)
    first = stream.read(0, 100)
    assert first is not None and (first.data, first.offset, first.dropped_bytes) == (b"x" * 10, 0, 0)
    rest = stream.read(10, 100)
    assert rest is not None and (rest.data, rest.offset, rest.dropped_bytes) == (b"x" * 40, 60, 50)


def test_a_job_that_truncates_its_log_goes_on_at_new_addresses(bench: Bench) -> None:
    bench.write(b"old" * 100)
    bench.settle()
    bench.write(b"new", mode="wb")
    assert bench.settle() == b"old" * 100 + b"new"
    bench.restart()
    bench.write(b" and newer")
    assert bench.settle() == b"old" * 100 + b"new and newer"
    assert bench.shipper.stream_sizes("a1", {"rank-0": 13}) == {"rank-0": 313}


def test_bytes_truncated_before_they_were_sent_are_counted_as_dropped(bench: Bench) -> None:
    bench.write(b"sent")
    bench.settle()
    bench.write(b"never seen")
    bench.shipper.stream_sizes("a1", {"rank-0": 14})  # looked at, not sent
    bench.write(b"", mode="wb")
    assert bench.settle() == b"sent" + bytes(10)
    assert bench.record.dropped == {"rank-0": 10}
    assert bench.shipper.stream_sizes("a1", {"rank-0": 0}) == {"rank-0": 14}


def test_a_truncation_just_before_the_end_is_in_the_final_size(bench: Bench) -> None:
    bench.write(b"x" * 500)
    bench.settle()
    bench.write(b"tail", mode="wb")
    assert bench.shipper.stream_sizes("a1", {"rank-0": 4}) == {"rank-0": 504}
    assert bench.settle() == b"x" * 500 + b"tail"


def test_a_log_that_was_deleted_or_replaced_never_raises(bench: Bench, tmp_path: Path) -> None:
    bench.write(b"x" * 100)
    bench.settle()
    bench.path.unlink()
    bench.settle()
    secret = tmp_path / "secret"
    secret.write_bytes(b"not for the log" * 100)
    bench.path.symlink_to(secret)
    assert b"secret" not in bench.settle() and b"not for" not in bench.settle()


def test_a_flooding_stream_does_not_starve_the_others(bench: Bench) -> None:
    flood = bench.path.with_name("rank-1.log")
    flood.write_bytes(bytes(4 * logs.STREAM_WINDOW_BYTES))
    bench.write(b"one line\n")
    bench.shipper.run_once()
    assert "rank-0" in {chunk.stream for chunk in bench.wire.sent}


@settings(max_examples=40, deadline=None)
@given(steps=st.lists(st.one_of(
    st.tuples(st.just("write"), st.binary(min_size=1, max_size=3000)),
    st.tuples(st.sampled_from(["ship", "lose", "deliver", "deliver twice", "restart"]), st.none()),
), max_size=25))
def test_any_order_of_losses_and_restarts_ends_in_the_same_bytes(tmp_path_factory: pytest.TempPathFactory,
                                                                 steps: list[tuple[str, bytes | None]]) -> None:
    bench = Bench(tmp_path_factory.mktemp("any") / "spool")
    written = b""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("workers.logs.CHUNK_BYTES", 700)
        monkeypatch.setattr("workers.outbox.RESEND_AFTER_S", 0.0)
        for step, data in steps:
            if step == "write" and data is not None:
                bench.write(data)
                written += data
            elif step == "lose":
                bench.wire.sent.clear()
            elif step == "restart":
                bench.restart()
            elif step == "ship":
                bench.ship()
            else:
                for chunk in bench.wire.sent if step == "deliver twice" else []:
                    bench.record.take_chunk(chunk)
                bench.deliver()
        bench.wire.sent.clear()
        bench.pulse.heard(bench.pulse.beat())
        assert bench.settle() == written
