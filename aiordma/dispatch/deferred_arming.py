"""DeferredArming: completion queues are armed when the event loop is about to wait.

By default a queue is armed again as soon as its event is handled. On trio each message lets the
loop run an iteration, so that a completion that polling has found would raise an event all the
same: three system calls and a task switch for nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, cast

from aiordma.loop import Loop, LoopTimer

if TYPE_CHECKING:
    from aiordma._native._fast_path import CompletionDispatcher


class _WaitingLoop(Protocol):
    """A loop that says when it is about to wait: TrioLoop."""

    def call_before_wait(self, callback: Callable[[float], None], /) -> LoopTimer: ...

    def end_wait(self) -> None: ...


class DeferredArming:
    """The arming of a dispatcher's queues before `loop` waits. Other loops arm them at once."""

    def __init__(self, loop: Loop, dispatcher: CompletionDispatcher) -> None:
        self._loop = cast(_WaitingLoop, loop) if hasattr(loop, "call_before_wait") else None
        self._dispatcher = dispatcher
        self._calls: LoopTimer | None = None

    @property
    def is_on(self) -> bool:
        """True if unarmed queues are armed before the loop waits."""
        return self._calls is not None

    def start(self) -> None:
        """Defer the arming from now on, if the loop says when it waits."""
        if self._loop is not None:
            self._dispatcher.on_wait = self._arm_all
            self._calls = self._loop.call_before_wait(self._dispatcher.before_wait)

    def stop(self) -> None:
        """Arm queues at once again. Call it on the loop's thread, while the loop runs."""
        calls, self._calls = self._calls, None
        self._dispatcher.on_wait = None
        if calls is not None:
            calls.cancel()

    def request(self) -> None:
        """Have the queues armed before the loop waits next."""
        self._dispatcher.has_unarmed = True

    def _arm_all(self) -> None:
        woken = False
        for queue in list(self._dispatcher.queues.values()):
            woken |= self._dispatcher.arm_again(queue)
        if woken and self._loop is not None:
            self._loop.end_wait()
