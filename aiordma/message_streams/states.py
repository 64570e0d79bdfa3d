"""The states of one direction of a message stream, and the table of its transitions.

Both sides follow the table: the sender for what it sends, the receiver for what it receives. The
two directions are independent, but for DONE and CREDIT, which concern the other direction and may
come in any state.

    READY --- a message may begin
      LISTING --- an announcement has begun, and not all its frames are listed yet
    FINISHED --- no further message comes

A wire message that the table does not list for a state breaks the protocol.
"""

from __future__ import annotations

from enum import IntEnum, auto

from aiordma.errors import ProtocolError
from aiordma.message_streams.wire import Kind


class DirectionState(IntEnum):
    """The state of one direction of a message stream."""

    READY = auto()
    LISTING = auto()
    FINISHED = auto()


class DirectionEvent(IntEnum):
    """A wire message, and whether it completes the list of an announcement's frames."""

    EAGER = auto()
    ANNOUNCE = auto()
    """ANNOUNCE that lists all its frames."""
    ANNOUNCE_PART = auto()
    """ANNOUNCE that lists some of its frames."""
    TABLE = auto()
    """TABLE that lists the last frames."""
    TABLE_PART = auto()
    """TABLE after which frames are missing."""
    FINISH = auto()


_S, _E = DirectionState, DirectionEvent

TRANSITIONS: dict[DirectionState, dict[DirectionEvent, DirectionState]] = {
    _S.READY: {
        _E.EAGER: _S.READY,
        _E.ANNOUNCE: _S.READY,
        _E.ANNOUNCE_PART: _S.LISTING,
        _E.FINISH: _S.FINISHED,
    },
    _S.LISTING: {
        _E.TABLE_PART: _S.LISTING,
        _E.TABLE: _S.READY,
    },
    _S.FINISHED: {},
}

_EVENTS = {
    Kind.EAGER: (_E.EAGER, _E.EAGER),
    Kind.ANNOUNCE: (_E.ANNOUNCE_PART, _E.ANNOUNCE),
    Kind.TABLE: (_E.TABLE_PART, _E.TABLE),
    Kind.FINISH: (_E.FINISH, _E.FINISH),
}


def transition(state: DirectionState, kind: Kind, *, is_complete: bool) -> DirectionState:
    """Return the state that follows a wire message that is neither DONE nor CREDIT.

    `is_complete`: True if all frames of the message are listed after it.

    Raises:
        ProtocolError: the table does not list the wire message for the state.
    """
    event = _EVENTS[kind][is_complete]
    following = TRANSITIONS[state].get(event)
    if following is None:
        raise ProtocolError(f"{event.name} in the state {state.name}")
    return following
