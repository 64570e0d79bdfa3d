"""Program: a program of the campaign. A seed decides its operations, its faults and its end.

A fault is a call that fails, a queue that refuses requests, an event that comes unexpectedly, a
network that is cut, or a device that is removed.

Not in the campaign, but in other tests: synchronous ids, ids without connect() and listen(), memory
windows, mappings of streams, ibv_reg_dmabuf_mr(3), names of hosts, calls that destroy and fail, and
calls on the loop's thread that are late (those in worker threads are).
"""

from __future__ import annotations

import contextlib
import errno
import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from typing import Any

from simulator import Simulation

# isort: split
import loops

from aiordma import BusyError, MemoryRegion, RdmaError
from simulator.cm import Id
from simulator.verbs import CompletionQueue
from simulator.world import Failure, ffi, lib

PORT = 7471
LONGEST = 2000.0
"""Seconds of virtual time for one program."""
# Calls that can fail on a real machine, with the errno. Calls that destroy an object do not fail.
_FALLIBLE = {
    errno.EIO: "ibv_query_device ibv_query_port ibv_query_gid ibv_modify_qp",
    errno.ENOMEM: "ibv_reg_mr_iova2 ibv_alloc_pd ibv_create_cq ibv_create_srq ibv_attach_mcast "
    "rdma_create_id rdma_create_qp rdma_connect rdma_join_multicast rdma_join_multicast_ex "
    "rdma_get_cm_event",
    errno.EMFILE: "ibv_create_comp_channel rdma_create_event_channel",
    errno.EINVAL: "ibv_init_ah_from_wc rdma_set_option rdma_reject rdma_disconnect",
    errno.ENODEV: "rdma_resolve_addr rdma_resolve_route rdma_get_devices",
    errno.EADDRINUSE: "rdma_bind_addr rdma_listen",
    errno.ETIMEDOUT: "ibv_create_ah",
    errno.ECONNRESET: "rdma_accept",
    errno.EISCONN: "rdma_notify",
    errno.ENXIO: "rdma_migrate_id",
}
FALLIBLE = {name: code for code, names in _FALLIBLE.items() for name in names.split()}
# Events that an id can get in any state, the last one with a number that is not known yet.
STRAY_EVENTS = (
    lib.RDMA_CM_EVENT_ADDR_CHANGE,
    lib.RDMA_CM_EVENT_TIMEWAIT_EXIT,
    lib.RDMA_CM_EVENT_UNREACHABLE,
    lib.RDMA_CM_EVENT_REJECTED,
    lib.RDMA_CM_EVENT_CONNECT_ERROR,
    lib.RDMA_CM_EVENT_DISCONNECTED,
    99,
)
Step = Callable[[], Awaitable[Any]]


class Program(ABC):
    """The program of one seed. A subclass has its operations."""

    has_iwarp = True
    """True if iWARP can do what the program does."""

    def __init__(self, seed: int, chance: random.Random) -> None:
        self.chance = chance
        self.figures: Counter[str] = Counter()
        self.attempts: list[Any] = []
        """The tasks of attempt()."""
        self.regions: list[MemoryRegion] = []
        """Regions that are closed after the connections, as cancelled requests can use them."""
        self.kind = chance.choice(["asyncio", "trio"])
        iwarp = self.has_iwarp and chance.random() < 0.4
        self.simulation = Simulation(seed=seed, iwarp=iwarp)
        if iwarp:
            self.simulation.network.read_delay = chance.choice([0.0, 0.0, 1e-3])
        self.end = chance.choice(["close", "close", "abort", "both", "cancel", "remove"])
        self.failure_rate = chance.choice([0.0, 0.0, 0.0, 0.01, 0.1])
        """The part of the fallible calls that fail, once the faults have begun."""
        self.are_faults_active = False
        self.has_faults = self.failure_rate > 0 or self.end == "remove" or chance.random() < 0.2
        """True if a fault can end an operation that neither side has ended."""
        self.early = self.end == "remove" or chance.random() < 0.5
        """True if the program ends what it uses before all operations are done."""

    def run(self) -> None:
        """Run the program.

        Raises:
            AssertionError: a rule does not hold.
        """
        self.simulation.world.calls.any_hook = self._on_call
        self.simulation.run(lambda: loops.in_nursery(self._run), self.kind)

    async def _run(self) -> None:
        if self.chance.random() < 0.4:
            self.begin_faults()
        with self.typed_errors():
            async with loops.timeout(LONGEST):
                await self.operate()
        await self.ended(self.attempts)

    @abstractmethod
    async def operate(self) -> None:
        """Do the operations of the program."""

    def moment(self) -> float:
        """Return a time in seconds at which a program is usually busy."""
        return self.chance.choice([0.0, 1e-4, 1e-3, 0.01, 0.1]) * self.chance.random()

    # --- faults ---

    def _on_call(self, name: str) -> None:
        if not self.are_faults_active or name not in FALLIBLE:
            return
        if self.chance.random() < self.failure_rate:
            self.figures[f"failed {name}"] += 1
            raise Failure(FALLIBLE[name])

    def begin_faults(self) -> None:
        """Schedule the faults of the program, if it has any. Idempotent."""
        if self.are_faults_active or not self.has_faults:
            return
        self.are_faults_active = True
        world = self.simulation.world
        for fault, probability in (
            (self._refuse_requests, 0.3),
            (self._raise_stray_event, 0.3),
            (partial(setattr, self.simulation.network, "is_cut", True), 0.2),
            (self._fail_queue_pair, 0.1),
            (self._fail_completion_queue, 0.1),
            (partial(setattr, self.simulation.network, "loses_flushes", True), 0.1),
            (self._lose_peer, 0.1),
        ):
            if self.chance.random() < probability:
                world.after(self.moment(), fault)
        if self.end == "remove":
            device = self.chance.choice([self.simulation.near, self.simulation.far])
            world.after(self.moment(), lambda: self.simulation.cm.remove_device(device))

    def _refuse_requests(self, code: int = errno.ENOMEM) -> None:
        """Let each queue pair refuse what is posted to one of its queues, for a short time."""
        for qp in self.simulation.queue_pairs():
            queues = [qp.pointer.sends, qp.pointer.receive_queue]
            for queue in queues if not code else [self.chance.choice(queues)]:
                queue.refusal = code
        if code:
            self.simulation.world.after(1e-4, lambda: self._refuse_requests(0))

    def _raise_stray_event(self) -> None:
        ids = [one for one in self.simulation.world.all(Id) if one.state != "idle"]
        if ids:
            status = self.chance.choice([0, 8, -errno.ETIMEDOUT])
            self.chance.choice(ids).put(self.chance.choice(STRAY_EVENTS), status=status)

    def _fail_queue_pair(self) -> None:
        if pairs := self.simulation.queue_pairs():
            qp = self.chance.choice(pairs)
            qp.device.raise_event(lib.IBV_EVENT_QP_FATAL, ffi.addressof(qp.pointer.qp))
            self.simulation.network.fail_queue_pair(qp)

    def _fail_completion_queue(self) -> None:
        """Let polling or arming a completion queue fail from now on."""
        if queues := self.simulation.world.all(CompletionQueue):
            pointer = self.chance.choice(queues).pointer
            if self.chance.random() < 0.5:
                pointer.poll_failure = -1
            else:
                pointer.arm_failure = errno.EIO

    def _lose_peer(self) -> None:
        """Let the far machine answer no connection request from now on."""
        self.simulation.cm.unreachable.update(self.simulation.far.hosts)

    # --- tasks ---

    async def attempt(self, step: Step, seconds: float | None = None) -> Any:
        """Run a step in a task, and cancel it after `seconds`. Return the task, which has ended."""
        task = loops.create_task(step())
        self.attempts.append(task)
        try:
            if seconds is not None:
                await loops.sleep(seconds)
                task.cancel()
            await loops.wait([task])
        finally:
            task.cancel()
        return task

    def sometimes(self, seconds: float, probability: float = 0.3) -> float | None:
        """Return `seconds` or None, for attempt()."""
        return seconds if self.chance.random() < probability else None

    def cancel_another(self) -> None:
        """Cancel an attempt: it can have been woken by the same event."""
        others = [task for task in self.attempts if not task.done()]
        if others:
            self.chance.choice(others).cancel()

    @contextlib.contextmanager
    def typed_errors(self) -> Iterator[None]:
        """Accept a typed error if the program has faults."""
        try:
            yield
        except RdmaError as error:
            if not self.has_faults:
                raise
            self.figures[type(error).__name__] += 1

    async def ended(self, tasks: list[Any], *, allowed: bool = True) -> None:
        """Wait until tasks have ended: with a result, cancelled, or if `allowed` a typed error."""
        await loops.wait(tasks)
        for task in tasks:
            if task.cancelled():
                self.figures["cancelled"] += 1
                continue
            error = task.exception()
            if error is not None and not (allowed and isinstance(error, RdmaError)):
                raise error
            if isinstance(error, BusyError):
                raise error

    async def finish(self, ends: list[Any], tasks: list[Any]) -> None:
        """End a connection in one of several manners. All its tasks must end with it.

        After a fault it can be that only one side has noticed the end. So both sides end then.
        """
        await loops.sleep(self.moment() if self.early else 10.0)
        self.figures[f"ended by {self.end}"] += 1
        self.chance.shuffle(ends)
        if self.end == "cancel":
            for task in tasks:
                task.cancel()
        elif self.end == "abort":
            ends[0].abort()
        elif self.end == "both":
            await self.ended([loops.create_task(end.aclose()) for end in ends])
        else:
            await ends[0].aclose()
        await loops.sleep(30.0)
        if self.has_faults:
            for end in ends:
                end.abort()
            await loops.sleep(30.0)
        waiting = sum(not task.done() for task in tasks)
        assert not waiting, f"the connection has ended, and {waiting} tasks still wait"

    # --- connecting ---

    @contextlib.asynccontextmanager
    async def pair(
        self, client: Any, server: Any, functions: tuple[Any, Any]
    ) -> AsyncIterator[tuple[Any, Any]]:
        """Connect two ends with options, by functions such as `connect` and `listen`.

        Abort them at the end of the block.
        """
        host = self.simulation.far.host
        connect, listen = functions
        async with listen(host, PORT, options=server) as listener:
            accepting = loops.create_task(listener.accept())
            try:
                near = await connect(host, PORT, options=client)
            except BaseException:
                accepting.cancel()
                await loops.wait([accepting])
                raise
            try:
                far = await accepting
            except BaseException:
                near.abort()
                await near.aclose()
                raise
        self.begin_faults()
        try:
            yield near, far
        finally:
            for end in (near, far):
                end.abort()
                await end.aclose()
            while self.regions:
                self.regions.pop().close()
