"""The transition tables: complete, and closed where a life ends."""

import pytest

from wire.states import (
    ATTEMPT_ACTIVE,
    ATTEMPT_ENDED,
    ATTEMPT_MOVES,
    END_STATE,
    NODE_MOVES,
    AttemptState,
    EndReason,
    NodeState,
)


def test_every_state_has_a_row() -> None:
    assert set(ATTEMPT_MOVES) == set(AttemptState)
    assert set(NODE_MOVES) == set(NodeState)
    assert set(END_STATE) == set(EndReason)


def test_an_ended_attempt_stays_ended() -> None:
    assert {AttemptState.SUCCEEDED, AttemptState.FAILED, AttemptState.STOPPED, AttemptState.LOST} == ATTEMPT_ENDED
    assert all(not ATTEMPT_MOVES[state] for state in ATTEMPT_ENDED)


@pytest.mark.parametrize("state", sorted(ATTEMPT_ACTIVE))
def test_every_active_attempt_can_end_in_every_way(state: AttemptState) -> None:
    assert ATTEMPT_MOVES[state] >= ATTEMPT_ENDED


def test_no_state_leads_back() -> None:
    order = list(AttemptState)
    assert all(order.index(after) > order.index(before) for before, moves in ATTEMPT_MOVES.items() for after in moves)


def test_every_node_state_finds_its_way_to_ready() -> None:
    reached = {NodeState.READY}
    while True:
        more = {state for state, moves in NODE_MOVES.items() if moves & reached} - reached
        if not more:
            break
        reached |= more
    assert reached == set(NodeState)


def test_end_reasons_end() -> None:
    assert set(END_STATE.values()) <= ATTEMPT_ENDED
