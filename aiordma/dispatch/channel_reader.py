"""ChannelReader: a loop's watch over one event channel."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress

from aiordma.errors import VerbsError
from aiordma.loop import Loop, run_with_inline_wakeups
from aiordma.rdmacm import CmEvent, EventChannel
from aiordma.rdmacm.channel import EVENT_BATCH

logger = logging.getLogger(__name__)


class ChannelReader:
    """Until stop(), the loop reads the channel, and calls `dispatch` with each event.

    When the channel cannot be read any more it stops by itself, and calls `fail`.
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
        loop.add_reader(channel.fd, self._on_readable)

    def stop(self) -> None:
        """Read no more; the fd may then be closed. On a loop's thread, or once it is closed."""
        with suppress(RuntimeError):  # a closed loop watches nothing any more
            self._loop.remove_reader(self._channel.fd)

    def read_all(self) -> None:
        """Dispatch every event that is pending now."""
        while self._read() == EVENT_BATCH:
            pass

    def _on_readable(self) -> None:
        run_with_inline_wakeups(self._read)

    def _read(self) -> int:
        try:
            events = self._channel.get_events()
        except VerbsError as error:
            self.stop()  # the fd may stay readable for ever
            self._fail(error)
            return 0
        for event in events:
            self.dispatch_safely(event)
        return len(events)

    def dispatch_safely(self, event: CmEvent) -> None:
        """Have the event dispatched, and nothing else disturbed if that fails."""
        try:
            self._dispatch(event)
        except Exception:  # the events behind it are other ids' and must arrive
            logger.exception("could not handle %s", event.type.name)
