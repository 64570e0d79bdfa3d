"""The table of a stream's life: where each word takes it, and what is said."""

from __future__ import annotations

import itertools

import pytest

from aiordma.streams.states import TRANSITIONS, Transition, StreamEvent, StreamState, transition
from aiordma.streams.wire import Control

E, S = StreamEvent, StreamState
EVERYTHING = list(itertools.product(StreamState, StreamEvent))
FINAL = [S.ENDED, S.BROKEN]
OWN = [E.FINISH, E.LEAVE]
LAST_WORDS = [Control.SHUTDOWN, Control.DISCONNECT]


def walk(*events: StreamEvent) -> tuple[list[StreamState], list[Control]]:
    """The states on the way from OPEN, and what was said."""
    states, said = [S.OPEN], list[Control]()
    for event in events:
        state, word = transition(states[-1], event)
        states.append(state)
        if word is not None:
            said.append(word)
    return states, said


def never_again(values: list[bool]) -> bool:
    """Whether what has become false stays so."""
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
    "the peer answers the end with its own": ([E.FINISH, E.PEER_LEFT], S.ENDED, [Control.SHUTDOWN]),
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
    "it is lost to who still receives": ([E.FINISH, E.LOST], S.BROKEN, [Control.SHUTDOWN]),
    "it is lost to who still sends": ([E.PEER_FINISHED, E.LOST], S.BROKEN, []),
    "it ends when all is said": ([E.LEAVE, E.LOST], S.ENDED, [Control.DISCONNECT]),
}


@pytest.mark.parametrize("name", PATHS)
def test_the_paths_that_the_module_describes(name: str) -> None:
    events, end, words = PATHS[name]
    states, said = walk(*events)
    assert (states[-1], said) == (end, words)


def test_every_state_has_an_entry() -> None:
    assert set(TRANSITIONS) == set(StreamState)


def test_every_event_has_an_outcome_in_every_state() -> None:
    for state, event in EVERYTHING:
        assert transition(state, event) == TRANSITIONS[state].get(event, Transition(state, None))


def test_every_state_can_be_reached() -> None:
    assert {state for states, _ in WALKS for state in states} == set(StreamState)


def test_no_entry_of_the_table_leads_nowhere() -> None:
    assert all(
        entry.state is not state for state, row in TRANSITIONS.items() for entry in row.values()
    )


@pytest.mark.parametrize("state", FINAL)
@pytest.mark.parametrize("event", StreamEvent)
def test_what_is_final_stays_and_is_silent(state: StreamState, event: StreamEvent) -> None:
    assert transition(state, event) == (state, None)


@pytest.mark.parametrize("state", [state for state in StreamState if state not in FINAL])
def test_what_is_not_final_can_end_and_break(state: StreamState) -> None:
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
def test_who_may_do_what(state: StreamState, sends: bool, receives: bool) -> None:
    assert (state.may_send, state.may_receive) == (sends, receives)


def test_what_may_not_be_done_may_never_be_done_again() -> None:
    for states, _ in WALKS:
        assert never_again([state.may_send for state in states])
        assert never_again([state.may_receive for state in states])


@pytest.mark.parametrize("event", StreamEvent)
def test_everything_happens_once(event: StreamEvent) -> None:
    for state in StreamState:
        once = transition(state, event).state
        assert transition(once, event) == (once, None)


def test_only_what_this_side_does_is_said() -> None:
    heard = [(state, event) for state, event in EVERYTHING if event not in OWN]
    assert {transition(*pair).control for pair in heard} == {None}


def test_who_may_not_send_any_more_has_said_so() -> None:
    for state, event in itertools.product(StreamState, OWN):
        if state.may_send:
            assert transition(state, event).control in LAST_WORDS


def test_nothing_follows_the_last_word() -> None:
    for _, said in WALKS:
        assert said.count(Control.DISCONNECT) <= 1
        assert said.count(Control.SHUTDOWN) <= 1
        assert Control.DISCONNECT not in said[:-1]
        assert Control.KEEPALIVE not in said


def test_shutdown_is_only_said_by_who_still_receives() -> None:
    for state, event in EVERYTHING:
        following, word = transition(state, event)
        assert (word is Control.SHUTDOWN) <= following.may_receive
        assert (word is Control.DISCONNECT) <= (following is S.ENDED)


def test_the_peer_hears_of_every_end_that_it_has_not_caused() -> None:
    """Both sides of a stream go by the same table, and end together."""
    as_heard = {Control.SHUTDOWN: E.PEER_FINISHED, Control.DISCONNECT: E.PEER_LEFT}
    for events in itertools.product([0, 1], OWN, [0, 1], OWN, [0, 1], OWN):
        states = [S.OPEN, S.OPEN]
        for side, event in zip(events[::2], events[1::2], strict=True):
            assert isinstance(side, int)
            assert isinstance(event, StreamEvent)
            states[side], word = transition(states[side], event)
            if word is not None:
                states[1 - side] = transition(states[1 - side], as_heard[word]).state
        assert (states[0] is S.ENDED) == (states[1] is S.ENDED)
        assert states[0].may_send == states[1].may_receive
        assert states[1].may_send == states[0].may_receive
