"""The table of an id's states: the state that each call and each event leads to."""

from __future__ import annotations

import itertools

import pytest

from aiordma.cm import CmState
from aiordma.cm.states import (
    CALLS,
    EVENTS,
    FINAL,
    HINTS,
    TRANSITIONS,
    WAITING,
    CmCall,
    after_call,
    after_event,
    is_failure,
)
from aiordma.enums import CmEventType

C, E, S = CmCall, CmEventType, CmState

PATHS: dict[str, tuple[CmState, list[CmCall | CmEventType], CmState]] = {
    "an address is resolved": (S.IDLE, [C.RESOLVE_ADDR, E.ADDR_RESOLVED], S.ADDR_RESOLVED),
    "bound, then listening": (S.IDLE, [C.BIND_ADDR, C.LISTEN], S.LISTENING),
    "a listener with requests": (
        S.IDLE,
        [C.LISTEN, E.CONNECT_REQUEST, E.CONNECT_REQUEST],
        S.LISTENING,
    ),
    "the peer accepts": (S.ROUTE_RESOLVED, [C.CONNECT, E.ESTABLISHED], S.CONNECTED),
    "the peer disconnects at once": (
        S.ROUTE_RESOLVED,
        [C.CONNECT, E.DISCONNECTED],
        S.DISCONNECTED,
    ),
    "no queue pair, and the peer disconnects": (
        S.ROUTE_RESOLVED,
        [C.CONNECT, E.CONNECT_RESPONSE, E.DISCONNECTED],
        S.DISCONNECTED,
    ),
    "a neighbour changed, and the peer rejects, while disconnecting": (
        S.CONNECTED,
        [C.DISCONNECT, E.UNREACHABLE, E.REJECTED],
        S.DISCONNECTED,
    ),
    "an error while disconnecting": (
        S.CONNECTED,
        [C.DISCONNECT, E.CONNECT_ERROR],
        S.DISCONNECTED,
    ),
    "events after the disconnect": (
        S.DISCONNECTED,
        [E.DISCONNECTED, E.REJECTED, E.UNREACHABLE],
        S.DISCONNECTED,
    ),
    "no queue pair": (S.ROUTE_RESOLVED, [C.CONNECT, E.CONNECT_RESPONSE, C.ESTABLISH], S.CONNECTED),
    "the peer disconnects": (S.CONNECTED, [E.DISCONNECTED, C.DISCONNECT], S.DISCONNECTED),
    "address found at the second attempt": (
        S.ADDR_BOUND,
        [C.RESOLVE_ADDR, E.ADDR_ERROR, C.RESOLVE_ADDR, E.ADDR_RESOLVED],
        S.ADDR_RESOLVED,
    ),
    "route found at the second attempt": (
        S.ADDR_RESOLVED,
        [C.RESOLVE_ROUTE, E.ROUTE_ERROR, C.RESOLVE_ROUTE, E.ROUTE_RESOLVED],
        S.ROUTE_RESOLVED,
    ),
    "the peer rejects": (S.ROUTE_RESOLVED, [C.CONNECT, E.REJECTED], S.FAILED),
    "no answer": (S.ROUTE_RESOLVED, [C.CONNECT, E.UNREACHABLE], S.FAILED),
    "an error while connecting": (S.ROUTE_RESOLVED, [C.CONNECT, E.CONNECT_ERROR], S.FAILED),
    "an error while connected": (S.CONNECTED, [E.CONNECT_ERROR], S.FAILED),
    "the peer disconnects twice": (S.CONNECTED, [E.DISCONNECTED, E.DISCONNECTED], S.DISCONNECTED),
    "disconnected before established": (S.REQUESTED, [C.ACCEPT, E.DISCONNECTED], S.DISCONNECTED),
    "the peer was destroyed halfway": (S.CONNECTED, [E.REJECTED], S.DISCONNECTED),
    "a neighbour changed": (S.CONNECTED, [E.UNREACHABLE], S.CONNECTED),
    "established twice": (S.REQUESTED, [C.ACCEPT, E.ESTABLISHED, E.ESTABLISHED], S.CONNECTED),
    "established while disconnecting": (
        S.CONNECTED,
        [C.DISCONNECT, E.ESTABLISHED, E.DISCONNECTED],
        S.DISCONNECTED,
    ),
}


# The events that end an attempt to connect without a connection.
FAILURES = [E.REJECTED, E.UNREACHABLE, E.CONNECT_ERROR]
# The events that do not concern the connection of their id.
ELSEWHERE = [
    E.ADDR_CHANGE,
    E.TIMEWAIT_EXIT,
    E.USER,
    E.MULTICAST_JOIN,
    E.MULTICAST_ERROR,
    E.ADDRINFO_RESOLVED,
    E.ADDRINFO_ERROR,
]


@pytest.mark.parametrize("name", PATHS)
def test_a_documented_path_ends_in_its_state(name: str) -> None:
    state, steps, end = PATHS[name]
    for step in steps:
        after = after_call(state, step) if isinstance(step, CmCall) else after_event(state, step)
        assert after is not None, f"{step.name} is not allowed in {state.name}"
        state = after
    assert state is end


@pytest.mark.parametrize("state", CmState, ids=lambda state: state.name)
def test_each_event_leads_to_the_state_of_the_table(state: CmState) -> None:
    for event in (*CmEventType, CmEventType(99), CmEventType(2**31 - 1)):
        if state is S.CLOSED or event in HINTS or event not in set(CmEventType):
            expected = state
        elif event is E.DEVICE_REMOVAL:
            expected = S.REMOVED
        else:
            expected = EVENTS.get(state, {}).get(event, state if state in FINAL else S.FAILED)
        assert after_event(state, event) is expected
    assert not EVENTS.get(state, {}).keys() & {*HINTS, E.DEVICE_REMOVAL}  # they have no effect


@pytest.mark.parametrize("state", [S.CONNECTING, S.RESPONDED, S.ACCEPTING])
def test_an_attempt_to_connect_fails_for_good(state: CmState) -> None:
    assert {after_event(state, event) for event in FAILURES} == {S.FAILED}


def test_an_event_that_concerns_something_else_changes_no_state() -> None:
    for state, event in itertools.product(CmState, ELSEWHERE):
        assert after_event(state, event) is state


@pytest.mark.parametrize(
    ("state", "event", "expected"),
    [
        (S.ADDR_QUERY, E.ADDR_ERROR, True),
        (S.ROUTE_QUERY, E.ROUTE_ERROR, True),
        (S.ROUTE_QUERY, E.ROUTE_RESOLVED, False),
        (S.CONNECTING, E.REJECTED, True),
        (S.CONNECTING, E.DISCONNECTED, True),
        (S.CONNECTING, E.ESTABLISHED, False),
        (S.CONNECTED, E.UNREACHABLE, False),
        (S.CONNECTED, E.DEVICE_REMOVAL, True),
        (S.DISCONNECTED, E.TIMEWAIT_EXIT, False),
        (S.FAILED, E.DISCONNECTED, False),
    ],
)
def test_the_reason_of_a_failure_is_the_event_that_caused_it(
    state: CmState, event: CmEventType, expected: bool
) -> None:
    assert is_failure(state, event) is expected
    assert TRANSITIONS[state][event] == (after_event(state, event), expected)


@pytest.mark.parametrize("state", [S.REFUSED, S.FAILED, S.REMOVED, S.CLOSED])
def test_only_a_removal_changes_a_final_state(state: CmState) -> None:
    assert state in FINAL
    assert {after_event(state, event) for event in set(E) - {E.DEVICE_REMOVAL}} == {state}


def test_an_operation_under_way_can_succeed_and_fail_and_allows_no_call() -> None:
    for state in WAITING:
        outcomes = {after_event(state, event) for event in CmEventType}
        assert outcomes > {S.FAILED, S.REMOVED, state}
    assert not any(CALLS[state] for state in WAITING | FINAL)
    assert not EVENTS.keys() & FINAL


def test_every_call_is_allowed_and_every_state_can_be_reached_and_left() -> None:
    """Only abort() and aclose() lead to CLOSED. They are not in the table."""
    assert {call for row in CALLS.values() for call in row} == set(CmCall)
    following = {
        state: {after_event(state, event) for event in CmEventType}
        | {after for call in CmCall if (after := after_call(state, call)) is not None}
        for state in CmState
    }
    reached = {S.IDLE, S.REQUESTED}
    for _ in CmState:
        reached |= set(itertools.chain.from_iterable(following[state] for state in reached))
    assert reached == set(CmState) - {S.CLOSED}
    left = {state for state, after in following.items() if after - {state, S.REMOVED}}
    assert left == set(CmState) - FINAL
