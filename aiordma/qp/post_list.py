"""PostList: the requests of the tasks that one event has woken, posted in one call."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from operator import index
from typing import TYPE_CHECKING, Protocol

from aiordma._native import fast_path
from aiordma.enums import WrOpcode
from aiordma.errors import VerbsError
from aiordma.loop import after_batch
from aiordma.verbs import QueuePair
from aiordma.verbs.queue_pair import NO_IMMEDIATE, Segment

if TYPE_CHECKING:
    from aiordma._native._fast_path import CompletionDispatcher, SendQueueCore


class Waiter(Protocol):
    """A request with a waiting task."""

    def stop_waiting(self) -> None:
        """Wake the waiter: the completion of its request will not be reported."""


class MemoryRequest:
    """A send, write or read of registered memory. Calling it posts it."""

    __slots__ = ("imm", "on_post", "opcode", "remote", "segments")

    def __init__(
        self,
        opcode: WrOpcode,
        segments: list[Segment],
        remote: tuple[int, int],
        on_post: Callable[[], None],
        imm: int = NO_IMMEDIATE,
    ) -> None:
        self.opcode = opcode
        self.segments = segments
        self.remote = remote
        self.on_post = on_post
        self.imm = imm

    def __call__(self, qp: QueuePair, wr_id: int, flags: int) -> None:
        """Post the request alone, in one call."""
        qp.post_list(wr_id, self.opcode, self.segments, self.remote, flags=flags, imm=self.imm)
        self.on_post()


class PostList:
    """The requests of one queue pair that are batched, to be posted in one call.

    Requests are batched while other tasks that were woken by the same event still have to run: they
    might post, too. The SendQueueCore collects and posts them, its transfers among them. This class
    decides when, and wakes the waiters of requests that the device refuses.

    Nothing else can be posted to the queue pair before flush(): requests complete in the order of
    their numbers. Tasks do not poll meanwhile: they might poll for the completion of a request that
    is not posted yet.
    """

    def __init__(
        self,
        core: SendQueueCore,
        dispatcher: CompletionDispatcher,
        on_error: Callable[[VerbsError], object],
    ) -> None:
        """`on_error` is called with the error if the device refuses a request."""
        self._core = core
        self._dispatcher = dispatcher
        self._on_error = on_error
        self._waiters: list[Waiter] = []
        self._is_open = False
        self._error: VerbsError | None = None
        core.call_should_batch(self.is_open)

    def is_open(self) -> bool:
        """Return True if requests can be added now: other tasks run before the loop goes on."""
        if self._error is not None or not after_batch(self._close):
            return False
        if not self._is_open:
            self._is_open = True
            self._dispatcher.open_post_lists += 1
            self._core.start_batching()  # small messages must not overtake the batched requests
        return True

    def add(self, request: MemoryRequest, waiter: Waiter) -> None:
        """Add a request on memory in one piece. `waiter` is in flight until it has ended.

        Raises:
            VerbsError: as flush().
        """
        if self._core.unposted == fast_path.MAX_BATCHED:
            self.flush()
        self._waiters.append(waiter)
        remote = index(request.remote[0]), request.remote[1]  # it can be a number of numpy
        self._core.batch(waiter, request.opcode, request.segments[0], remote, request.imm)
        request.on_post()

    def flush(self) -> None:
        """Post all batched requests.

        If the device refuses one, the connection ends and all waiters are woken. It is not
        determined which requests the device accepted before: it might use the memory of all of them
        as long as the queue pair exists.

        Raises:
            VerbsError: the device has refused a request, now or before. Nothing can be posted any
                more.
        """
        if self._error is not None:
            raise copy.copy(self._error)
        error = self._core.flush()
        if error:
            self._error = VerbsError(error, "ibv_post_send")
            self._fail(self._error)
            raise copy.copy(self._error)
        self._waiters = []

    def _fail(self, error: VerbsError) -> None:
        self._on_error(error)
        self._core.stop_waiting(self._core.unposted)
        for waiter in self._waiters:
            waiter.stop_waiting()

    def _close(self) -> None:
        self._is_open = False
        self._dispatcher.open_post_lists -= 1
        self._core.stop_batching()
        with suppress(VerbsError):  # flush() has woken the waiters
            self.flush()
        self._core.grant_rd_atomic_credits()  # to reads that were queued meanwhile
