"""Connected pairs on the two simulated devices: both connections, and their queue pairs."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

import helpers
import loops

from aiordma import Connection, ConnectionOptions, Listener
from aiordma.enums import SendFlags
from aiordma.messages.message_data_path import MessageDataPath
from aiordma.qp import SendQueue
from simulator.queues import Posted, record
from simulator.simulation import Simulation
from simulator.verbs import QueuePair

DEFAULT = ConnectionOptions()
PORT = 7471


class CtrlC(BaseException):
    """Like KeyboardInterrupt, it can come after any call."""


class End:
    """One end of a pair. Its device executes all requests at once, or as many as a test allows."""

    def __init__(self, simulation: Simulation, connection: Connection) -> None:
        self._simulation = simulation
        self.connection = connection
        qp = connection._endpoint.cm.handle.qp
        assert qp is not None
        (self.qp,) = (
            other for other in simulation.world.all(QueuePair) if other.number == qp.number
        )
        """The queue pair of the simulated device."""
        self.forget_posts()

    @property
    def data_path(self) -> MessageDataPath:
        """The data path of the connection."""
        return self.connection._endpoint.data_path

    @property
    def sends(self) -> SendQueue:
        """The send queue of the connection."""
        return self.data_path.sends

    @property
    def free(self) -> tuple[int, int]:
        """The free send credits, and the free RD/atomic credits."""
        return self.sends.credits, self.sends.core.rd_atomic_credits

    # --- the device ---

    def hold(self) -> None:
        """Let the device execute no further request."""
        self.qp.allowed = 0

    def execute(self, count: int | None = None) -> None:
        """Let the device execute `count` more requests, or all of them if it is None.

        They complete while the program does nothing. So the program finds all completions at once.
        """
        self.qp.allowed = count
        self._simulation.world.settle(0.001)

    async def complete(self, count: int | None = None) -> None:
        """Call execute(), and let the program handle the completions."""
        self.execute(count)
        await loops.sleep(0.001)

    def refuse(self, code: int, *, accepted: int = 0) -> None:
        """Refuse all sends with the errno `code` after `accepted` sends. 0: accept all again."""
        sends = self.qp.pointer.sends
        sends.refusal, sends.accepted = code, accepted

    def refuse_receives(self, code: int) -> None:
        """Refuse all receives with the errno `code`. 0: accept them again."""
        self.qp.pointer.receive_queue.refusal = code

    @property
    def posts(self) -> list[Posted]:
        """The requests that were posted to the send queue, oldest first.

        The queue stores only as many as it has entries.
        """
        sends = self.qp.pointer.sends
        oldest = max(self._begin, sends.posted - sends.capacity)
        return [
            record("s", sends.ring[index % sends.capacity]) for index in range(oldest, sends.posted)
        ]

    def forget_posts(self) -> None:
        """Leave the requests that were posted until now out of `posts`."""
        self._begin = int(self.qp.pointer.sends.posted)

    @property
    def flags(self) -> list[SendFlags]:
        """The send flags of `posts`, without INLINE."""
        return [SendFlags(post.flags) & ~SendFlags.INLINE for post in self.posts]

    @property
    def calls(self) -> int:
        """The number of calls of ibv_post_send()."""
        return int(self.qp.pointer.sends.calls)

    @property
    def receives_posted(self) -> int:
        """The receives in the device's queue that contain no message."""
        queue = self.qp.pointer.receive_queue
        return int(queue.posted - queue.taken)

    # --- memory ---

    @property
    def pool_is_whole(self) -> bool:
        """True if every registered buffer for copies is free."""
        return not self.taken_buffers

    @property
    def taken_buffers(self) -> int:
        """The bytes of the registered buffers for copies that are not free."""
        pool = self.data_path._resources.loop_device.pool
        return sum(len(slab.view) for slab in pool._slabs) - pool.free.nbytes

    @property
    def unsignaled_copies(self) -> int:
        """The bytes of the buffers in flight, which are all of unsignaled requests."""
        core = self.sends.core
        buffers = core.in_flight()
        assert len(buffers) <= core.unsignaled, "a signaled request is in flight"
        return sum(len(buffer.view) for buffer in buffers)


@dataclass(frozen=True)
class Pair:
    """Two connected ends. `near` has connected, `far` has accepted."""

    near: End
    far: End
    listener: Listener


@contextlib.asynccontextmanager
async def connected(
    simulation: Simulation,
    near: ConnectionOptions = DEFAULT,
    far: ConnectionOptions = DEFAULT,
) -> AsyncIterator[Pair]:
    """Connect a pair. Both sides have their connection established in the block."""
    async with helpers.connected(simulation.far, near, far, PORT) as pair:
        if simulation.near.is_iwarp:  # the accepting side waits for a message
            await pair.client.send(b"first")
            assert await pair.server.recv() == b"first"
        yield Pair(End(simulation, pair.client), End(simulation, pair.server), pair.listener)
