"""Together: what tasks post that one event has woken goes to the device in one call, in order."""

from __future__ import annotations

import asyncio
import contextvars
import errno
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import wakeups
from qp_fakes import FakeCallbacks, FakePool, no_polling
from verbs_fakes import FakeVerbs

from aiordma import VerbsError
from aiordma._native import fast_path, ffi
from aiordma.enums import SendFlags, WcOpcode, WrOpcode
from aiordma.loop import make_future, run_with_inline_wakeups, running_loop
from aiordma.qp import SendQueue
from aiordma.qp import post_list as together
from aiordma.qp.operation import Operations
from aiordma.qp.post_list import MAX_LENGTH, MemoryRequest, PostList
from aiordma.verbs import QueuePair, QueuePairCaps, RequestChain
from aiordma.verbs.queue_pair import SIGNALED

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("time_limit")]

KEY = 5
DEPTH = 4 * MAX_LENGTH
TARGET = (0x8000, 17)


class Rig:
    """Operations on a queue pair in C that notes what is posted to it."""

    def __init__(self, verbs: FakeVerbs) -> None:
        self.verbs = verbs
        self.queue = SendQueue(running_loop(), DEPTH, max_inline=64)
        self.qp = QueuePair(ffi.cast("struct ibv_qp **", verbs.qp_cell)[0], QueuePairCaps(DEPTH, 0))
        self.queue.open(self.qp, FakePool(), KEY << 32)  # type: ignore[arg-type]
        self.clock = fast_path.CompletionDispatcher(lambda: None)
        self.owner = FakeCallbacks()
        self.queue.post_list = PostList(
            self.qp, self.queue.core, self.clock, self.owner.post_failed
        )
        self.operations = Operations(running_loop(), self.queue, self.owner, no_polling())
        self.counted = 0
        self.given_back: list[int] = []

    def request(self, number: int, pieces: int = 1, imm: int = -1) -> MemoryRequest:
        """A read of 64 KiB; its address is told by its number."""
        opcode = WrOpcode.RDMA_READ if imm < 0 else WrOpcode.RDMA_WRITE_WITH_IMM
        segments = [((number + 1) << 16, 1 << 16, 9)] * pieces
        return MemoryRequest(opcode, segments, TARGET, self._count, imm)

    def _count(self) -> None:
        self.counted += 1

    async def perform(self, request: MemoryRequest, number: int = 0) -> None:
        await self.operations.perform(
            WcOpcode.RDMA_READ, request, lambda: self.given_back.append(number)
        )

    async def waiting(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """Tasks that wait, each for one of these futures, to go on with its call."""
        futures, self.tasks = await wakeups.waiting(calls)
        return futures

    async def woken(self, *calls: Callable[[], Any]) -> list[asyncio.Task[None]]:
        """Tasks that go on together, each with its call."""
        return await wakeups.woken(*calls)

    async def reads(self, count: int) -> list[asyncio.Task[None]]:
        return await self.woken(
            *(lambda n=number: self.perform(self.request(n), n) for number in range(count))
        )

    def end(self, count: int) -> None:
        """The device has ended the oldest ones."""
        for number in range(count):
            lent: Any = self.queue.completed(number)
            lent.succeeded = True

    @property
    def numbers(self) -> list[int]:
        """Of what was posted, by its address; -1: a message."""
        opcodes = (WrOpcode.SEND,)
        return [
            -1 if found.opcode in opcodes else (found.address >> 16) - 1
            for found in self.verbs.posts
        ]


async def test_what_tasks_post_that_are_woken_together_is_one_call(verbs: FakeVerbs) -> None:
    rig = Rig(verbs)
    tasks = await rig.reads(5)
    assert verbs.calls == 1
    assert rig.numbers == list(range(5))
    assert [found.wr_id for found in verbs.posts] == [KEY << 32 | n for n in range(5)]
    assert {(found.length, found.lkey, found.remote) for found in verbs.posts} == {
        (1 << 16, 9, TARGET)
    }
    assert {found.flags for found in verbs.posts} == {SIGNALED}
    assert rig.counted == 5
    rig.end(5)
    await asyncio.gather(*tasks)
    assert rig.given_back == list(range(5))


async def test_the_next_ones_are_another(verbs: FakeVerbs) -> None:
    rig = Rig(verbs)
    await rig.reads(3)
    await rig.reads(2)
    assert verbs.calls == 2
    assert rig.numbers == [0, 1, 2, 0, 1]


async def test_immediate_data_goes_along(verbs: FakeVerbs) -> None:
    rig = Rig(verbs)
    await rig.woken(*(lambda n=n: rig.perform(rig.request(n, imm=n)) for n in (7, 8)))
    assert verbs.calls == 1
    assert [found.imm_data for found in verbs.posts] == [socket.htonl(7), socket.htonl(8)]
    assert {found.opcode for found in verbs.posts} == {WrOpcode.RDMA_WRITE_WITH_IMM}


async def test_one_that_is_woken_alone_waits_for_nobody(verbs: FakeVerbs) -> None:
    rig = Rig(verbs)
    seen: list[int] = []

    async def read() -> None:
        running_loop().call_soon(lambda: seen.append(verbs.calls))
        await rig.perform(rig.request(0))

    await rig.woken(read)
    assert verbs.calls == 1
    assert rig.clock.open_post_lists == 0
    await asyncio.sleep(0)
    assert seen == [1]


async def test_what_no_event_has_woken_waits_for_nobody(verbs: FakeVerbs) -> None:
    rig = Rig(verbs)
    tasks = [asyncio.create_task(rig.perform(rig.request(n))) for n in range(3)]
    await asyncio.sleep(0)
    assert verbs.calls == 3
    rig.end(3)
    await asyncio.gather(*tasks)


async def test_many_are_several_calls(verbs: FakeVerbs) -> None:
    rig = Rig(verbs)
    tasks = await rig.reads(2 * MAX_LENGTH + 1)
    assert verbs.calls == 3
    assert rig.numbers == list(range(2 * MAX_LENGTH + 1))
    rig.end(2 * MAX_LENGTH + 1)
    await asyncio.gather(*tasks)


async def test_a_message_does_not_overtake_them(verbs: FakeVerbs) -> None:
    rig = Rig(verbs)
    lane_said: list[int] = []

    def send() -> None:
        lane_said.append(rig.queue.core.send(b"in short"))
        assert rig.queue.try_reserve()
        rig.queue.post_inline(b"hello")

    await rig.woken(
        lambda: rig.perform(rig.request(0)),
        lambda: rig.perform(rig.request(1)),
        send,
        lambda: rig.perform(rig.request(2)),
    )
    assert lane_said == [-1]  # "that needs the long way"
    assert rig.numbers == [0, 1, -1, 2]
    assert verbs.calls == 3
    assert [found.wr_id & 0xFF for found in verbs.posts] == [0, 1, 2, 3]
    assert rig.queue.core.send(b"in short") == 0


async def test_one_in_several_pieces_goes_alone_in_its_turn(verbs: FakeVerbs) -> None:
    rig = Rig(verbs)
    await rig.woken(
        lambda: rig.perform(rig.request(0)),
        lambda: rig.perform(rig.request(1, pieces=3)),
        lambda: rig.perform(rig.request(2)),
    )
    assert rig.numbers == [0, 1, 2]
    assert [found.num_sge for found in verbs.posts] == [1, 3, 1]


async def test_nobody_polls_before_they_are_posted(verbs: FakeVerbs) -> None:
    rig = Rig(verbs)
    rig.queue.core.set_polling(rig.clock, verbs.cq, 10**9)
    seen: list[tuple[int, int]] = []

    def look() -> None:
        rig.queue.core.credits = 0
        rig.queue.core.waiters -= 1  # or it would not even look for a place
        assert rig.queue.core.send(b"x") == -1
        rig.queue.core.waiters += 1
        rig.queue.core.credits = DEPTH
        seen.append((rig.clock.open_post_lists, verbs.polls))

    await rig.woken(lambda: rig.perform(rig.request(0)), look)
    assert seen == [(1, 0)]
    assert rig.clock.open_post_lists == 0
    assert rig.queue.core.waiters == 0


@pytest.mark.parametrize("taken", [0, 2])
async def test_what_is_refused_ends_the_connection_and_all_waiting(
    verbs: FakeVerbs, taken: int
) -> None:
    """Whichever of them the device took: their memory is its own until the queue pair is gone."""
    rig = Rig(verbs)
    verbs.refuse(errno.ENOMEM)
    verbs.accept_sends(taken)
    tasks = await rig.reads(4)
    assert verbs.posted == taken
    assert len(rig.owner.breaks) == 1
    for task in tasks:
        with pytest.raises(VerbsError) as raised:
            await task
        assert raised.value.errno == errno.ENOMEM
        assert raised.value.function == "ibv_post_send"
    assert rig.given_back == []
    rig.queue.abandon()
    assert sorted(rig.given_back) == list(range(4))


async def test_nothing_is_posted_behind_what_was_refused(verbs: FakeVerbs) -> None:
    """Not even by who had seen the connection open before: "done" must not come without it."""
    rig = Rig(verbs)
    seen: list[VerbsError] = []

    def send(data: bytes) -> None:
        assert rig.queue.try_reserve()
        with pytest.raises(VerbsError) as raised:
            rig.queue.post_inline(data)
        rig.queue.unreserve()
        verbs.refuse(0)  # from now on the device would take it
        seen.append(raised.value)

    verbs.refuse(errno.ENOMEM)
    tasks = await rig.woken(
        lambda: rig.perform(rig.request(0)),
        lambda: send(b"done"),
        lambda: send(b"done, again"),
    )
    await rig.woken(lambda: send(b"later"), lambda: send(b"and later"))
    assert verbs.posted == 0
    assert [error.errno for error in seen] == [errno.ENOMEM] * 4
    assert rig.given_back == []
    with pytest.raises(VerbsError):
        await tasks[0]


async def test_what_comes_when_a_full_chain_was_refused_is_not_posted(verbs: FakeVerbs) -> None:
    rig = Rig(verbs)
    verbs.refuse(errno.ENOMEM)
    verbs.accept_sends(3)
    tasks = await rig.reads(MAX_LENGTH + 2)
    assert verbs.posted == 3
    for task in tasks:
        with pytest.raises(VerbsError):
            await task
    assert len(rig.owner.breaks) >= 1
    rig.queue.abandon()
    assert sorted(rig.given_back) == list(range(MAX_LENGTH + 2))


async def test_one_that_is_cancelled_before_it_is_posted_is_posted(verbs: FakeVerbs) -> None:
    """As one that is cancelled later: its memory comes back when the device is done with it."""
    rig = Rig(verbs)
    reader: list[asyncio.Task[None] | None] = []

    async def read() -> None:
        reader.append(asyncio.current_task())
        await rig.perform(rig.request(0), 0)

    def cancel() -> None:
        assert verbs.posted == 0
        assert reader[0] is not None
        reader[0].cancel()

    tasks = await rig.woken(read, cancel)
    with pytest.raises(asyncio.CancelledError):
        await tasks[0]
    assert verbs.posted == 1
    assert rig.given_back == []
    assert rig.queue.core.fence_flags == SendFlags.FENCE
    rig.end(1)
    assert rig.given_back == [0]
    assert rig.queue.core.fence_flags == 0


async def test_they_are_posted_though_a_task_ends_the_loop(verbs: FakeVerbs) -> None:
    class End(BaseException):
        pass

    rig = Rig(verbs)

    first, second = make_future(running_loop()), make_future(running_loop())

    async def read() -> None:
        await first
        await rig.perform(rig.request(0))

    def end(_: object) -> None:
        assert verbs.posted == 0
        raise End

    task = asyncio.create_task(read())
    await asyncio.sleep(0)
    second.add_done_callback(end, context=contextvars.copy_context())  # type: ignore[call-arg]

    def call() -> None:
        with pytest.raises(End):
            run_with_inline_wakeups(lambda: (first.set_result(None), second.set_result(None)))

    running_loop().call_soon(call)
    await asyncio.sleep(0)
    assert verbs.calls == 1
    assert rig.clock.open_post_lists == 0
    rig.end(1)
    await task


class CtrlC(BaseException):
    """May come after any call."""


def interrupt_posting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have one come whenever a chain was posted."""
    post_chain = QueuePair.post_chain

    def interrupted(qp: QueuePair, chain: RequestChain) -> None:
        post_chain(qp, chain)
        raise CtrlC

    monkeypatch.setattr(QueuePair, "post_chain", interrupted)


async def test_a_ctrl_c_as_they_are_posted_has_none_posted_twice(
    verbs: FakeVerbs, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(verbs)
    interrupt_posting(monkeypatch)
    with pytest.raises(CtrlC):
        await rig.woken(*(lambda n=n: rig.perform(rig.request(n), n) for n in range(3)))
    monkeypatch.undo()
    assert rig.numbers == [0, 1, 2]
    rig.queue.try_reserve()
    rig.queue.post_inline(b"x")
    await rig.reads(2)
    assert rig.numbers == [0, 1, 2, -1, 0, 1]
    assert (rig.clock.open_post_lists, rig.queue.core.waiters) == (0, 0)


@pytest.mark.parametrize("where", ["before", "after"])
async def test_a_ctrl_c_as_one_is_added_frees_nothing_that_the_device_gets(
    verbs: FakeVerbs, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    rig = Rig(verbs)
    add = RequestChain.add

    def interrupted(chain: RequestChain, *arguments: Any) -> None:
        if where == "after":
            add(chain, *arguments)
        raise CtrlC

    monkeypatch.setattr(RequestChain, "add", interrupted)
    ended: list[BaseException] = []

    async def read() -> None:
        try:
            await rig.perform(rig.request(0), 0)
        except CtrlC as error:
            ended.append(error)

    await rig.woken(read, lambda: None)
    monkeypatch.undo()
    assert len(ended) == 1
    assert verbs.posted == (where == "after")
    assert rig.given_back == []  # it comes back with the next end, or with the queue pair
    rig.queue.abandon()
    assert rig.given_back == [0]


async def test_two_connections_are_posted_though_one_is_interrupted(
    verbs: FakeVerbs, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other_verbs = FakeVerbs(library)
    rig, other = Rig(verbs), Rig(other_verbs)
    interrupt_posting(monkeypatch)
    with pytest.raises(CtrlC):
        await rig.woken(
            lambda: rig.perform(rig.request(0)), lambda: other.perform(other.request(0))
        )
    assert (verbs.posted, other_verbs.posted) == (1, 1)
    assert (rig.clock.open_post_lists, other.clock.open_post_lists) == (0, 0)
    other_verbs.close()


async def test_a_forked_child_leaves_them_to_its_parent(
    verbs: FakeVerbs, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(verbs)
    monkeypatch.setattr(together, "is_forked_child", lambda: True)
    await rig.reads(2)
    assert verbs.posted == 0


async def test_a_chain_takes_no_more_than_it_has_room_for() -> None:
    chain = RequestChain(2)
    for _ in range(2):
        chain.add(1, WrOpcode.RDMA_READ, (1 << 16, 1 << 16, 9), TARGET, SIGNALED, -1)
    with pytest.raises(ValueError, match="a chain of 2 requests is full"):
        chain.add(1, WrOpcode.RDMA_READ, (1 << 16, 1 << 16, 9), TARGET, SIGNALED, -1)
    assert chain.count == 2
