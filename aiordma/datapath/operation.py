"""Operation: a request that a task waits for, and what is lent to the device for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from aiordma.errors import RdmaError

if TYPE_CHECKING:
    from aiordma.loop import Loop
    from aiordma.loop.protocol import LoopFuture


class Operation:
    """From its posting to its end the device has what was lent, whoever still waits for it."""

    __slots__ = ("_future", "_give_back", "error", "succeeded")

    def __init__(self, loop: Loop, give_back: Callable[[], None]) -> None:
        """`give_back` is called when the device is done with what was lent."""
        self._future: LoopFuture = loop.create_future()
        self._give_back = give_back
        self.succeeded = False
        self.error: RdmaError | None = None
        """Why it failed, if the device said so of this very request."""

    def release(self) -> None:
        """It ended, well or not."""
        self._give_back()
        self.stop_waiting()

    def stop_waiting(self) -> None:
        """Let the waiter go: if it has not ended yet, nobody will hear of its end."""
        if not self._future.done():
            self._future.set_result(None)

    async def wait(self) -> None:
        """Wait for the end. Cancelling leaves it to the device."""
        await self._future
