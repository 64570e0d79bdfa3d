"""The table of an id's states: the state that each call and each event leads to."""

from __future__ import annotations

import itertools

import pytest

from aiordma.cm.states import (
    CALLS,
    EVENTS,
    FINAL,
    HINTS,
    WAITING,
    CmCall,
    CmState,
    after_call,
    after_event,
)
from aiordma.enums import CmEventType

C, E, S = CmCall, CmEventType, CmState
Transition = CmCall | CmEventType

STATES_AND_EVENTS = list(itertools.product(CmState, CmEventType))
# Only abort() and aclose() lead to these states. They are not in the table.
NOT_IN_TABLE = {S.CLOSED}


def walk(start: CmState, *steps: Transition) -> CmState:
    state = start
    for step in steps:
        if isinstance(step, CmCall):
            following = after_call(state, step)
            assert following is not None, f"{step.name} is not allowed in {state.name}"
            state = following
        else:
            state = after_event(state, step)
    return state


def in_table(state: CmState, event: CmEventType) -> bool:
    return event in EVENTS.get(state, {})


PATHS: dict[str, tuple[CmState, list[Transition], CmState]] = {
    "active": (
        S.IDLE,
        [C.RESOLVE_ADDR, E.ADDR_RESOLVED, C.RESOLVE_ROUTE, E.ROUTE_RESOLVED],
        S.ROUTE_RESOLVED,
    ),
    "connected": (S.ROUTE_RESOLVED, [C.CONNECT, E.ESTABLISHED], S.CONNECTED),
    "bound first": (S.IDLE, [C.BIND_ADDR, C.RESOLVE_ADDR, E.ADDR_RESOLVED], S.ADDR_RESOLVED),
    "no queue pair": (
        S.ROUTE_RESOLVED,
        [C.CONNECT, E.CONNECT_RESPONSE, C.ESTABLISH],
        S.CONNECTED,
    ),
    "listener": (
        S.IDLE,
        [C.BIND_ADDR, C.LISTEN, E.CONNECT_REQUEST, E.CONNECT_REQUEST],
        S.LISTENING,
    ),
    "listener, not bound": (S.IDLE, [C.LISTEN], S.LISTENING),
    "accepted": (S.REQUESTED, [C.ACCEPT, E.ESTABLISHED], S.CONNECTED),
    "refused": (S.REQUESTED, [C.REJECT], S.REFUSED),
    "this side disconnects": (S.CONNECTED, [C.DISCONNECT, E.DISCONNECTED], S.DISCONNECTED),
    "the peer disconnects": (S.CONNECTED, [E.DISCONNECTED, C.DISCONNECT], S.DISCONNECTED),
    "after the disconnect": (S.DISCONNECTED, [E.TIMEWAIT_EXIT, E.DISCONNECTED], S.DISCONNECTED),
    "address not found": (S.IDLE, [C.RESOLVE_ADDR, E.ADDR_ERROR], S.ADDR_BOUND),
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


@pytest.mark.parametrize("name", PATHS)
def test_a_documented_path_ends_in_its_state(name: str) -> None:
    start, steps, end = PATHS[name]
    assert walk(start, *steps) is end


def test_every_event_has_an_outcome_in_every_state() -> None:
    outcomes = [after_event(state, event) for state, event in STATES_AND_EVENTS]
    assert len(outcomes) == len(CmState) * len(CmEventType)
    assert set(outcomes) <= set(CmState)


def test_an_event_that_is_not_in_the_table_leads_to_failed() -> None:
    unexpected = [
        (state, event)
        for state, event in STATES_AND_EVENTS
        if not in_table(state, event)
        and state not in FINAL
        and event not in HINTS
        and event is not E.DEVICE_REMOVAL
    ]
    assert len(unexpected) > 100
    assert {after_event(state, event) for state, event in unexpected} == {S.FAILED}


@pytest.mark.parametrize(
    ("state", "event"), [(state, event) for state, row in EVENTS.items() for event in row]
)
def test_an_event_in_the_table_leads_to_its_state(state: CmState, event: CmEventType) -> None:
    assert after_event(state, event) is EVENTS[state][event]


@pytest.mark.parametrize("state", [state for state in CmState if state is not S.CLOSED])
def test_a_device_removal_leads_to_removed(state: CmState) -> None:
    assert after_event(state, E.DEVICE_REMOVAL) is S.REMOVED


def test_a_closed_id_ignores_events() -> None:
    assert {after_event(S.CLOSED, event) for event in CmEventType} == {S.CLOSED}


@pytest.mark.parametrize("state", sorted(FINAL, key=str))
def test_a_final_state_is_only_changed_by_a_device_removal(state: CmState) -> None:
    others = [event for event in CmEventType if event is not E.DEVICE_REMOVAL]
    assert {after_event(state, event) for event in others} == {state}


@pytest.mark.parametrize("state", sorted(FINAL, key=str))
def test_no_call_is_allowed_in_a_final_state(state: CmState) -> None:
    assert {after_call(state, call) for call in CmCall} == {None}


@pytest.mark.parametrize("event", sorted(HINTS, key=str))
def test_hints_change_nothing(event: CmEventType) -> None:
    assert [state for state in CmState if after_event(state, event) is not state] == []


@pytest.mark.parametrize("number", [20, 99, 2**31 - 1])
def test_unknown_events_change_nothing(number: int) -> None:
    event = CmEventType(number)
    assert [state for state in CmState if after_event(state, event) is not state] == []


@pytest.mark.parametrize("state", sorted(WAITING, key=str))
def test_an_operation_under_way_can_succeed_and_fail(state: CmState) -> None:
    outcomes = {after_event(state, event) for event in CmEventType}
    assert outcomes - {S.FAILED, S.REMOVED, state}
    assert S.FAILED in outcomes
    assert S.REMOVED in outcomes


@pytest.mark.parametrize("state", sorted(WAITING, key=str))
def test_no_call_is_allowed_while_an_operation_is_under_way(state: CmState) -> None:
    assert {call for call in CmCall if after_call(state, call) is not None} == set()


def test_every_call_is_allowed_in_some_state() -> None:
    assert {call for row in CALLS.values() for call in row} == set(CmCall)


def test_a_call_is_allowed_exactly_where_it_is_in_the_table() -> None:
    allowed = {
        (state, call)
        for state, call in itertools.product(CmState, CmCall)
        if after_call(state, call) is not None
    }
    assert allowed == {(state, call) for state, row in CALLS.items() for call in row}


def test_every_state_can_be_reached() -> None:
    reached = {S.IDLE, S.REQUESTED}
    frontier = set(reached)
    while frontier:
        following = {after_event(state, event) for state in frontier for event in CmEventType}
        calls = itertools.product(frontier, CmCall)
        following |= {state for pair in calls if (state := after_call(*pair)) is not None}
        frontier = following - reached
        reached |= frontier
    assert set(CmState) - reached == NOT_IN_TABLE


def test_every_state_except_the_final_ones_can_be_left() -> None:
    left = {
        state
        for state in CmState
        if {after_event(state, event) for event in CmEventType} - {state, S.REMOVED}
        or any(after_call(state, call) not in (None, state) for call in CmCall)
    }
    assert left == set(CmState) - FINAL


def test_every_entry_of_the_table_is_reachable() -> None:
    unreachable = [
        (state.name, event.name)
        for state, row in EVENTS.items()
        for event in row
        if state in FINAL or event in HINTS or event is E.DEVICE_REMOVAL
    ]
    assert unreachable == []
