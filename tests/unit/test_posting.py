"""Threads that post, poll and wait, while another destroys: they run at the same time.

`make sanitize` runs these tests with ThreadSanitizer, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import loops
import pytest
from attempts import send_now
from simulator import Simulation
from simulator import world as worlds
from simulator.ids import SMALL
from simulator.queues import Queues
from simulator.world import lib

from aiordma import LocalClosed, VerbsError, verbs
from aiordma._native import fast_path
from aiordma.cm import SyncCmId
from aiordma.enums import AccessFlags, PortSpace, WrOpcode
from aiordma.rdmacm import CmId, EventChannel, parse_address

TIME_LIMIT = 30
ROUNDS = 10
DEPTH = 100
MEMORY = (0x1000, 64, 1)
REMOTE = SimpleNamespace(addr=0x1000, rkey=1, length=64)


@pytest.fixture
def devices() -> Iterator[Simulation]:
    """Make two devices whose C functions threads can call. Let the threads take turns often."""
    made, interval = Simulation(), sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    worlds.enter(made.world)
    yield made
    lib.sim_hold_posts(False)
    worlds.enter(None)
    sys.setswitchinterval(interval)
    made.cm.free_default_domains()
    made.check()


class Posting:
    """An id with a queue pair and a shared receive queue, and all that posts to them."""

    def __init__(self, devices: Simulation) -> None:
        self._channel = EventChannel()
        self.cm_id = CmId.create(self._channel, PortSpace.UDP)
        self.cm_id.bind_addr(parse_address(devices.near.host))
        caps = verbs.QueuePairCaps(DEPTH, DEPTH, 1, 1, 64)
        self.qp = self.cm_id.create_qp(verbs.QueuePairInit(caps))
        self.srq = self.cm_id.create_srq(None, verbs.SharedReceiveQueueCaps(DEPTH, 1))
        references = fast_path.ReferenceCount(None, AccessFlags.LOCAL_WRITE)
        self._region = SimpleNamespace(references=references, segment=MEMORY)
        self.core = core = fast_path.SendQueueCore(1 << 30, 4, 64)
        core.allow_transfers(Future)
        core.allow_reads(AccessFlags.LOCAL_WRITE)
        core.release_rd_atomic(1 << 30)
        core.use_memory(None, 1 << 30)
        core.open(self.qp, self.qp.cells[0], 0)
        self.ring, self.shared_ring = self._ring_of(self.qp), self._ring_of(self.srq)

    def _ring_of(self, queue: Any) -> fast_path.ReceiveRingCore:
        ring = fast_path.ReceiveRingCore(1, 64)
        ring._use(bytearray(64), MEMORY[0], MEMORY[2])
        ring._open(queue, queue.cells, 0)
        return ring

    def post_read(self) -> int:
        transfer = self.core.start_transfer(WrOpcode.RDMA_READ, self._region, REMOTE)
        return -1 if transfer is None else 0

    def close(self) -> None:
        """Free everything that is not destroyed yet."""
        self.core.abandon()
        own = self.cm_id.own_objects()
        self.cm_id.destroy()
        own.destroy()
        self._channel.close()


Post = Callable[[Posting], int | None]
Destroy = Callable[[Posting], None]
# Each posts once. It raises, or returns an errno or -1, if it could not.
WITHOUT_GIL: list[Post] = [
    lambda posting: posting.qp.post_list(0, WrOpcode.SEND, [MEMORY]),
    lambda posting: posting.qp.post_recv(0, *MEMORY),
    Posting.post_read,
]
WITH_GIL: list[Post] = [
    lambda posting: send_now(posting.core, b"hello"),
    lambda posting: posting.ring._post(0),
]
SHARED_WITHOUT_GIL: list[Post] = [lambda posting: posting.srq.post_recv(0, *MEMORY)]
SHARED_WITH_GIL: list[Post] = [lambda posting: posting.shared_ring._post(0)]
DESTROY: list[Destroy] = [lambda made: made.cm_id.destroy_qp(), lambda made: made.qp.destroy()]
DESTROY_SHARED: list[Destroy] = [
    lambda made: made.cm_id.destroy_srq(),
    lambda made: made.srq.close(),
]
DESTROYED = [
    *itertools.product(WITHOUT_GIL, DESTROY),
    *itertools.product(SHARED_WITHOUT_GIL, DESTROY_SHARED),
]


def attempt(post: Post, posting: Posting) -> int:
    """Post once. Return 0, or an errno or -1."""
    try:
        return post(posting) or 0
    except VerbsError as error:
        return error.errno or -1


def join(*threads: threading.Thread) -> None:
    for thread in threads:
        thread.join(TIME_LIMIT)
        assert not thread.is_alive()


def waits_or_has_ended(thread: threading.Thread) -> bool:
    """Return True if a thread sleeps, but not for the GIL: such a thread wakes every few ms."""
    status = Path(f"/proc/self/task/{thread.native_id}/status")
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        first = status.read_text()
        time.sleep(0.05)
        return "\nState:\tS" in first and status.read_text() == first
    return True


@pytest.mark.parametrize(("post", "destroy"), DESTROYED)
def test_destroying_waits_for_posts(devices: Simulation, post: Post, destroy: Destroy) -> None:
    posting, results = Posting(devices), []
    lib.sim_hold_posts(True)
    poster = threading.Thread(target=lambda: results.append(attempt(post, posting)))
    poster.start()
    loops.block_until(lambda: lib.sim_held_posts() == 1, "the thread to post")
    destroyer = threading.Thread(target=destroy, args=[posting])
    destroyer.start()
    loops.block_until(lambda: waits_or_has_ended(destroyer), "the thread to wait for the post")
    assert destroyer.is_alive()
    lib.sim_hold_posts(False)
    join(poster, destroyer)
    assert results == [0]
    assert attempt(post, posting) in (errno.EINVAL, -1)
    posting.close()


def test_posting_threads_do_not_wait_for_each_other(devices: Simulation) -> None:
    posting = Posting(devices)
    lib.sim_hold_posts(True)
    threads = [threading.Thread(target=post, args=[posting]) for post in WITHOUT_GIL]
    for thread in threads:
        thread.start()
    loops.block_until(lambda: lib.sim_held_posts() == len(WITHOUT_GIL), "all threads to post")
    lib.sim_hold_posts(False)
    join(*threads)
    posting.close()


@pytest.mark.parametrize(
    ("posts", "destroy"),
    [
        *itertools.product([WITHOUT_GIL + WITH_GIL], DESTROY),
        *itertools.product([SHARED_WITHOUT_GIL + SHARED_WITH_GIL], DESTROY_SHARED),
    ],
)
def test_threads_can_post_until_a_queue_is_destroyed(
    devices: Simulation, posts: list[Post], destroy: Destroy
) -> None:
    def post_until_destroyed(post: Post, posting: Posting, begun: threading.Semaphore) -> None:
        result = attempt(post, posting)
        begun.release()
        while result in (0, errno.ENOMEM):  # ENOMEM: the queue is full
            result = attempt(post, posting)

    for _ in range(ROUNDS):
        posting, begun = Posting(devices), threading.Semaphore(0)
        threads = [
            threading.Thread(target=post_until_destroyed, args=[post, posting, begun])
            for post in posts
        ]
        for thread in threads:
            thread.start()
        for _ in threads:
            assert begun.acquire(timeout=TIME_LIMIT)
        destroy(posting)
        join(*threads)
        posting.close()


def test_a_thread_can_attach_queues_while_another_polls(verbs: Queues) -> None:
    dispatcher = fast_path.CompletionDispatcher(lambda: None)
    counts: list[int] = []

    def poll() -> None:
        while sum(counts) < ROUNDS:
            counts.append(dispatcher.poll_for(verbs.cq, 10_000_000))

    poller = threading.Thread(target=poll)
    poller.start()
    cores = []
    for key in range(1, ROUNDS + 1):
        cores.append(core := fast_path.SendQueueCore(1, 1, 64))
        assert (core.try_reserve(), core.commit(None, False)[0]) == (True, 0)
        dispatcher.attach(key, cores[-1], fast_path.ReceiveQueue(fast_path.ReceiveRingCore(1, 64)))
        verbs.sent(key, 0)
        loops.block_until(lambda: cores[-1].credits == 1, "the other thread to poll")
        dispatcher.detach(key)
    join(poller)


def test_closing_an_id_ends_the_wait_of_a_thread_for_completions(devices: Simulation) -> None:
    async def wait_and_close() -> None:
        cm_id = await SyncCmId.create(PortSpace.UDP)
        cm_id.bind_addr(parse_address(devices.near.host))
        await cm_id.create_qp(SMALL)
        waiting = asyncio.ensure_future(cm_id.get_recv_comp())
        while not cm_id.handle.interrupts:
            await asyncio.sleep(0)
        await cm_id.aclose()
        with pytest.raises(LocalClosed):
            await waiting

    for _ in range(ROUNDS):
        asyncio.run(wait_and_close())
