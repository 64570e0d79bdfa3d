"""Together: requests of the tasks that one event has woken, posted in one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from aiordma.enums import WrOpcode
from aiordma.errors import VerbsError
from aiordma.loop import after_all
from aiordma.verbs import QueuePair, RequestChain
from aiordma.verbs.queue_pair import NO_IMMEDIATE, Segment

if TYPE_CHECKING:
    from aiordma._native._lanes import Completions, SendLane

# As many as go in one call; with more of them the device has enough to do meanwhile.
LONGEST = 32


class Waiter(Protocol):
    """Who waits for the end of a request."""

    def stop_waiting(self) -> None:
        """Go on: nobody will hear of its end."""


class ListRequest:
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


class Together:
    """Collects requests for one queue pair as long as more tasks are about to run that may post.

    Nothing else is to be posted there before flush(): requests end in the order of their numbers.
    Nor does anybody poll meanwhile: what is polled for may be what was not posted yet.
    """

    def __init__(
        self,
        qp: QueuePair,
        lane: SendLane,
        clock: Completions,
        refused: Callable[[VerbsError], object],
    ) -> None:
        """`refused` is told of what the device did not take."""
        self._qp = qp
        self._lane = lane
        self._clock = clock
        self._refused = refused
        self._chain: RequestChain | None = None
        self.waiters: list[Waiter] = []
        """Of the requests that are not posted yet."""
        self._is_open = False

    def is_open(self) -> bool:
        """Whether requests can be added now: other tasks run before the loop goes on."""
        if not self._is_open and after_all(self._close):
            self._is_open = True
            self._clock.held += 1
            self._lane.waiting += 1  # short messages come in their turn, too
        return self._is_open

    def add(self, request: ListRequest, wr_id: int, flags: int, waiter: Waiter) -> None:
        """Have it posted with the others. Only while it is_open(), and with memory in one piece."""
        chain = self._chain
        if chain is None:
            chain = self._chain = RequestChain(LONGEST)
        elif len(self.waiters) == LONGEST:
            self.flush()
        chain.add(wr_id, request.opcode, request.segments[0], request.remote, flags, request.imm)
        self.waiters.append(waiter)
        request.on_post()

    def flush(self) -> None:
        """Post what there is. What the device refuses ends the connection, and all waiting for it.

        Which of the requests it took before is not asked: it may use the memory of all of them as
        long as the queue pair is there.
        """
        waiters = self.waiters
        if not waiters:
            return
        assert self._chain is not None
        self.waiters = []
        try:
            self._qp.post_chain(self._chain)
        except VerbsError as error:
            self._refused(error)
            for waiter in waiters:
                waiter.stop_waiting()

    def _close(self) -> None:
        self._is_open = False
        self._clock.held -= 1
        self._lane.waiting -= 1
        self.flush()
