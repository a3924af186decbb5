"""Orders about the hardware on a node: once each, through repeats and restarts; and strangers that are ended."""

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from node_harness import wait_until

from wire.hardware import MigOrder, MigSlice, OrderResult, ReleaseOrder, StopForeignOrder
from workers.orders import KEPT_S, TRIES_MOST, Orders

HOLD = "import time; print('up', flush=True); time.sleep(300)"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {HOLD}"


@dataclass
class Carrier:
    """Stands where the reading process does and writes down what it was handed."""

    taken: list[MigOrder | ReleaseOrder] = field(default_factory=list)
    answers: list[OrderResult] = field(default_factory=list)

    def carry_out(self, order: MigOrder | ReleaseOrder) -> None:
        self.taken.append(order)

    def results(self) -> list[OrderResult]:
        answers, self.answers = self.answers, []
        return answers

    def answer(self, order: MigOrder | ReleaseOrder, state: str, message: str = "") -> None:
        self.answers.append(OrderResult(id=order.id, at=1.0, state=state, message=message))


@dataclass
class Runs:
    """Attempts that run here: their processes by id."""

    attempts: dict[str, set[int]] = field(default_factory=dict)

    def active(self) -> list[str]:
        return list(self.attempts)

    def processes(self, attempt: str) -> set[int]:
        return self.attempts.get(attempt, set())


@dataclass
class Desk:
    folder: Path
    carrier: Carrier = field(default_factory=Carrier)
    runs: Runs = field(default_factory=Runs)
    now: float = 1000.0

    def __post_init__(self) -> None:
        self.orders = self.open()

    def open(self) -> Orders:
        """As after a start of the worker."""
        self.orders = Orders(self.folder, self.carrier, self.runs, lambda: self.now)
        return self.orders

    def states(self) -> list[tuple[str, str]]:
        return [(result.state, result.message) for result in self.orders.results()]

    def outcome(self) -> tuple[str, str]:
        """Of the one order that was given, once it is over."""
        wait_until(lambda: [state for state, _ in self.states()] in (["done"], ["failed"]), what="the order is over")
        return self.states()[0]


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def mig() -> MigOrder:
    return MigOrder(id=str(uuid.uuid4()), gpu_uuid="GPU-1", layout=[MigSlice("3g.40gb", 0), MigSlice("3g.40gb", 4)])


def test_an_order_is_handed_over_once_however_often_it_is_read(desk: Desk) -> None:
    order, release = mig(), ReleaseOrder(id=str(uuid.uuid4()))
    for _ in range(3):
        desk.orders.take([order, release])
    assert desk.carrier.taken == [order, release] and desk.states() == []
    desk.carrier.answer(order, "running", "Cutting.")
    assert desk.states() == [("running", "Cutting.")] == desk.states()
    desk.carrier.answer(order, "done", "Cut.")
    desk.carrier.answer(order, "failed", "too late")
    assert desk.states() == [("done", "Cut.")] == desk.states(), "told until nobody asks"
    desk.orders.take([release])
    assert desk.states() == []
    desk.orders.take([order])
    assert desk.states() == [("done", "Cut.")] and len(desk.carrier.taken) == 2


def test_a_result_is_known_after_a_restart_and_the_order_not_carried_out_again(desk: Desk) -> None:
    order = mig()
    desk.orders.take([order])
    desk.carrier.answer(order, "undone", "It was in use.")
    assert desk.states() == [("undone", "It was in use.")]
    desk.open()
    desk.orders.take([order])
    assert desk.states() == [("undone", "It was in use.")] and len(desk.carrier.taken) == 1


def test_an_order_that_a_restart_interrupted_is_taken_up_again_but_not_for_ever(desk: Desk) -> None:
    order = mig()
    for number in range(1, TRIES_MOST + 1):
        desk.open().take([order])
        assert len(desk.carrier.taken) == number
    desk.open().take([order])
    assert len(desk.carrier.taken) == TRIES_MOST
    (state, message), = desk.states()
    assert state == "failed" and "ended 3 times" in message


def test_a_file_that_was_torn_does_not_keep_the_worker_from_starting(desk: Desk) -> None:
    order = mig()
    desk.orders.take([order])
    (path,) = (desk.folder / "orders").glob("*.json")
    path.write_bytes(path.read_bytes()[:20])
    desk.open().take([order])
    assert desk.carrier.taken == [order, order]


def test_an_order_without_a_proper_name_is_not_taken(desk: Desk) -> None:
    desk.orders.take([MigOrder(id="../../etc/passwd", gpu_uuid="GPU-1")])
    assert desk.carrier.taken == [] and not (desk.folder / "orders").exists()


def test_what_nobody_asks_for_any_more_is_cleared_out_in_the_end(desk: Desk) -> None:
    order = mig()
    desk.orders.take([order])
    desk.carrier.answer(order, "done")
    assert desk.states()
    desk.orders.take([])
    assert list((desk.folder / "orders").iterdir())
    desk.now += KEPT_S + 1
    desk.orders.take([])
    assert not list((desk.folder / "orders").iterdir())


# --- strangers --------------------------------------------------------------------------------------------------------

Begin = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def begin() -> Iterator[Begin]:
    begun: list[subprocess.Popen[bytes]] = []

    def start(code: str, **variables: str) -> subprocess.Popen[bytes]:
        begun.append(subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=os.environ | variables))
        assert begun[-1].stdout is not None and begun[-1].stdout.readline() == b"up\n"
        return begun[-1]

    yield start
    for process in begun:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def stop(pid: int, start_time: float | None = None, grace_s: float = 20.0) -> StopForeignOrder:
    began = psutil.Process(pid).create_time() if start_time is None else start_time
    return StopForeignOrder(id=str(uuid.uuid4()), gpu_uuid="GPU-1", pid=pid, start_time=began, grace_s=grace_s)


def test_a_stranger_is_asked_to_end(desk: Desk, begin: Begin) -> None:
    process = begin(HOLD)
    desk.orders.take([stop(process.pid)])
    assert desk.outcome() == ("done", f"Process {process.pid} ended when it was asked to.")
    assert process.wait(10) == -signal.SIGTERM


def test_a_stubborn_stranger_is_killed_after_the_grace(desk: Desk, begin: Begin) -> None:
    process = begin(STUBBORN)
    desk.orders.take([stop(process.pid, grace_s=0.2)])
    state, message = desk.outcome()
    assert state == "done" and "was killed" in message and process.wait(10) == -signal.SIGKILL


def test_another_process_under_the_same_number_is_left_alone(desk: Desk, begin: Begin) -> None:
    process = begin(HOLD)
    desk.orders.take([stop(process.pid, start_time=psutil.Process(process.pid).create_time() - 60.0)])
    assert desk.outcome() == ("done", f"Process {process.pid} was gone already.")
    assert process.poll() is None


def test_a_process_of_a_running_attempt_is_no_stranger(desk: Desk, begin: Begin) -> None:
    process = begin(HOLD, GPUYARD_ATTEMPT_ID="a1")
    desk.runs.attempts["a1"] = set()
    desk.orders.take([stop(process.pid)])
    assert desk.outcome() == ("failed", f"Process {process.pid} belongs to attempt a1, which runs.")
    assert process.poll() is None


def test_a_process_in_the_tree_of_a_running_attempt_is_no_stranger_whatever_it_says(desk: Desk, begin: Begin) -> None:
    process = begin(HOLD)
    desk.runs.attempts["a1"] = {process.pid}
    desk.orders.take([stop(process.pid)])
    assert desk.outcome()[0] == "failed" and process.poll() is None


def test_a_process_of_an_attempt_that_is_over_is_a_stranger(desk: Desk, begin: Begin) -> None:
    process = begin(HOLD, GPUYARD_ATTEMPT_ID="a0")
    desk.runs.attempts["a1"] = set()
    desk.orders.take([stop(process.pid)])
    assert desk.outcome()[0] == "done" and process.wait(10) == -signal.SIGTERM


def test_the_worker_does_not_end_itself(desk: Desk) -> None:
    desk.orders.take([stop(os.getpid())])
    assert desk.outcome() == ("failed", f"Process {os.getpid()} belongs to this node itself.")


def test_ending_a_stranger_is_taken_up_again_after_a_restart(desk: Desk, begin: Begin) -> None:
    process = begin(STUBBORN)
    order = stop(process.pid, grace_s=0.2)
    desk.orders.take([order])
    wait_until(lambda: desk.states() or None)
    desk.open().take([order])
    assert desk.outcome()[0] == "done" and process.wait(10) == -signal.SIGKILL
