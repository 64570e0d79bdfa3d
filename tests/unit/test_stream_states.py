"""The table of the states of a stream: the next states and the control messages."""

from __future__ import annotations

import itertools

import pytest

from aiordma.streams.states import TRANSITIONS, StreamEvent, StreamState, Transition, transition
from aiordma.streams.wire import Control

E, S = StreamEvent, StreamState
EVERYTHING = list(itertools.product(StreamState, StreamEvent))
FINAL = [S.ENDED, S.BROKEN]
OWN = [E.FINISH, E.LEAVE]
END_CONTROLS = [Control.SHUTDOWN, Control.DISCONNECT]


def walk(*events: StreamEvent) -> tuple[list[StreamState], list[Control]]:
    """Return the states from OPEN on, and the control messages that were sent."""
    states, sent = [S.OPEN], list[Control]()
    for event in events:
        state, control = transition(states[-1], event)
        states.append(state)
        if control is not None:
            sent.append(control)
    return states, sent


def stays_false(values: list[bool]) -> bool:
    """Return True if no value after a False is True."""
    return all(now or not later for now, later in itertools.pairwise(values))


WALKS = [
    walk(*events) for length in range(6) for events in itertools.product(StreamEvent, repeat=length)
]

PATHS: dict[str, tuple[list[StreamEvent], StreamState, list[Control]]] = {
    "this side finishes first": (
        [E.FINISH, E.PEER_FINISHED],
        S.ENDED,
        [Control.SHUTDOWN],
    ),
    "the peer answers SHUTDOWN with DISCONNECT": (
        [E.FINISH, E.PEER_LEFT],
        S.ENDED,
        [Control.SHUTDOWN],
    ),
    "the peer finishes first": ([E.PEER_FINISHED, E.FINISH], S.ENDED, [Control.DISCONNECT]),
    "this side leaves": ([E.LEAVE], S.ENDED, [Control.DISCONNECT]),
    "this side finishes and leaves": (
        [E.FINISH, E.LEAVE],
        S.ENDED,
        [Control.SHUTDOWN, Control.DISCONNECT],
    ),
    "this side leaves a peer that has finished": (
        [E.PEER_FINISHED, E.LEAVE],
        S.ENDED,
        [Control.DISCONNECT],
    ),
    "the peer leaves": ([E.PEER_LEFT], S.ENDED, []),
    "the peer finishes and leaves": ([E.PEER_FINISHED, E.PEER_LEFT], S.ENDED, []),
    "the connection is lost": ([E.LOST], S.BROKEN, []),
    "the connection is lost while this side still receives": (
        [E.FINISH, E.LOST],
        S.BROKEN,
        [Control.SHUTDOWN],
    ),
    "the connection is lost while this side still sends": ([E.PEER_FINISHED, E.LOST], S.BROKEN, []),
    "the connection ends after DISCONNECT": ([E.LEAVE, E.LOST], S.ENDED, [Control.DISCONNECT]),
}


@pytest.mark.parametrize("name", PATHS)
def test_a_sequence_of_events_ends_in_its_state(name: str) -> None:
    events, end, controls = PATHS[name]
    states, sent = walk(*events)
    assert (states[-1], sent) == (end, controls)


def test_every_state_has_an_entry() -> None:
    assert set(TRANSITIONS) == set(StreamState)


def test_every_event_has_an_outcome_in_every_state() -> None:
    for state, event in EVERYTHING:
        assert transition(state, event) == TRANSITIONS[state].get(event, Transition(state, None))


def test_every_state_can_be_reached() -> None:
    assert {state for states, _ in WALKS for state in states} == set(StreamState)


def test_every_entry_of_the_table_changes_the_state() -> None:
    assert all(
        entry.state is not state for state, row in TRANSITIONS.items() for entry in row.values()
    )


@pytest.mark.parametrize("state", FINAL)
@pytest.mark.parametrize("event", StreamEvent)
def test_a_final_state_stays_and_sends_nothing(state: StreamState, event: StreamEvent) -> None:
    assert transition(state, event) == (state, None)


@pytest.mark.parametrize("state", [state for state in StreamState if state not in FINAL])
def test_a_state_that_is_not_final_can_end_and_break(state: StreamState) -> None:
    assert transition(state, E.LEAVE).state is S.ENDED
    assert transition(state, E.PEER_LEFT).state is S.ENDED
    assert transition(state, E.LOST).state is S.BROKEN


@pytest.mark.parametrize(
    ("state", "sends", "receives"),
    [
        (S.OPEN, True, True),
        (S.RECEIVING, False, True),
        (S.SENDING, True, False),
        (S.ENDED, False, False),
        (S.BROKEN, False, False),
    ],
)
def test_a_state_allows_sending_and_receiving(
    state: StreamState, sends: bool, receives: bool
) -> None:
    assert (state.may_send, state.may_receive) == (sends, receives)


def test_a_direction_that_ended_stays_ended() -> None:
    for states, _ in WALKS:
        assert stays_false([state.may_send for state in states])
        assert stays_false([state.may_receive for state in states])


@pytest.mark.parametrize("event", StreamEvent)
def test_a_repeated_event_changes_nothing(event: StreamEvent) -> None:
    for state in StreamState:
        once = transition(state, event).state
        assert transition(once, event) == (once, None)


def test_events_of_the_peer_send_nothing() -> None:
    peer_events = [(state, event) for state, event in EVERYTHING if event not in OWN]
    assert {transition(*pair).control for pair in peer_events} == {None}


def test_the_end_of_sending_sends_a_control_message() -> None:
    for state, event in itertools.product(StreamState, OWN):
        if state.may_send:
            assert transition(state, event).control in END_CONTROLS


def test_nothing_follows_disconnect() -> None:
    for _, sent in WALKS:
        assert sent.count(Control.DISCONNECT) <= 1
        assert sent.count(Control.SHUTDOWN) <= 1
        assert Control.DISCONNECT not in sent[:-1]
        assert Control.KEEPALIVE not in sent


def test_only_a_side_that_still_receives_sends_shutdown() -> None:
    for state, event in EVERYTHING:
        following, control = transition(state, event)
        assert (control is Control.SHUTDOWN) <= following.may_receive
        assert (control is Control.DISCONNECT) <= (following is S.ENDED)


def test_both_sides_end_together() -> None:
    """Both sides of a stream use the same table, and end together."""
    event_at_peer = {Control.SHUTDOWN: E.PEER_FINISHED, Control.DISCONNECT: E.PEER_LEFT}
    for events in itertools.product([0, 1], OWN, [0, 1], OWN, [0, 1], OWN):
        states = [S.OPEN, S.OPEN]
        for side, event in zip(events[::2], events[1::2], strict=True):
            assert isinstance(side, int)
            assert isinstance(event, StreamEvent)
            states[side], control = transition(states[side], event)
            if control is not None:
                states[1 - side] = transition(states[1 - side], event_at_peer[control]).state
        assert (states[0] is S.ENDED) == (states[1] is S.ENDED)
        assert states[0].may_send == states[1].may_receive
        assert states[1].may_send == states[0].may_receive
