"""The states of a stream, and the table of its transitions and control messages.

A stream has two directions, which end one by one or together. A side that sends no more data but
still receives sends the control message SHUTDOWN. A side that neither sends nor receives any more
sends DISCONNECT. A connection that ends without these control messages is lost (LOST). That is an
error for a side that still waits for data or has data to send.

    OPEN --- both sides send
      RECEIVING --- this side has finished, the peer still sends
      SENDING   --- the peer has finished, this side still sends
        ENDED   --- both have finished, or one side has left
    BROKEN --- the connection was lost before the stream had ended

An event that the table does not list for a state changes nothing and sends nothing.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple

from aiordma.streams.wire import Control


class StreamState(Enum):
    """The state of a stream."""

    OPEN = auto()
    RECEIVING = auto()
    SENDING = auto()
    ENDED = auto()
    BROKEN = auto()

    @property
    def may_send(self) -> bool:
        """True if this side may send data."""
        return self in _MAY_SEND

    @property
    def may_receive(self) -> bool:
        """True if the peer may send data."""
        return self in _MAY_RECEIVE


class StreamEvent(Enum):
    """An event that can change the state of a stream."""

    FINISH = auto()
    """This side has sent its last byte."""
    LEAVE = auto()
    """This side closes the stream."""
    PEER_FINISHED = auto()
    """The peer sent SHUTDOWN."""
    PEER_LEFT = auto()
    """The peer sent DISCONNECT."""
    LOST = auto()
    """The connection ended, with or without control messages before."""


class Transition(NamedTuple):
    """The state that follows an event, and the control message that this side sends, if any."""

    state: StreamState
    control: Control | None = None


_S, _E = StreamState, StreamEvent

_MAY_SEND = frozenset({_S.OPEN, _S.SENDING})
_MAY_RECEIVE = frozenset({_S.OPEN, _S.RECEIVING})

TRANSITIONS: dict[StreamState, dict[StreamEvent, Transition]] = {
    _S.OPEN: {
        _E.FINISH: Transition(_S.RECEIVING, Control.SHUTDOWN),
        _E.LEAVE: Transition(_S.ENDED, Control.DISCONNECT),
        _E.PEER_FINISHED: Transition(_S.SENDING),
        _E.PEER_LEFT: Transition(_S.ENDED),
        _E.LOST: Transition(_S.BROKEN),
    },
    _S.RECEIVING: {
        _E.LEAVE: Transition(_S.ENDED, Control.DISCONNECT),
        _E.PEER_FINISHED: Transition(_S.ENDED),
        _E.PEER_LEFT: Transition(_S.ENDED),
        _E.LOST: Transition(_S.BROKEN),
    },
    _S.SENDING: {
        # Both sides have finished now: rsocket sends DISCONNECT in place of a second SHUTDOWN.
        _E.FINISH: Transition(_S.ENDED, Control.DISCONNECT),
        _E.LEAVE: Transition(_S.ENDED, Control.DISCONNECT),
        _E.PEER_LEFT: Transition(_S.ENDED),
        _E.LOST: Transition(_S.BROKEN),
    },
    _S.ENDED: {},
    _S.BROKEN: {},
}


def transition(state: StreamState, event: StreamEvent) -> Transition:
    """Return the transition for `event` in `state`."""
    return TRANSITIONS[state].get(event, Transition(state))
