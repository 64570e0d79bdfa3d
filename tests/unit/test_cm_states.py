"""The table of an id's life: where each call and each event takes it."""

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
Step = CmCall | CmEventType

EVERYTHING = list(itertools.product(CmState, CmEventType))
# Only abort() and aclose() lead there, from anywhere: they are no steps of the table.
OUTSIDE = {S.CLOSED}


def walk(start: CmState, *steps: Step) -> CmState:
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


HAPPY_PATHS = {
    "active": (
        S.IDLE,
        [C.RESOLVE_ADDR, E.ADDR_RESOLVED, C.RESOLVE_ROUTE, E.ROUTE_RESOLVED],
        S.ROUTE_RESOLVED,
    ),
    "connected": (S.ROUTE_RESOLVED, [C.CONNECT, E.ESTABLISHED], S.CONNECTED),
    "bound first": (S.IDLE, [C.BIND_ADDR, C.RESOLVE_ADDR, E.ADDR_RESOLVED], S.ADDR_RESOLVED),
    "queue pair by hand": (
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
    "this side ends it": (S.CONNECTED, [C.DISCONNECT, E.DISCONNECTED], S.DISCONNECTED),
    "the peer ends it": (S.CONNECTED, [E.DISCONNECTED, C.DISCONNECT], S.DISCONNECTED),
    "afterwards": (S.DISCONNECTED, [E.TIMEWAIT_EXIT, E.DISCONNECTED], S.DISCONNECTED),
    "address not found": (S.IDLE, [C.RESOLVE_ADDR, E.ADDR_ERROR], S.ADDR_BOUND),
    "address found at last": (
        S.ADDR_BOUND,
        [C.RESOLVE_ADDR, E.ADDR_ERROR, C.RESOLVE_ADDR, E.ADDR_RESOLVED],
        S.ADDR_RESOLVED,
    ),
    "route found at last": (
        S.ADDR_RESOLVED,
        [C.RESOLVE_ROUTE, E.ROUTE_ERROR, C.RESOLVE_ROUTE, E.ROUTE_RESOLVED],
        S.ROUTE_RESOLVED,
    ),
    "the peer refuses": (S.ROUTE_RESOLVED, [C.CONNECT, E.REJECTED], S.FAILED),
    "nobody answers": (S.ROUTE_RESOLVED, [C.CONNECT, E.UNREACHABLE], S.FAILED),
    "disconnected before established": (S.REQUESTED, [C.ACCEPT, E.DISCONNECTED], S.DISCONNECTED),
    "the peer was destroyed halfway": (S.CONNECTED, [E.REJECTED], S.DISCONNECTED),
    "a neighbour changed": (S.CONNECTED, [E.UNREACHABLE], S.CONNECTED),
    "established twice": (S.REQUESTED, [C.ACCEPT, E.ESTABLISHED, E.ESTABLISHED], S.CONNECTED),
    "established while leaving": (
        S.CONNECTED,
        [C.DISCONNECT, E.ESTABLISHED, E.DISCONNECTED],
        S.DISCONNECTED,
    ),
}


@pytest.mark.parametrize("name", HAPPY_PATHS)
def test_the_paths_that_the_module_describes(name: str) -> None:
    start, steps, end = HAPPY_PATHS[name]
    assert walk(start, *steps) is end


def test_every_event_has_an_outcome_in_every_state() -> None:
    outcomes = [after_event(state, event) for state, event in EVERYTHING]
    assert len(outcomes) == len(CmState) * len(CmEventType)
    assert set(outcomes) <= set(CmState)


def test_what_the_table_does_not_have_fails_the_id() -> None:
    surprises = [
        (state, event)
        for state, event in EVERYTHING
        if not in_table(state, event)
        and state not in FINAL
        and event not in HINTS
        and event is not E.DEVICE_REMOVAL
    ]
    assert len(surprises) > 100
    assert {after_event(state, event) for state, event in surprises} == {S.FAILED}


@pytest.mark.parametrize(
    ("state", "event"), [(state, event) for state, row in EVENTS.items() for event in row]
)
def test_what_the_table_has_is_done(state: CmState, event: CmEventType) -> None:
    assert after_event(state, event) is EVENTS[state][event]


@pytest.mark.parametrize("state", [state for state in CmState if state is not S.CLOSED])
def test_a_device_that_goes_away_takes_every_id_with_it(state: CmState) -> None:
    assert after_event(state, E.DEVICE_REMOVAL) is S.REMOVED


def test_a_closed_id_hears_nothing() -> None:
    assert {after_event(S.CLOSED, event) for event in CmEventType} == {S.CLOSED}


@pytest.mark.parametrize("state", FINAL)
def test_what_is_final_stays_but_for_the_device(state: CmState) -> None:
    others = [event for event in CmEventType if event is not E.DEVICE_REMOVAL]
    assert {after_event(state, event) for event in others} == {state}


@pytest.mark.parametrize("state", FINAL)
def test_nothing_can_be_asked_of_a_final_id(state: CmState) -> None:
    assert {after_call(state, call) for call in CmCall} == {None}


@pytest.mark.parametrize("event", HINTS)
def test_hints_change_nothing(event: CmEventType) -> None:
    assert [state for state in CmState if after_event(state, event) is not state] == []


@pytest.mark.parametrize("number", [20, 99, 2**31 - 1])
def test_events_of_the_future_change_nothing(number: int) -> None:
    event = CmEventType(number)
    assert [state for state in CmState if after_event(state, event) is not state] == []


@pytest.mark.parametrize("state", WAITING)
def test_what_is_under_way_can_end_well_and_badly(state: CmState) -> None:
    outcomes = {after_event(state, event) for event in CmEventType}
    assert outcomes - {S.FAILED, S.REMOVED, state}
    assert S.FAILED in outcomes
    assert S.REMOVED in outcomes


@pytest.mark.parametrize("state", WAITING)
def test_while_something_is_under_way_nothing_else_can_be_asked(state: CmState) -> None:
    assert {call for call in CmCall if after_call(state, call) is not None} == set()


def test_every_call_is_possible_somewhere() -> None:
    assert {call for row in CALLS.values() for call in row} == set(CmCall)


def test_a_call_is_allowed_exactly_where_the_table_says() -> None:
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
    assert set(CmState) - reached == OUTSIDE


def test_every_state_can_be_left_but_the_final_ones() -> None:
    left = {
        state
        for state in CmState
        if {after_event(state, event) for event in CmEventType} - {state, S.REMOVED}
        or any(after_call(state, call) not in (None, state) for call in CmCall)
    }
    assert left == set(CmState) - FINAL


def test_no_entry_of_the_table_is_out_of_reach() -> None:
    dead = [
        (state.name, event.name)
        for state, row in EVENTS.items()
        for event in row
        if state in FINAL or event in HINTS or event is E.DEVICE_REMOVAL
    ]
    assert dead == []
