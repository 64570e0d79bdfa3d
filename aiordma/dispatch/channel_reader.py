"""ChannelReader: reads one event channel on a loop."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from aiordma.errors import VerbsError
from aiordma.loop import Loop, call_each, run_with_inline_wakeups
from aiordma.rdmacm import CmEvent, EventChannel
from aiordma.rdmacm.channel import EVENT_BATCH

logger = logging.getLogger(__name__)


class ChannelReader:
    """A reader of an event channel: until stop(), the loop calls `dispatch` with each event.

    If reading the channel fails, the reader stops and calls `fail`.
    """

    def __init__(
        self,
        loop: Loop,
        channel: EventChannel,
        dispatch: Callable[[CmEvent], None],
        fail: Callable[[VerbsError], None],
    ) -> None:
        self._loop = loop
        self._channel = channel
        self._dispatch = dispatch
        self._fail = fail
        loop.add_reader(channel.fd, partial(run_with_inline_wakeups, self._read))

    def stop(self) -> None:
        """Stop reading, so that the fd can be closed.

        Call it on the loop's thread, or on any thread once the loop is closed.
        """
        with suppress(RuntimeError):  # a closed loop watches no fd any more
            self._loop.remove_reader(self._channel.fd)

    def read_all(self) -> None:
        """Dispatch all events that are pending now."""
        while self._read() == EVENT_BATCH:
            pass

    def _read(self) -> int:
        try:
            events = self._channel.get_events()
        except VerbsError as error:
            self.stop()  # the fd might stay readable for ever
            self._fail(error)
            return 0
        self.dispatch(events)
        return len(events)

    def dispatch(self, events: Sequence[CmEvent]) -> None:
        """Dispatch events, which are acknowledged already. Each belongs to another id.

        An exception of a handler is only logged.
        """
        if logger.isEnabledFor(logging.DEBUG):
            for event in events:
                logger.debug("%s (status %d) for id %#x", event, event.status, event.id)
        call_each(self._dispatch, events, "could not handle an event")
