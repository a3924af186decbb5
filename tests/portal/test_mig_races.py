"""What happens at once: a start and a sending, two requests, two answers. On real transactions of PostgreSQL."""

import threading
from collections.abc import Callable
from functools import partial

import pytest
from django.db import connection

from portal.models import Allocation, Event, Gpu, HardwareOrder
from portal.scheduler.decisions import Placement, Start
from portal.services import accounts, jobs, mig, orders, scheduling, starting, transitions
from portal.services.errors import Problem
from portal.services.transitions import Conflict
from tests.portal.orders import SUCCEEDED, report, submitted
from tests.portal.test_mig_workflow import a_slice, answered, card, cut_card, shows, slice_uuid
from wire.hardware import OrderResult

pytestmark = pytest.mark.django_db(transaction=True)
ROUNDS = 12


def at_once(*acts: Callable[[], object]) -> list[object]:
    """-> what each came to: its answer or its refusal."""
    barrier = threading.Barrier(len(acts))
    outcomes: list[object] = [None] * len(acts)

    def run(place: int, act: Callable[[], object]) -> None:
        try:
            barrier.wait(10)
            outcomes[place] = act()
        except Problem as problem:
            outcomes[place] = problem
        finally:
            connection.close()

    threads = [threading.Thread(target=run, args=item) for item in enumerate(acts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return outcomes


def test_a_card_is_never_sent_to_be_cut_while_a_job_has_just_taken_it(broker_url: str) -> None:
    """The scheduler saw the card before it was asked for; its decision and the sending meet."""
    bob, gpu = accounts.create_user("bob", "correct-horse-battery"), cut_card(gpus=1)
    results = set()

    def asked_and_looked() -> int:
        mig.apply(card(gpu.node), "2 × 3g.40gb", actor=None)
        return mig.advance()

    for _ in range(ROUNDS):
        job = submitted(bob)
        decision = Start(job.pk, (Placement("n1", (gpu.uuid,)),))
        start = partial(scheduling.carry_out, decision)
        started, _told = at_once(start, asked_and_looked)
        late, _told = at_once(start, mig.advance)
        order = HardwareOrder.objects.get(finished_at=None)
        holds = Allocation.objects.filter(gpu=gpu, released_at=None).exists()
        assert not (holds and order.state != "waiting"), "sent while it is held"
        results.add((bool(started or late), str(order.state)))
        if holds:
            report(job.attempts.get().shares.get(), SUCCEEDED)
        else:
            jobs.cancel(job, actor=bob)
        mig.advance()
        assert answered(order, "failed", "enough")
        mig.advance()
    assert results and results <= {(True, "waiting"), (False, "sent")}


def test_two_who_ask_at_once_make_one_change(broker_url: str) -> None:
    gpu = cut_card()
    for number in range(ROUNDS):
        outcomes = at_once(*[lambda: mig.apply(card(gpu.node), "2 × 3g.40gb", actor=None)] * 3)
        refused = [one for one in outcomes if isinstance(one, Problem)]
        assert len(refused) == 2 and {one.code for one in refused} == {"change_underway"}
        orders.cancel(HardwareOrder.objects.get(finished_at=None))
        assert HardwareOrder.objects.count() == number + 1 and not Gpu.objects.exclude(draining="").exists()


def test_two_answers_and_two_looks_at_once_are_one_step_each(broker_url: str) -> None:
    gpu = cut_card()
    order = mig.apply(gpu, "2 × 3g.40gb", actor=None)
    assert sorted(at_once(*[mig.advance] * 3)) == [0, 0, 1]  # type: ignore[type-var]
    told = OrderResult(id=str(order.pk), at=0.0, state="undone", message="In use.")
    assert sorted(at_once(*[lambda: orders.result(gpu.node, told)] * 3)) == [False, False, True]  # type: ignore[type-var]
    assert sorted(at_once(*[mig.advance] * 3)) == [0, 0, 1]  # type: ignore[type-var]
    kinds = list(Event.objects.filter(gpu=gpu).values_list("kind", flat=True))
    assert kinds.count("order.finished") == kinds.count("gpu.resumed") == 1 and kinds.count("order.state") == 3


@pytest.mark.parametrize("state", ["quarantined", "lost", "suspect"])
def test_a_slice_of_a_card_that_was_just_fenced_is_not_given_out(broker_url: str, state: str) -> None:
    """The decision is older than the trouble of the card; what is cut from it is no better off."""
    bob, node = accounts.create_user("bob", "correct-horse-battery"), cut_card().node
    shows(node, "3g.40gb", "3g.40gb")
    job = submitted(bob, resources=a_slice("3g.40gb"))
    transitions.move(card(node), state, message="in the meantime")
    with pytest.raises(Conflict):
        starting.start(Start(job.pk, (Placement(node.name, (slice_uuid(node, 0),)),)))
    assert not Allocation.objects.exists()
