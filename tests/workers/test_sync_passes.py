"""One pass after another over orders as they may come: repeated, older, failing half-way, out of a restart."""

import threading
import time
from pathlib import Path

import pytest

from wire import names, signing
from wire.desired import Acknowledged, Desired, Launch, Stop
from wire.hardware import Order, ReleaseOrder
from wire.signing import Action, Refused, Signer
from workers.logs import Shipper
from workers.loops import EXIT_RESTART, Loop, Restarter
from workers.outbox import EventOutbox, Pulse
from workers.publish import BrokerDown
from workers.settings import Settings
from workers.spool import Spool
from workers.sync import Doorbell, Rejections, Sync, Upward

PORTAL_KEY = signing.new_private_key()


class Broker:
    def __init__(self) -> None:
        self.value: bytes | None = None
        self.sent: list[object] = []
        self.down = False

    def read_desired(self) -> bytes | None:
        if self.down:
            raise BrokerDown("down")
        return self.value

    def send_all(self, reports: list[object]) -> None:
        if self.down:
            raise BrokerDown("down")
        self.sent += reports


class Hands:
    """Stands where the supervisor does and writes down what it was asked."""

    def __init__(self) -> None:
        self.done: list[tuple[str, str]] = []
        self.fails: set[str] = set()

    def launch(self, launch: Launch) -> None:
        self._do("launch", launch.attempt)

    def stop(self, stop: Stop) -> None:
        self._do("stop", stop.attempt)

    def forget(self, attempt: str) -> None:
        self._do("forget", attempt)

    def take(self, orders: list[Order]) -> None:
        for order in orders:
            self._do("hardware", order.id)

    def _do(self, act: str, attempt: str) -> None:
        if attempt in self.fails:
            raise OSError("no space left on device")
        self.done.append((act, attempt))


class Bench:
    def __init__(self, home: Path) -> None:
        self.settings = Settings(node="node1", state_dir=home, private_key=signing.new_private_key(),
                                 portal_public_key=signing.public_key_of(PORTAL_KEY), broker_url="redis://nowhere")
        self.broker, self.hands, self.rejections = Broker(), Hands(), Rejections()
        self.restart()

    def restart(self) -> None:
        spool, self.pulse = Spool(self.settings.spool_root), Pulse()
        logs = Shipper(spool, self.broker, self.pulse)  # type: ignore[arg-type]
        events = EventOutbox(spool, self.broker, self.pulse, logs.stream_sizes)  # type: ignore[arg-type]
        self.sync = Sync(self.settings, self.broker, self.hands, Upward(events, logs, self.pulse, self.hands),  # type: ignore[arg-type]
                         self.rejections)

    def order(self, serial: int, age_s: float = 0.0, **fields: object) -> bool:
        desired = Desired(node=str(fields.pop("node", "node1")), serial=serial, **fields)  # type: ignore[arg-type]
        signer = Signer(PORTAL_KEY, names.PORTAL, clock=lambda: time.time() - age_s)
        self.broker.value = signer.seal(desired, audience="node1", action=Action.DESIRED, epoch=serial)
        return self.sync.run_once()

    def reported(self) -> list[str]:
        self.rejections.send(self.broker)  # type: ignore[arg-type]
        return [report.code for report in self.broker.sent if hasattr(report, "code")]


def launch(attempt: str) -> Launch:
    return Launch(attempt=attempt, job=1, epoch=1, name="n", user="u", launcher="script", command="x")


def stop(attempt: str) -> Stop:
    return Stop(attempt=attempt, job=1, epoch=1)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_every_order_is_carried_out_once_however_often_it_is_read(bench: Bench) -> None:
    for serial in (1, 1, 2):
        bench.order(serial, launches=[launch("a")], stops=[stop("b")])
    assert bench.hands.done == [("stop", "b"), ("launch", "a")]


def test_the_same_snapshot_is_looked_at_once(bench: Bench) -> None:
    assert bench.order(1) is True
    assert bench.sync.run_once() is False


def test_one_order_that_fails_stops_no_other_and_is_tried_again(bench: Bench) -> None:
    bench.hands.fails = {"a"}
    bench.order(1, launches=[launch("a"), launch("b")], forget=["c"])
    assert bench.hands.done == [("launch", "b"), ("forget", "c")]
    bench.hands.fails = set()
    assert bench.sync.run_once() is True
    assert ("launch", "a") in bench.hands.done


def test_orders_about_the_hardware_stand_in_nobodys_way_and_are_handed_on_again(bench: Bench) -> None:
    bench.hands.fails = {"o1"}
    orders = [ReleaseOrder(id="o1")]
    bench.order(1, launches=[launch("a")], orders=orders)
    assert bench.hands.done == [("launch", "a")]
    bench.hands.fails = set()
    assert bench.sync.run_once() and bench.hands.done[1:] == [("hardware", "o1")]
    bench.order(2, launches=[launch("a")], orders=orders)
    assert bench.hands.done[2:] == [("hardware", "o1")], "what it does about a repeat is for the book of orders"


def test_an_older_order_is_refused_an_equal_one_is_not(bench: Bench) -> None:
    bench.order(7)
    bench.order(7, launches=[launch("a")])
    bench.order(6, launches=[launch("b")])
    assert (bench.hands.done, bench.reported()) == ([("launch", "a")], []), "overtaken on its way: nothing to report"
    bench.order(6, age_s=30, launches=[launch("b")])
    assert (bench.hands.done, bench.reported()) == ([("launch", "a")], ["stale_serial"])


def test_the_newest_order_is_remembered_over_a_restart(bench: Bench) -> None:
    bench.order(7)
    bench.restart()
    assert bench.sync.serial == 7
    bench.order(6, launches=[launch("b")])
    assert bench.hands.done == []


def test_a_torn_serial_file_does_not_stop_the_node(bench: Bench) -> None:
    (bench.settings.state_dir / "serial.json").write_text("{")
    bench.restart()
    bench.order(3, launches=[launch("a")])
    assert bench.hands.done == [("launch", "a")]


def test_an_order_for_another_node_inside_a_good_envelope_is_refused(bench: Bench) -> None:
    bench.order(1, node="node2", launches=[launch("a")])
    assert (bench.hands.done, bench.reported()) == ([], ["wrong_audience"])


def test_no_order_at_all_means_nothing(bench: Bench) -> None:
    bench.order(1, launches=[launch("a")])
    bench.broker.value = None
    assert bench.sync.run_once() is False
    bench.order(2)
    assert bench.hands.done == [("launch", "a")]


def test_an_order_read_twice_around_an_absence_is_not_a_new_one_for_a_running_attempt(bench: Bench) -> None:
    bench.order(1, launches=[launch("a")])
    bench.order(2)
    bench.order(3, launches=[launch("a")])
    assert bench.hands.done == [("launch", "a")] * 2, "asked again; the supervisor knows the attempt from its spool"


def test_echo_digest_and_acknowledgements_are_passed_on(bench: Bench) -> None:
    nonce = bench.pulse.beat()
    bench.order(1, echo=nonce, inventory_digest="d", acknowledged={"a": Acknowledged(event_seq=2)})
    assert (bench.pulse.echoed, bench.sync.inventory_digest) == (1, "d")


def test_refusals_wait_for_the_broker_and_are_told_once_in_a_while(bench: Bench) -> None:
    now = [0.0]
    bench.rejections = Rejections(lambda: now[0])
    for _ in range(3):
        bench.rejections.note(Refused("malformed", "m"))
    bench.broker.down = True
    with pytest.raises(BrokerDown):
        bench.reported()
    bench.broker.down = False
    assert bench.reported() == ["malformed"]
    now[0] = 31.0
    bench.rejections.note(Refused("malformed", "m"))
    assert bench.reported() == ["malformed"] * 2


def test_spent_nonces_do_not_pile_up(bench: Bench) -> None:
    now = [1_000_000.0]
    rings: list[int] = []
    doorbell = Doorbell(bench.settings, bench.rejections, lambda: rings.append(1), lambda: now[0])
    for number in range(50):
        doorbell._spend(str(number), now[0])
    now[0] += 500
    doorbell._spend("late", now[0])
    assert set(doorbell._nonces) == {"late"}


def test_a_loop_outlives_whatever_its_body_raises(caplog: pytest.LogCaptureFixture) -> None:
    turns: list[int] = []

    def body() -> float:
        turns.append(1)
        if len(turns) == 1:
            raise RuntimeError("a bug")
        if len(turns) == 2:
            raise BrokerDown("gone")
        loop._stopping = len(turns) >= 3
        return 0.0

    loop = Loop("test", body)
    loop.start()
    loop._thread.join(10)
    assert len(turns) == 3
    assert "a bug" in caplog.text and "gone" in caplog.text


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_loop_that_hangs_or_dies_is_seen() -> None:
    entered, leave = threading.Event(), threading.Event()

    def body() -> float:
        entered.set()
        leave.wait(10)
        raise SystemExit

    loop = Loop("test", body)
    assert loop.stuck_s() == 0.0, "not started yet"
    loop.start()
    assert entered.wait(10)
    assert 0.0 < loop.stuck_s() < 10.0
    leave.set()
    loop._thread.join(10)
    assert loop.stuck_s() == float("inf")


def test_a_worker_restarts_itself_once_in_five_minutes(tmp_path: Path) -> None:
    now, left = [1000.0], []

    def restart() -> None:
        Restarter(tmp_path / "stamp", lambda: now[0], left.append).restart("deaf")

    restart()
    now[0] += 299
    restart()
    assert left == [EXIT_RESTART]
    now[0] += 2
    restart()
    now[0] -= 100_000  # the clock was set back: the stamp lies in the future
    restart()
    assert left == [EXIT_RESTART] * 3
