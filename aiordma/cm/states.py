"""The life of an id: its states, and the one table that says how calls and events move it.

Active side:

    IDLE -> ADDR_QUERY -> ADDR_RESOLVED -> ROUTE_QUERY -> ROUTE_RESOLVED -> CONNECTING -> CONNECTED

A failed query falls back to where it can be tried again (ADDR_BOUND, ADDR_RESOLVED); a failed
connect cannot be repeated on the same id (FAILED). Without a queue pair of its own an id stops in
RESPONDED, where the queue pair is moved by hand, until establish().

Passive side: a listener goes IDLE -> ADDR_BOUND -> LISTENING and stays there; each CONNECT_REQUEST
brings a new id, in state REQUESTED:

    REQUESTED -> ACCEPTING -> CONNECTED,   or   REQUESTED -> REFUSED

Both: CONNECTED -> DISCONNECTING -> DISCONNECTED when this side ends it, or at once to DISCONNECTED
when the peer does. For datagrams the same words mean less: CONNECTED says that the peer's numbers
are known, accept() leads there without an event, and nothing is ever disconnected. A device that
goes away takes any state to REMOVED. CLOSED is the end, by
aclose() or abort(); an id there hears nothing any more.

Any event can come in any state. What happens to be harmless is in EVENTS as a step that stays in
place; what is not in the table is a surprise, and takes the id to FAILED.

What rdma_cm does that one would not expect, and the table therefore allows:

* DISCONNECTED can come before ESTABLISHED on the passive side, and instead of it.
* REJECTED can come on an id that is CONNECTED (the peer was destroyed halfway): a disconnect.
* UNREACHABLE can come on an id that is CONNECTED, on RoCE, when the peer's neighbour entry
  changes. It is a hint: a path that is really dead shows in the queue pair's retries.
* ESTABLISHED can come twice, after rdma_notify().
"""

from __future__ import annotations

from enum import Enum, auto

from aiordma.enums import CmEventType


class CmState(Enum):
    """Where an id stands."""

    __hash__ = object.__hash__  # Enum's own is a Python function

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
    """What this side can ask of an id."""

    __hash__ = object.__hash__  # Enum's own is a Python function

    BIND_ADDR = auto()
    RESOLVE_ADDR = auto()
    RESOLVE_ROUTE = auto()
    CONNECT = auto()
    ESTABLISH = auto()
    LISTEN = auto()
    ACCEPT = auto()
    REJECT = auto()
    DISCONNECT = auto()


_S, _C, _E = CmState, CmCall, CmEventType

CALLS: dict[CmState, dict[CmCall, CmState]] = {
    _S.IDLE: {
        _C.BIND_ADDR: _S.ADDR_BOUND,
        _C.RESOLVE_ADDR: _S.ADDR_QUERY,
        _C.LISTEN: _S.LISTENING,
    },
    _S.ADDR_BOUND: {_C.RESOLVE_ADDR: _S.ADDR_QUERY, _C.LISTEN: _S.LISTENING},
    _S.ADDR_RESOLVED: {_C.RESOLVE_ROUTE: _S.ROUTE_QUERY},
    _S.ROUTE_RESOLVED: {_C.CONNECT: _S.CONNECTING},
    _S.RESPONDED: {_C.ESTABLISH: _S.CONNECTED},
    _S.REQUESTED: {_C.ACCEPT: _S.ACCEPTING, _C.REJECT: _S.REFUSED},
    _S.CONNECTED: {_C.DISCONNECT: _S.DISCONNECTING},
    _S.DISCONNECTED: {_C.DISCONNECT: _S.DISCONNECTED},
}

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

# What tells nothing about the connection itself.
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
# An id here has something under way that an event will end.
WAITING = frozenset({_S.ADDR_QUERY, _S.ROUTE_QUERY, _S.CONNECTING, _S.ACCEPTING})
# An id here has nothing left to lose: it only waits to be closed.
FINAL = frozenset({_S.REFUSED, _S.FAILED, _S.REMOVED, _S.CLOSED})


def after_call(state: CmState, call: CmCall) -> CmState | None:
    """Where `call` takes an id that stands in `state`; None when it is not allowed there."""
    return CALLS.get(state, {}).get(call)


def after_event(state: CmState, event: CmEventType) -> CmState:
    """Where `event` takes an id that stands in `state`."""
    if event is _E.DEVICE_REMOVAL and state is not _S.CLOSED:
        return _S.REMOVED
    if state in FINAL or event in HINTS or event not in _KNOWN:
        return state
    return EVENTS.get(state, {}).get(event, _S.FAILED)


_KNOWN = frozenset(_E)
