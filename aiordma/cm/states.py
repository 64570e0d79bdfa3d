"""The states of an id, and the table of the transitions that calls and events cause.

Active side:

    IDLE -> ADDR_QUERY -> ADDR_RESOLVED -> ROUTE_QUERY -> ROUTE_RESOLVED -> CONNECTING -> CONNECTED

A failed query returns to a state in which it can be repeated (ADDR_BOUND, ADDR_RESOLVED). A failed
connect cannot be repeated on the same id (FAILED). An id without a queue pair stops in RESPONDED.
The user then moves a queue pair and calls establish().

resolve_and_connect() leads from ADDR_RESOLVED to CONNECTING: C calls rdma_connect() in place of the
event ROUTE_RESOLVED. This event arrives in CONNECTING only if that has failed, or if the task was
cancelled.

Passive side: a listener goes IDLE -> ADDR_BOUND -> LISTENING and stays there. Each CONNECT_REQUEST
contains a new id, in state REQUESTED:

    REQUESTED -> ACCEPTING -> CONNECTED,   or   REQUESTED -> REFUSED

Both sides: CONNECTED -> DISCONNECTING -> DISCONNECTED if this side disconnects, or directly
CONNECTED -> DISCONNECTED if the peer does. For datagrams, CONNECTED only means that the peer's
queue pair number and Q_Key are known: accept() leads there without an event, and there is no
disconnect. DEVICE_REMOVAL leads from any state to REMOVED. aclose() and abort() lead to CLOSED,
where an id ignores all events.

Any event can arrive in any state. Harmless events are in EVENTS as a transition to the same state.
An event that is not in the table is unexpected, and leads to FAILED.

The table allows these events, which are surprising but real:

* DISCONNECTED can arrive before ESTABLISHED on the passive side, or instead of it.
* REJECTED can arrive in CONNECTED (the peer was destroyed halfway). It counts as a disconnect.
* UNREACHABLE can arrive in CONNECTED, on RoCE, when the peer's neighbour entry changes. It is a
  hint only: if the path is really broken, the queue pair exceeds its retries.
* ESTABLISHED can arrive twice, after rdma_notify().
"""

from __future__ import annotations

from enum import Enum, auto

from aiordma.enums import CmEventType


class CmState(Enum):
    """The state of an id."""

    __hash__ = object.__hash__  # faster than Enum.__hash__, a Python function

    IDLE = auto()
    ADDR_BOUND = auto()
    ADDR_QUERY = auto()
    ADDR_RESOLVED = auto()
    ROUTE_QUERY = auto()
    ROUTE_RESOLVED = auto()
    CONNECTING = auto()
    RESPONDED = auto()
    LISTENING = auto()
    REQUESTED = auto()
    ACCEPTING = auto()
    REFUSED = auto()
    CONNECTED = auto()
    DISCONNECTING = auto()
    DISCONNECTED = auto()
    FAILED = auto()
    REMOVED = auto()
    CLOSED = auto()


class CmCall(Enum):
    """A call on an id that changes its state."""

    __hash__ = object.__hash__  # faster than Enum.__hash__, a Python function

    BIND_ADDR = auto()
    RESOLVE_ADDR = auto()
    RESOLVE_ROUTE = auto()
    CONNECT = auto()
    RESOLVE_AND_CONNECT = auto()
    ESTABLISH = auto()
    LISTEN = auto()
    ACCEPT = auto()
    REJECT = auto()
    DISCONNECT = auto()


# Each member by its own name. On Python 3.11, `CmState.IDLE` executes a thousand instructions, as
# min() and max() do. Code that runs for every connection avoids them.
(
    IDLE,
    ADDR_BOUND,
    ADDR_QUERY,
    ADDR_RESOLVED,
    ROUTE_QUERY,
    ROUTE_RESOLVED,
    CONNECTING,
    RESPONDED,
    LISTENING,
    REQUESTED,
    ACCEPTING,
    REFUSED,
    CONNECTED,
    DISCONNECTING,
    DISCONNECTED,
    FAILED,
    REMOVED,
    CLOSED,
) = CmState
(
    BIND_ADDR,
    RESOLVE_ADDR,
    RESOLVE_ROUTE,
    CONNECT,
    RESOLVE_AND_CONNECT,
    ESTABLISH,
    LISTEN,
    ACCEPT,
    REJECT,
    DISCONNECT,
) = CmCall

_S, _C, _E = CmState, CmCall, CmEventType

CALLS: dict[CmState, dict[CmCall, CmState]] = {
    _S.IDLE: {
        _C.BIND_ADDR: _S.ADDR_BOUND,
        _C.RESOLVE_ADDR: _S.ADDR_QUERY,
        _C.LISTEN: _S.LISTENING,
    },
    _S.ADDR_BOUND: {_C.RESOLVE_ADDR: _S.ADDR_QUERY, _C.LISTEN: _S.LISTENING},
    _S.ADDR_RESOLVED: {
        _C.RESOLVE_ROUTE: _S.ROUTE_QUERY,
        _C.RESOLVE_AND_CONNECT: _S.CONNECTING,
    },
    _S.ROUTE_RESOLVED: {_C.CONNECT: _S.CONNECTING},
    _S.RESPONDED: {_C.ESTABLISH: _S.CONNECTED},
    _S.REQUESTED: {_C.ACCEPT: _S.ACCEPTING, _C.REJECT: _S.REFUSED},
    _S.CONNECTED: {_C.DISCONNECT: _S.DISCONNECTING},
    _S.DISCONNECTED: {_C.DISCONNECT: _S.DISCONNECTED},
}

# In the other states no call is allowed.
CALLS |= {state: {} for state in CmState if state not in CALLS}

EVENTS: dict[CmState, dict[CmEventType, CmState]] = {
    _S.ADDR_QUERY: {
        _E.ADDR_RESOLVED: _S.ADDR_RESOLVED,
        _E.ADDR_ERROR: _S.ADDR_BOUND,
    },
    _S.ROUTE_QUERY: {
        _E.ROUTE_RESOLVED: _S.ROUTE_RESOLVED,
        _E.ROUTE_ERROR: _S.ADDR_RESOLVED,
    },
    _S.CONNECTING: {
        _E.ROUTE_RESOLVED: _S.ROUTE_RESOLVED,
        _E.ROUTE_ERROR: _S.ADDR_RESOLVED,
        _E.ESTABLISHED: _S.CONNECTED,
        _E.CONNECT_RESPONSE: _S.RESPONDED,
        _E.REJECTED: _S.FAILED,
        _E.UNREACHABLE: _S.FAILED,
        _E.CONNECT_ERROR: _S.FAILED,
        _E.DISCONNECTED: _S.DISCONNECTED,
    },
    _S.RESPONDED: {
        _E.REJECTED: _S.FAILED,
        _E.UNREACHABLE: _S.FAILED,
        _E.CONNECT_ERROR: _S.FAILED,
        _E.DISCONNECTED: _S.DISCONNECTED,
    },
    _S.LISTENING: {_E.CONNECT_REQUEST: _S.LISTENING},
    _S.ACCEPTING: {
        _E.ESTABLISHED: _S.CONNECTED,
        _E.REJECTED: _S.FAILED,
        _E.UNREACHABLE: _S.FAILED,
        _E.CONNECT_ERROR: _S.FAILED,
        _E.DISCONNECTED: _S.DISCONNECTED,
    },
    _S.CONNECTED: {
        _E.ESTABLISHED: _S.CONNECTED,
        _E.UNREACHABLE: _S.CONNECTED,
        _E.REJECTED: _S.DISCONNECTED,
        _E.DISCONNECTED: _S.DISCONNECTED,
        _E.CONNECT_ERROR: _S.FAILED,
    },
    _S.DISCONNECTING: {
        _E.ESTABLISHED: _S.DISCONNECTING,
        _E.UNREACHABLE: _S.DISCONNECTING,
        _E.REJECTED: _S.DISCONNECTED,
        _E.DISCONNECTED: _S.DISCONNECTED,
        _E.CONNECT_ERROR: _S.DISCONNECTED,
    },
    _S.DISCONNECTED: {
        _E.DISCONNECTED: _S.DISCONNECTED,
        _E.REJECTED: _S.DISCONNECTED,
        _E.UNREACHABLE: _S.DISCONNECTED,
    },
}

# Events that do not concern the connection itself. They change no state.
HINTS = frozenset(
    {
        _E.ADDR_CHANGE,
        _E.TIMEWAIT_EXIT,
        _E.USER,
        _E.MULTICAST_JOIN,
        _E.MULTICAST_ERROR,
        _E.ADDRINFO_RESOLVED,
        _E.ADDRINFO_ERROR,
    }
)
# In these states an operation is under way, which an event will end.
WAITING = frozenset({_S.ADDR_QUERY, _S.ROUTE_QUERY, _S.CONNECTING, _S.ACCEPTING})
# In these states the id can only be closed.
FINAL = frozenset({_S.REFUSED, _S.FAILED, _S.REMOVED, _S.CLOSED})


def after_call(state: CmState, call: CmCall) -> CmState | None:
    """Return the state that `call` leads to from `state`; None if it is not allowed there."""
    return CALLS[state].get(call)


def after_event(state: CmState, event: CmEventType) -> CmState:
    """Return the state that `event` leads to from `state`."""
    if event is _E.DEVICE_REMOVAL and state is not _S.CLOSED:
        return _S.REMOVED
    if state in FINAL or event in HINTS or event not in _KNOWN:
        return state
    return EVENTS.get(state, {}).get(event, _S.FAILED)


def is_failure(state: CmState, event: CmEventType) -> bool:
    """Return True if `event` is the reason why an id in `state`, or its last query, fails."""
    after = after_event(state, event)
    if after in FINAL:
        return state not in FINAL
    if event in _QUERY_FAILURES:
        return True
    return after is _S.DISCONNECTED and event not in HINTS


_KNOWN = frozenset(_E)
_QUERY_FAILURES = frozenset({_E.ADDR_ERROR, _E.ROUTE_ERROR})

# Computed once: every connection has several events.
TRANSITIONS: dict[CmState, dict[CmEventType, tuple[CmState, bool]]] = {
    state: {event: (after_event(state, event), is_failure(state, event)) for event in CmEventType}
    for state in CmState
}
"""after_event() and is_failure() for each state and known event. Others change nothing."""
