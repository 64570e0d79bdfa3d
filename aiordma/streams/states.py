"""The life of a stream: its states, and the one table that says how words move it.

A stream is two directions that end one by one or together. Who has nothing to say any more, but
still listens, says SHUTDOWN; who does neither says DISCONNECT. A connection that ends without such
words (LOST) is an error to whom data was still to come, or who had data to send.

    OPEN --- each side sends
      RECEIVING --- this side has finished, the peer still sends
      SENDING   --- the peer has finished, this side still sends
        ENDED   --- both have, or one has left

What the table does not list changes nothing: after the last word nobody needs to hear another.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple

from aiordma.streams.wire import Control


class StreamState(Enum):
    """Where a stream stands."""

    OPEN = auto()
    RECEIVING = auto()
    SENDING = auto()
    ENDED = auto()
    BROKEN = auto()

    @property
    def may_send(self) -> bool:
        """Whether this side may send data."""
        return self in _MAY_SEND

    @property
    def may_receive(self) -> bool:
        """Whether data may come."""
        return self in _MAY_RECEIVE


class StreamEvent(Enum):
    """What moves it."""

    FINISH = auto()
    """This side has sent its last byte."""
    LEAVE = auto()
    """This side closes the stream."""
    PEER_FINISHED = auto()
    """The peer said SHUTDOWN."""
    PEER_LEFT = auto()
    """The peer said DISCONNECT."""
    LOST = auto()
    """The connection ended, whatever was said before."""


class Move(NamedTuple):
    """Where an event leads, and what this side says about it."""

    state: StreamState
    control: Control | None = None


_S, _E = StreamState, StreamEvent

_MAY_SEND = frozenset({_S.OPEN, _S.SENDING})
_MAY_RECEIVE = frozenset({_S.OPEN, _S.RECEIVING})

MOVES: dict[StreamState, dict[StreamEvent, Move]] = {
    _S.OPEN: {
        _E.FINISH: Move(_S.RECEIVING, Control.SHUTDOWN),
        _E.LEAVE: Move(_S.ENDED, Control.DISCONNECT),
        _E.PEER_FINISHED: Move(_S.SENDING),
        _E.PEER_LEFT: Move(_S.ENDED),
        _E.LOST: Move(_S.BROKEN),
    },
    _S.RECEIVING: {
        _E.LEAVE: Move(_S.ENDED, Control.DISCONNECT),
        _E.PEER_FINISHED: Move(_S.ENDED),
        _E.PEER_LEFT: Move(_S.ENDED),
        _E.LOST: Move(_S.BROKEN),
    },
    _S.SENDING: {
        # The last word of both: rsocket says DISCONNECT for the second SHUTDOWN.
        _E.FINISH: Move(_S.ENDED, Control.DISCONNECT),
        _E.LEAVE: Move(_S.ENDED, Control.DISCONNECT),
        _E.PEER_LEFT: Move(_S.ENDED),
        _E.LOST: Move(_S.BROKEN),
    },
    _S.ENDED: {},
    _S.BROKEN: {},
}


def move(state: StreamState, event: StreamEvent) -> Move:
    """Where `event` takes a stream that stands in `state`."""
    return MOVES[state].get(event, Move(state))
