"""The table of the states of a stream, and its diagram in docs/streams.md."""

from __future__ import annotations

import itertools

import pytest
from helpers import ROOT
from state_diagram import check_diagram

from aiordma.streams.states import TRANSITIONS, StreamEvent, StreamState, transition
from aiordma.streams.wire import Control

E, S = StreamEvent, StreamState
EVERYTHING = list(itertools.product(StreamState, StreamEvent))
OWN = [E.FINISH, E.LEAVE]
SHUTDOWN, DISCONNECT = Control.SHUTDOWN, Control.DISCONNECT


def walk(*events: StreamEvent) -> tuple[list[StreamState], list[Control]]:
    """Return the states from OPEN on, and the control messages that were sent."""
    states, sent = [S.OPEN], list[Control]()
    for event in events:
        state, control = transition(states[-1], event)
        states.append(state)
        if control is not None:
            sent.append(control)
    return states, sent


WALKS = [walk(*events) for length in range(6) for events in itertools.product(E, repeat=length)]


@pytest.mark.parametrize(
    ("events", "end", "controls"),
    [
        ([E.FINISH, E.PEER_FINISHED], S.ENDED, [SHUTDOWN]),
        ([E.FINISH, E.PEER_LEFT], S.ENDED, [SHUTDOWN]),
        ([E.PEER_FINISHED, E.FINISH], S.ENDED, [DISCONNECT]),
        ([E.LEAVE], S.ENDED, [DISCONNECT]),
        ([E.FINISH, E.LEAVE], S.ENDED, [SHUTDOWN, DISCONNECT]),
        ([E.PEER_FINISHED, E.LEAVE], S.ENDED, [DISCONNECT]),
        ([E.PEER_LEFT], S.ENDED, []),
        ([E.PEER_FINISHED, E.PEER_LEFT], S.ENDED, []),
        ([E.LOST], S.BROKEN, []),
        ([E.FINISH, E.LOST], S.BROKEN, [SHUTDOWN]),
        ([E.PEER_FINISHED, E.LOST], S.BROKEN, []),
        ([E.LEAVE, E.LOST], S.ENDED, [DISCONNECT]),
    ],
)
def test_a_sequence_of_events_ends_in_its_state(
    events: list[StreamEvent], end: StreamState, controls: list[Control]
) -> None:
    states, sent = walk(*events)
    assert (states[-1], sent) == (end, controls)


def test_every_state_can_be_reached_and_allows_sending_or_receiving_or_neither() -> None:
    assert set(TRANSITIONS) == {state for states, _ in WALKS for state in states} == set(S)
    assert [state for state in S if state.may_send] == [S.OPEN, S.SENDING]
    assert [state for state in S if state.may_receive] == [S.OPEN, S.RECEIVING]


def test_a_direction_that_ended_stays_ended() -> None:
    for states, sent in WALKS:
        for before, after in itertools.pairwise(states):
            assert before.may_send >= after.may_send
            assert before.may_receive >= after.may_receive
        assert (sent.count(SHUTDOWN) <= 1, DISCONNECT in sent[:-1]) == (True, False)


def test_an_event_changes_the_state_once() -> None:
    for state, event in EVERYTHING:
        following, control = transition(state, event)
        assert transition(following, event) == (following, None)
        assert (following is state) == (event not in TRANSITIONS[state])
        assert control is None or event in OWN
        assert (control is None) == (event not in OWN or following is state)
        assert (control is SHUTDOWN) <= following.may_receive
        assert (control is DISCONNECT) <= (following is S.ENDED)
        if state not in (S.ENDED, S.BROKEN) and event is not E.FINISH:
            assert event is E.PEER_FINISHED or following in (S.ENDED, S.BROKEN)


def test_both_sides_end_together() -> None:
    """Both sides of a stream use the same table, and end together."""
    event_at_peer = {SHUTDOWN: E.PEER_FINISHED, DISCONNECT: E.PEER_LEFT}
    for events in itertools.product(itertools.product([0, 1], OWN), repeat=3):
        states = [S.OPEN, S.OPEN]
        for side, event in events:
            states[side], control = transition(states[side], event)
            if control is not None:
                states[1 - side] = transition(states[1 - side], event_at_peer[control]).state
        assert (states[0] is S.ENDED) == (states[1] is S.ENDED)
        assert states[0].may_send == states[1].may_receive
        assert states[1].may_send == states[0].may_receive


def arrow(event: StreamEvent, control: Control | None) -> str:
    return event.name if control is None else f"{event.name} / send {control.name}"


def test_the_page_shows_the_table() -> None:
    table = {
        state: [(following, arrow(event, sent)) for event, (following, sent) in row.items()]
        for state, row in TRANSITIONS.items()
    }
    assert (ROOT / "docs/streams.md").read_text().count("```mermaid") == 1
    check_diagram("docs/streams.md", table)
