"""Together: requests of the tasks that one event has woken, posted in one call."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from aiordma.enums import WrOpcode
from aiordma.errors import VerbsError
from aiordma.loop import after_batch, is_forked_child
from aiordma.verbs import QueuePair, RequestChain
from aiordma.verbs.queue_pair import NO_IMMEDIATE, Segment

if TYPE_CHECKING:
    from aiordma._native._fast_path import CompletionDispatcher, SendQueueCore

# As many as go in one call; with more of them the device has enough to do meanwhile.
MAX_LENGTH = 32


class Waiter(Protocol):
    """Who waits for the end of a request."""

    def stop_waiting(self) -> None:
        """Go on: nobody will hear of its end."""


class MemoryRequest:
    """A send, write or read of registered memory, to be posted by calling it."""

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
        """Post it alone."""
        qp.post_list(wr_id, self.opcode, self.segments, self.remote, flags=flags, imm=self.imm)
        self.on_post()


class PostList:
    """Collects requests for one queue pair as long as more tasks are about to run that may post.

    Its SendLane adds its transfers itself, to the same chain.

    Nothing else is to be posted there before flush(): requests end in the order of their numbers.
    Nor does anybody poll meanwhile: what is polled for may be what was not posted yet.
    """

    def __init__(
        self,
        qp: QueuePair,
        core: SendQueueCore,
        clock: CompletionDispatcher,
        refused: Callable[[VerbsError], object],
    ) -> None:
        """`refused` is told of what the device did not take."""
        self._qp = qp
        self._core = core
        self._dispatcher = clock
        self._on_error = refused
        self._chain = RequestChain(0)  # until one is needed
        self._waiters: list[Waiter] = []
        self._is_open = False
        self._error: VerbsError | None = None
        core.should_batch = self.is_open

    def is_open(self) -> bool:
        """Whether requests can be added now: other tasks run before the loop goes on."""
        if self._error is not None or not after_batch(self._close):
            return False
        if not self._is_open:
            self._is_open = True
            self._dispatcher.open_post_lists += 1
            self._core.batching = True  # short messages come in their turn, too
        return True

    def make_room(self) -> None:
        """Before a request has its number: have room for it.

        Raises:
            VerbsError: as flush().
        """
        if self._chain.is_full:
            self.flush()
            if self._chain.is_full:
                self._chain = RequestChain(MAX_LENGTH)
                self._core.set_chain(self._chain, self._chain.address)

    def add(self, request: MemoryRequest, wr_id: int, flags: int, waiter: Waiter) -> None:
        """Have it posted with the others, after make_room(). Only with memory in one piece."""
        self._waiters.append(waiter)
        self._core.has_unposted = True
        self._chain.add(
            wr_id, request.opcode, request.segments[0], request.remote, flags, request.imm
        )
        request.on_post()

    def flush(self) -> None:
        """Post what there is. What the device refuses ends the connection, and all waiting for it.

        Which of the requests it took before is not asked: it may use the memory of all of them as
        long as the queue pair is there.

        Raises:
            VerbsError: it has refused one, now or before: nothing may be posted any more.
        """
        if self._error is not None:
            raise copy.copy(self._error)
        count = self._chain.count
        if count and not is_forked_child():  # a child's are those of its parent
            try:
                self._qp.post_chain(self._chain)
            except VerbsError as error:
                self._fail(error, count)
                raise
        self._waiters = []
        self._core.has_unposted = False

    def _fail(self, error: VerbsError, count: int) -> None:
        self._error = error
        self._on_error(error)
        self._core.stop_waiting(count)
        for waiter in self._waiters:
            waiter.stop_waiting()

    def _close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._dispatcher.open_post_lists -= 1
            self._core.batching = False
            with suppress(VerbsError):  # the waiters have been told
                self.flush()
            self._core.grant_rd_atomic_credits()  # to reads that came meanwhile
