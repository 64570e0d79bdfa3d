"""TransportPolling: polling for received data between the iterations of the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from aiordma.loop import run_with_inline_wakeups

if TYPE_CHECKING:
    from aiordma.streams.stream_core import StreamCore


class TransportPolling:
    """The polling of one transport, while that pays: see aiordma.dispatch.adaptive_polling.

    A transport has no task that could poll. In its place a callback polls in each iteration of the
    event loop, behind the callbacks that are ready in it. It ends with the first poll that finds
    nothing. One transport polls at a time; it takes the completions of all others, too.
    """

    def __init__(
        self,
        core: StreamCore,
        loop: asyncio.AbstractEventLoop,
        is_reading: Callable[[], bool],
        on_change: Callable[[], None],
    ) -> None:
        """Poll only while `is_reading()`. Call `on_change` if there are bytes to read."""
        self._core = core
        self._loop = loop
        self._is_reading = is_reading
        self._on_change = on_change
        self._began = time.monotonic_ns()
        self._is_polling = False
        self._found = False

    def wait(self) -> None:
        """Note that the transport waits for data from now on."""
        self._began = time.monotonic_ns()

    def data_received(self) -> None:
        """Note that a wait has ended. Begin to poll for the next data if that pays."""
        if self._is_polling:
            return
        data_path = self._core.data_path
        data_path.polling.parked(self._began, time.monotonic_ns())
        if data_path.core.poll_budget > 0 and data_path.busy.start():
            self._is_polling = True
            self._loop.call_soon(self._poll)

    def _poll(self) -> None:
        self._found = False
        try:
            run_with_inline_wakeups(self._poll_once)
        finally:
            if self._found:
                self._loop.call_soon(self._poll)
            else:
                self._is_polling = False
                self._core.data_path.busy.stop()

    def _poll_once(self) -> None:
        if self._is_reading() and not self._core.endpoint.closed:
            self._found = self._core.data_path.core.poll_readable()
            if self._found:
                self._on_change()
