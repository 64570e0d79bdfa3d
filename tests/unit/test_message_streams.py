"""MessageStream on simulated devices: sizes, frames, flow control, cancelling, the end."""

from __future__ import annotations

import contextlib
import errno
import mmap
from collections.abc import Sequence
from unittest.mock import Mock

import loops
import pytest
from helpers import has_received
from simulator import Simulation
from simulator.pairs import PORT
from streaming import message_streams

import aiordma
from aiordma import (
    AccessFlags,
    BusyError,
    ConnectionOptions,
    LocalClosed,
    MessageOptions,
    MessageStream,
    PeerClosed,
    ProtocolError,
    RdmaError,
    VerbsError,
    connect_messages,
    listen_messages,
)
from aiordma.enums import QpState
from aiordma.message_streams import rendezvous
from aiordma.message_streams.landing import IDLE_SECONDS

pytestmark = pytest.mark.usefixtures("time_limit")

LARGE = bytes(range(256)) * 4096
OPTIONS = MessageOptions(window=4, announcements=2, slot_size=512, eager_limit=256)


async def test_messages_arrive_in_order_as_they_were_framed(simulation: Simulation) -> None:
    messages: list[list[bytes]] = [
        [b"one"],
        [LARGE],
        [b"", b"two"],
        [b"a" * 200, LARGE[:9000], b""],
    ]
    async with message_streams(simulation.far, OPTIONS) as (near, far):
        received: list[list[bytes]] = []

        async def receive() -> None:
            for _ in messages:
                with await far.recv_message() as message:
                    received.append([bytes(frame) for frame in message.frames])

        receiving = loops.create_task(receive())
        for message in messages:
            await near.send(message)
        await receiving
        assert received == messages


@pytest.mark.parametrize("size", [3, len(LARGE)])
async def test_each_way_to_receive(simulation: Simulation, size: int) -> None:
    data, asked = LARGE[:size], list[Sequence[int]]()

    def allocate(sizes: Sequence[int]) -> list[bytearray]:
        asked.append(sizes)
        return [bytearray(size) for size in sizes]

    async with message_streams(simulation.far, OPTIONS) as (near, far):
        sending = [loops.create_task(near.send([data, data[:2]])) for _ in range(3)]
        assert await far.recv() == data + data[:2]
        with pytest.raises(ValueError, match=f"does not fit into {size}"):
            await far.recv_into(bytearray(size))
        buffer = bytearray(size + 10)
        assert await far.recv_into(buffer) == size + 2
        assert buffer[: size + 2] == data + data[:2]
        with pytest.raises(ValueError, match="0 buffers for 2 frames"):
            await far.recv_frames(lambda sizes: [])
        with pytest.raises(ValueError, match="a frame of 2 bytes does not fit into 1"):
            await far.recv_frames(lambda sizes: [bytearray(size), bytearray(1)])
        frames = await far.recv_frames(allocate)
        assert (asked, frames) == ([(size, 2)], [data, data[:2]])
        await loops.gather(*sending)


async def test_progress_is_reported_after_each_piece(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "PIECE", len(LARGE) // 4)
    async with message_streams(simulation.far, OPTIONS) as (near, far):
        for message in (LARGE, b"small", [LARGE, LARGE[:10]]):
            near.send_soon(message)
        reported: list[int] = []
        await far.recv_into(bytearray(len(LARGE)), progress=reported.append)
        assert reported == [len(LARGE) * part // 4 for part in (1, 2, 3, 4)]
        await far.recv_into(bytearray(5), progress=reported.append)
        assert reported[4:] == [5]
        await far.recv_frames(lambda sizes: [*map(bytearray, sizes)], progress=reported.append)
        assert sorted(reported[5:]) == reported[5:]
        assert reported[-1] == len(LARGE) + 10


async def test_registered_memory_is_sent_and_received_as_it_is(simulation: Simulation) -> None:
    async with message_streams(simulation.far, OPTIONS) as (near, far):
        access = aiordma.AccessFlags.LOCAL_WRITE | aiordma.AccessFlags.REMOTE_READ
        source = await near.allocate(len(LARGE), access)
        memoryview(source)[:] = LARGE
        target = await far.allocate(len(LARGE), far.read_access)
        sending = loops.create_task(near.send(source[10:]))
        assert await far.recv_into(target) == len(LARGE) - 10
        await sending
        assert bytes(memoryview(target)[:-10]) == LARGE[10:]
        assert not source.closed


async def test_a_slow_reader_holds_any_number_of_senders_back(simulation: Simulation) -> None:
    """On iWARP, too, where it would end a Connection."""
    async with message_streams(simulation.far, OPTIONS) as (near, far):
        sending = [loops.create_task(near.send(b"%d" % index)) for index in range(100)]
        await loops.sleep(1)
        assert sum(task.done() for task in sending) == OPTIONS.window
        received = {await far.recv() for _ in sending}  # trio begins the tasks in any order
        assert received == {b"%d" % index for index in range(100)}
        await loops.gather(*sending)


async def test_both_sides_send_without_receiving(simulation: Simulation) -> None:
    async with message_streams(simulation.far, OPTIONS) as (near, far):
        sending = [
            loops.create_task(side.send(data))
            for side in (near, far)
            for data in [b"x"] * 6 + [LARGE] * 3
        ]
        await loops.sleep(1)
        for side in (far, near):
            assert [len(await side.recv()) for _ in range(9)] == [1] * 6 + [len(LARGE)] * 3
        await loops.gather(*sending)


async def test_the_end_of_the_messages(simulation: Simulation) -> None:
    async with message_streams(simulation.far, OPTIONS) as (near, far):
        await near.send(b"last")
        await near.send_eof()
        await near.send_eof()
        assert [message async for message in far] == [b"last"]
        with pytest.raises(PeerClosed, match="sends no further message"):
            await far.recv()
        with pytest.raises(LocalClosed, match="was ended"):
            await near.send(b"more")
        await far.send(b"the other way")
        assert await near.recv() == b"the other way"
        await near.aclose()
        with pytest.raises(LocalClosed):
            await near.send(b"")
        await loops.until(lambda: far.closed, "the peer's end to be noticed")
        with pytest.raises(PeerClosed):
            await far.send(b"")
        assert "closed" in repr(near)


async def test_a_cancelled_receive_loses_no_message(simulation: Simulation) -> None:
    async with message_streams(simulation.far, OPTIONS) as (near, far):
        receiving = loops.create_task(far.recv())
        await loops.sleep(0.01)
        with pytest.raises(BusyError):
            await far.recv()
        await loops.cancel(receiving)
        sending = loops.create_task(near.send(LARGE))
        await loops.sleep(1)
        assert await far.recv() == LARGE
        await sending


async def test_receives_that_are_cancelled_again_and_again_make_progress(
    simulation: Simulation,
) -> None:
    """The second one has a background task read the message, which the third one waits for."""
    message = bytes(range(256)) * 200
    async with message_streams(simulation.far, OPTIONS) as (near, far):
        near.send_soon(message)
        await loops.until(lambda: far._exchange._queue, "the announcement")
        queue_pairs = list(simulation.queue_pairs())
        posted: list[int] = []
        for qp in queue_pairs:
            qp.allowed = 0
        for _ in range(4):
            receiving = loops.create_task(far.recv())
            await loops.sleep(1)  # simulated time, which passes when nothing else can happen
            await loops.cancel(receiving)
            posted.append(sum(int(qp.pointer.sends.posted) for qp in queue_pairs))
        assert [now - posted[0] for now in posted] == [0, 1, 1, 1]
        for qp in queue_pairs:
            qp.allowed = None
        assert await far.recv() == message
        await near.drain()


async def test_a_cancelled_send_is_received_all_the_same_if_it_was_announced(
    simulation: Simulation,
) -> None:
    async with message_streams(simulation.far, OPTIONS) as (near, far):
        frames = [LARGE[: 300 + index] for index in range(100)]  # announced in several parts
        sending = loops.create_task(near.send(frames))
        await loops.sleep(1)
        waiting = loops.create_task(near.send(b"never"))
        await loops.sleep(1)
        assert not near._exchange._outbox.messages[0].is_taken  # no credits for all parts
        await loops.cancel(sending)
        await loops.cancel(waiting)
        with await far.recv_message() as message:
            assert [bytes(frame) for frame in message.frames] == frames
        await near.send(b"next")
        assert await far.recv() == b"next"
        await loops.until(lambda: not near.stats.messages_announced, "the peer to have read")


@pytest.mark.loops("asyncio")  # on trio, each recv() lets the background task run
async def test_a_queued_message_is_posted_when_c_takes_credits(simulation: Simulation) -> None:
    """They come with small messages, of which no Python knows, before the background task runs."""
    count = MessageOptions().window
    async with message_streams(simulation.far, MessageOptions()) as (near, far):
        for number in range(count):
            near.send_soon(b"%d" % number)
        for number in range(count):
            assert await far.recv() == b"%d" % number
            far.send_soon(b"answer")
        await loops.until(lambda: has_received(near._connection, count), "the answers")
        near.send_soon(b"queued")
        assert near.stats.messages_queued == 1
        for _ in range(count):
            assert await near.recv() == b"answer"
        assert await far.recv() == b"queued"


async def test_the_background_task_works_only_while_no_task_waits(simulation: Simulation) -> None:
    async with message_streams(simulation.far, OPTIONS) as (near, far):
        exchange = near._exchange
        for _ in range(3):
            near.send_soon(LARGE)
        await loops.until(lambda: near.stats.messages_announced, "the announcements")
        assert exchange._has_background_task
        draining = loops.create_task(near.drain())
        assert await far.recv() == LARGE
        await loops.until(lambda: not exchange._has_background_task, "drain() to take over")
        await loops.cancel(draining)
        assert exchange._has_background_task
        for _ in range(2):
            assert await far.recv() == LARGE
        await loops.until(lambda: not near.stats.messages_announced, "the background task")
        await loops.until(lambda: not exchange._has_background_task, "its end")


async def test_messages_that_the_peer_does_not_take_are_refused(simulation: Simulation) -> None:
    options = MessageOptions(max_frames=3, max_nbytes=1000)
    async with message_streams(simulation.far, options) as (near, far):
        with pytest.raises(ValueError, match="4 frames; the peer takes 3"):
            await near.send([b""] * 4)
        with pytest.raises(ValueError, match="1001 bytes; the peer takes 1000"):
            await near.send(bytes(1001))
        await near.send([])
        assert await far.recv() == b""
    tiny = MessageOptions(max_nbytes=10, slot_size=64)
    async with message_streams(simulation.far, tiny) as (near, far):
        with pytest.raises(ValueError, match="11 bytes; the peer takes 10"):
            await near.send(bytes(11))
        await near.send(bytes(10))
        assert await far.recv() == bytes(10)


async def test_the_smaller_slots_of_both_sides_limit_eager_messages(
    simulation: Simulation,
) -> None:
    host, sizes = simulation.far.host, [10, 48, 49, 100]
    for own, peer in ((64, 4096), (4096, 64)):
        far_options, near_options = (MessageOptions(slot_size=size) for size in (peer, own))
        async with listen_messages(host, PORT, options=far_options) as listener:
            accepting = loops.create_task(listener.accept())
            async with (
                connect_messages(host, PORT, options=near_options) as near,
                await accepting as far,
            ):
                for source, sink in ((near, far), (far, near)):
                    for size in sizes:
                        source.send_soon(bytes(size))
                    assert [len(await sink.recv()) for _ in sizes] == sizes
                    await source.drain()
                    assert source.stats.bytes_copied - source.stats.bytes_received == 10 + 48


async def test_a_peer_of_another_protocol(simulation: Simulation) -> None:
    host = simulation.far.host
    async with aiordma.listen(host, PORT) as plain:
        serving = loops.create_task(plain.accept())
        with pytest.raises(ProtocolError, match="does not use the protocol"):
            await connect_messages(host, PORT)
        await (await serving).aclose()
    async with listen_messages(host, PORT) as listener:
        connecting = loops.create_task(aiordma.connect(host, PORT))
        request = await listener.get_request()
        assert request.private_data == b""
        with pytest.raises(ProtocolError, match="does not use the protocol"):
            await request.accept()
        with pytest.raises(aiordma.Rejected):
            await connecting


async def test_private_data(simulation: Simulation) -> None:
    host = simulation.far.host
    async with listen_messages(host, PORT) as listener:
        connecting = loops.create_task(connect_messages(host, PORT, private_data=b"mine"))
        request = await listener.get_request()
        assert request.private_data.startswith(b"mine")
        far = await request.accept(b"yours")
        near = await connecting
        assert near.private_data.startswith(b"yours")
        assert far.private_data.startswith(b"mine")
        await near.aclose()
        await far.aclose()


async def test_a_peer_that_dies_ends_all_waits(simulation: Simulation) -> None:
    async with message_streams(simulation.far, OPTIONS) as (near, far):
        tasks = [loops.create_task(near.send(LARGE)), loops.create_task(near.recv())]
        await loops.sleep(0.1)
        far.abort()
        for task in tasks:
            with pytest.raises(PeerClosed):
                await task
        with pytest.raises(LocalClosed):
            await far.recv()


async def test_small_messages_are_handled_in_c(simulation: Simulation) -> None:
    """Credits, too: more messages are sent than the window has room for."""
    async with message_streams(simulation.far, OPTIONS) as (near, far):
        for number in range(10):
            receiving = loops.create_task(far.recv())
            await near.send(bytearray(b"%d" % number))
            await near.send(b"and")
            assert await receiving == b"%d" % number
            assert await anext(far) == b"and"
        in_python = [side._exchange.stats for side in (near, far)]
        assert [stats.messages_sent + stats.messages_received for stats in in_python] == [0, 0]
        assert (near.stats.messages_sent, near.stats.bytes_sent) == (20, 40)
        assert (far.stats.messages_received, far.stats.bytes_received) == (20, 40)
        assert (near.stats.bytes_copied, far.stats.bytes_copied) == (40, 40)


@pytest.mark.parametrize("max_inline", [0, 64])
async def test_small_messages_that_cannot_be_inline_need_no_task(
    simulation: Simulation, max_inline: int
) -> None:
    """They are copied in C. More messages are sent than the window has room for."""
    connection = ConnectionOptions(max_inline=max_inline)
    options = MessageOptions(window=4, connection=connection)
    async with message_streams(simulation.far, options) as (near, far):
        for size in (65, 496, 497, 4080):
            await loops.gather(near.send(bytes(size)), far.recv())  # the pool has memory now
            before = near._exchange.stats.messages_sent, far._exchange.stats.messages_received
            for number in range(6):
                near.send_soon(bytes([number]) * size)
                assert await far.recv() == bytes([number]) * size
            after = near._exchange.stats.messages_sent, far._exchange.stats.messages_received
            assert after == before
        assert near.stats.messages_sent == far.stats.messages_received == 4 * 7


async def test_a_copy_that_cannot_be_posted_at_once_is_left_to_a_task(
    simulation: Simulation,
) -> None:
    """The pool has no buffer for it: a worker thread registers more memory."""
    message = bytes(range(200))
    async with message_streams(simulation.far) as (near, far):
        credits = near._exchange.protocol.wire_credits.credits
        pool = near._exchange.data_path.sends._pool
        held = []
        while (buffer := pool.try_acquire(1024)) is not None:
            held.append(buffer)
        near.send_soon(message)
        assert near.stats.messages_queued == 1
        assert near._exchange.protocol.wire_credits.credits == credits - 1  # taken once
        assert await far.recv() == message
        await near.drain()
        assert near._exchange.stats.messages_sent == 1
        for buffer in held:
            buffer.release()
        near.send_soon(message)
        assert await far.recv() == message
        assert near._exchange.stats.messages_sent == 1


async def test_a_copy_that_the_device_refuses_ends_the_stream(simulation: Simulation) -> None:
    async with message_streams(simulation.far) as (near, far):
        await loops.gather(near.send(bytes(200)), far.recv())  # the pool has memory now
        for qp in simulation.queue_pairs():
            qp.pointer.sends.refusal = errno.ENOMEM
        with pytest.raises(VerbsError, match="ibv_post_send"):
            await near.send(bytes(200))
        with pytest.raises(VerbsError, match="ibv_post_send"):
            await near.recv()
        with pytest.raises(PeerClosed):
            await far.recv()


async def test_large_messages_are_not_copied(simulation: Simulation) -> None:
    async with message_streams(simulation.far, OPTIONS) as (near, far):
        near.send_soon([LARGE, b"small"])
        with await far.recv_message() as message:
            assert message.nbytes == len(LARGE) + 5
        near.send_soon(LARGE)
        await far.recv_into(bytearray(len(LARGE)))
        await near.drain()
        assert (near.stats.bytes_copied, far.stats.bytes_copied) == (0, 0)
        assert near.stats.bytes_sent == far.stats.bytes_received == 2 * len(LARGE) + 5
        near.send_soon(LARGE)
        assert await far.recv() == LARGE
        assert far.stats.bytes_copied == len(LARGE)


async def test_a_receiver_that_waits_lets_senders_wait_for_credits(simulation: Simulation) -> None:
    """The receiver waits in C when the senders begin to wait in Python, and goes on there."""
    async with message_streams(simulation.far, OPTIONS) as (near, far):
        receiving = loops.create_task(near.recv())
        await loops.sleep(0.1)
        sending = [loops.create_task(near.send(b"x")) for _ in range(3 * OPTIONS.window)]
        await loops.sleep(0.1)
        assert [await far.recv() for _ in sending] == [b"x"] * len(sending)
        await loops.gather(*sending)
        assert not receiving.done()
        await far.send(b"at last")
        assert await receiving == b"at last"


@pytest.mark.parametrize("where", ["C", "Python"])
async def test_senders_go_on_if_the_receiver_that_waits_for_all_is_cancelled(
    simulation: Simulation, where: str
) -> None:
    """In C, it is cancelled just before a sender asks it to go on in Python."""
    async with message_streams(simulation.far, OPTIONS) as (near, far):
        receiving = await loops.start(near.recv())
        messages = [b"%d" % number for number in range(OPTIONS.window + 1)]
        for message in messages[:-1]:
            await near.send(message)  # takes the last credit

        async def receive() -> list[bytes]:
            return [await far.recv() for _ in messages]

        if where == "C":
            far_receiving = loops.create_task(receive())
            receiving.cancel()
            await near.send(messages[-1])
        else:
            sending = await loops.start(near.send(messages[-1]))
            await loops.sleep(0.1)
            receiving.cancel()
            await loops.wait([receiving])
            far_receiving = loops.create_task(receive())
            await sending
        assert await far_receiving == messages


async def test_queued_messages_are_sent_in_order_without_a_task_that_waits(
    simulation: Simulation,
) -> None:
    async with message_streams(simulation.far, OPTIONS) as (near, far):
        messages = [
            [b"small"],
            [LARGE],
            [b""],
            [b"two", LARGE[:5000]],
            [LARGE[:300]],
            [b"last"],
        ]
        for message in messages * 3:
            near.send_soon(message if len(message) > 1 else message[0])
        assert near.stats.messages_queued == len(messages) * 3 - 1  # the first one is posted
        received = [await far.recv() for _ in messages * 3]
        assert received == [b"".join(message) for message in messages] * 3
        await near.drain()
        assert near.stats.messages_queued == near.stats.messages_announced == 0


async def test_sending_waits_behind_queued_messages(simulation: Simulation) -> None:
    async with message_streams(simulation.far, OPTIONS) as (near, far):
        for _ in range(3):
            near.send_soon(LARGE)  # more than may be announced at once
        sending = loops.create_task(near.send(b"the last"))
        received = [len(await far.recv()) for _ in range(4)]
        assert received == [len(LARGE)] * 3 + [8]
        await sending
        near.send_soon(LARGE)
        await near.send_eof()
        with pytest.raises(LocalClosed):
            near.send_soon(b"too late")
        assert [len(message) async for message in far] == [len(LARGE)]


async def fill_window(stream: MessageStream) -> None:
    """Send small messages until there are no credits."""
    for _ in range(OPTIONS.window):
        await stream.send(b"fills the window")


async def test_drain_does_not_wait_for_a_send_that_was_cancelled(simulation: Simulation) -> None:
    async with message_streams(simulation.far, OPTIONS) as (near, far):
        await fill_window(near)
        sending = loops.create_task(near.send(b"never"))
        await loops.sleep(1)
        draining = loops.create_task(near.drain())
        await loops.sleep(1)
        await loops.cancel(sending)
        await draining
        assert [await far.recv() for _ in range(OPTIONS.window)] == [b"fills the window"] * 4


async def test_the_task_that_takes_wire_messages_notices_a_cancelled_send(
    simulation: Simulation,
) -> None:
    """It can wait for the message: on trio, drain() can take wire messages before the sender."""
    async with message_streams(simulation.far, OPTIONS) as (near, _):
        exchange, is_over = near._exchange, list[bool]()
        waiting = loops.create_task(exchange.progress(lambda: bool(is_over)))
        await loops.sleep(1)
        assert exchange._is_pulling
        await fill_window(near)
        sending = loops.create_task(near.send(b"never"))
        await loops.sleep(1)
        is_over.append(True)
        await loops.cancel(sending)
        await waiting


async def test_a_second_send_eof_waits_until_the_end_is_posted(simulation: Simulation) -> None:
    """The first one is cancelled. The second one then sends the end itself."""
    async with message_streams(simulation.far, OPTIONS) as (near, far):
        await fill_window(near)
        near.send_soon(b"has no credit")
        ending = [loops.create_task(near.send_eof()) for _ in range(2)]
        await loops.sleep(1)
        await loops.cancel(ending[0])
        assert not ending[1].done()
        assert len([message async for message in far]) == OPTIONS.window + 1
        await ending[1]


async def test_a_peer_without_receives_is_granted_few_credits(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing can be posted. What waits to be posted does not grow with each message."""

    async def send_never(wire: bytes) -> None:
        await loops.sleep(1000)

    async with message_streams(simulation.far, OPTIONS) as (near, far):
        exchange = far._exchange
        credits, eager, used = exchange._credits, exchange.eager, 0
        monkeypatch.setattr(
            exchange, "eager", Mock(wraps=eager, followers=0, try_post=lambda _: False)
        )
        monkeypatch.setattr(exchange, "connection", Mock(send=send_never))
        while used < 100 and credits.use():
            used += 1
            credits.free()
            exchange.note_change()
        assert used <= 2 * OPTIONS.window
        monkeypatch.undo()
        near.abort()
        far.abort()


async def test_abort_ends_the_reads_of_the_peer_at_once(simulation: Simulation) -> None:
    """The user can change the memory when abort() has returned."""
    async with message_streams(simulation.far, OPTIONS) as (near, _):
        sending = loops.create_task(near.send(LARGE))
        await loops.until(lambda: near.stats.messages_announced, "the announcement")
        qp = simulation.cm.id_of(near._endpoint.cm).qp
        assert qp is not None
        near.abort()
        assert qp.state == QpState.ERR
        with pytest.raises(LocalClosed):
            await sending


async def test_a_message_that_could_not_be_read_ahead_is_read_again(
    simulation: Simulation,
) -> None:
    async with message_streams(simulation.far, OPTIONS) as (near, far):
        for index in range(2):
            near.send_soon(LARGE[index:])
        await loops.until(lambda: near.stats.messages_announced == 2, "two announcements")
        simulation.world.calls.fail("ibv_reg_mr_iova2", errno.ENOMEM, after=1)
        with await far.recv_message() as message:
            assert bytes(message.frames[0]) == LARGE
            landings = far._receiver._landings
            await loops.until(lambda: any(one.has_failed for one in landings.values()), "a failure")
            assert await far.recv() == LARGE[1:]


async def test_kept_memory_is_released_if_none_is_left_for_a_message(
    simulation: Simulation,
) -> None:
    """It has another size than the message."""
    async with message_streams(simulation.far, OPTIONS) as (near, far):
        await loops.gather(near.send(LARGE), far.recv())
        assert far.stats.bytes_pooled == len(LARGE)
        simulation.world.calls.fail("ibv_reg_mr_iova2", errno.ENOMEM, after=1)
        _, received = await loops.gather(near.send(LARGE * 2), far.recv())
        assert received == LARGE * 2
        assert far.stats.bytes_pooled == 2 * len(LARGE)


async def test_a_message_that_is_larger_than_the_memory_is_a_typed_error(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with message_streams(simulation.far, OPTIONS) as (near, far):
        near.send_soon(LARGE)
        await loops.until(lambda: near.stats.messages_announced, "the announcement")
        failure = OSError(errno.ENOMEM, "Cannot allocate memory")
        with monkeypatch.context() as patch:
            patch.setattr(mmap, "mmap", Mock(side_effect=failure))
            with pytest.raises(VerbsError, match="mmap"):
                await far.recv()
        assert await far.recv() == LARGE


async def test_a_queued_message_that_cannot_be_registered_ends_the_stream(
    simulation: Simulation,
) -> None:
    async with message_streams(simulation.far, OPTIONS) as (near, far):
        simulation.world.calls.fail("ibv_reg_mr_iova2", errno.ENOMEM)
        near.send_soon(LARGE)
        with pytest.raises(RdmaError, match=r"a message of send_soon.* cannot be sent.*ibv_reg_mr"):
            await near.drain()
        with pytest.raises(PeerClosed):
            await far.recv()


async def test_memory_that_the_peer_cannot_read_is_refused(simulation: Simulation) -> None:
    async with message_streams(simulation.far, OPTIONS) as (near, far):
        region = await near.allocate(len(LARGE), AccessFlags.REMOTE_WRITE)
        with pytest.raises(ValueError, match="REMOTE_READ"):
            await near.send([LARGE, region])
        with pytest.raises(ValueError, match="REMOTE_READ"):
            near.send_soon(region)
        await loops.gather(near.send(LARGE), far.recv())
        # Nothing is read of an empty frame.
        _, received = await loops.gather(near.send([LARGE, region[:0]]), far.recv())
        assert received == LARGE


async def test_the_next_large_message_is_read_ahead(simulation: Simulation) -> None:
    async with message_streams(simulation.far, OPTIONS) as (near, far):
        for index in range(3):
            near.send_soon(LARGE[index:])
        await loops.until(lambda: near.stats.messages_announced == 2, "two announcements")
        with await far.recv_message() as message:
            assert bytes(message.frames[0]) == LARGE
        # The second one is read, too; then the third one is announced.
        await loops.until(lambda: near.stats.messages_queued == 0, "the third announcement")
        buffer = bytearray(len(LARGE))
        assert await far.recv_into(buffer) == len(LARGE) - 1
        assert buffer[:-1] == LARGE[1:]
        assert far.stats.bytes_copied == len(LARGE) - 1
        assert await far.recv() == LARGE[2:]
        await near.drain()


async def test_several_messages_are_read_ahead_at_once(simulation: Simulation) -> None:
    async with message_streams(simulation.far, MessageOptions(announcements=8)) as (near, far):
        for index in range(10):
            near.send_soon(LARGE[index:])
        await loops.until(lambda: near.stats.messages_announced == 8, "eight announcements")
        begun = []
        for index in range(10):
            with await far.recv_message() as message:
                assert bytes(message.frames[0]) == LARGE[index:]
            begun.append(len(far._receiver._landings))
            await loops.until(lambda: near.stats.messages_announced < 8, "DONE")
            await loops.until(
                lambda: near.stats.messages_announced == 8 or not near.stats.messages_queued,
                "the next announcement",
            )
        # Further ones are read when three are left, the current one among them.
        assert begun == [6, 5, 4, 3, 5, 4, 3, 2, 1, 0]
        await near.drain()


async def test_messages_are_read_ahead_within_the_limit_of_the_pool(
    simulation: Simulation,
) -> None:
    options = MessageOptions(max_pooled=3 * len(LARGE))
    async with message_streams(simulation.far, options) as (near, far):
        sent = [LARGE] * 6
        for message in sent:
            near.send_soon(message)
        await loops.until(lambda: near.stats.messages_announced == 6, "the announcements")
        with await far.recv_message() as first:
            assert first.nbytes == len(LARGE)
            assert len(far._receiver._landings) == 2  # beside the first one
        assert [await far.recv() for _ in sent[1:]] == sent[1:]
        await near.drain()


async def test_small_messages_between_large_ones_keep_their_order(simulation: Simulation) -> None:
    async with message_streams(simulation.far, MessageOptions()) as (near, far):
        sent = [LARGE, b"one", LARGE[1:], b"two", LARGE[2:]]
        for message in sent:
            near.send_soon(message)
        await loops.until(lambda: not near.stats.messages_queued, "all messages")
        received = [await far.recv()]
        assert far.stats.messages_unread == 4
        assert len(far._receiver._landings) == 2
        received += [await far.recv() for _ in sent[1:]]
        assert received == sent
        await near.drain()


async def test_a_peer_that_breaks_the_protocol_is_noticed_while_reading_ahead(
    simulation: Simulation,
) -> None:
    async with message_streams(simulation.far, OPTIONS) as (near, far):
        near.send_soon(LARGE)
        await loops.until(lambda: near.stats.messages_announced == 1, "the announcement")
        await near._exchange.connection.send(bytes(8))
        await loops.until(lambda: len(far._exchange._queue) == 2, "both wire messages")
        with pytest.raises(ProtocolError, match="unknown kind 0"):
            await far.recv()
        with pytest.raises(ProtocolError, match="unknown kind 0"):
            await far.recv()


async def test_a_posted_read_is_made_again_if_its_receiver_was_cancelled(
    simulation: Simulation,
) -> None:
    async with message_streams(simulation.far, OPTIONS) as (near, far):
        near.send_soon(LARGE)
        assert await far.recv() == LARGE
        assert far.stats.bytes_pooled == len(LARGE)
        near.send_soon(LARGE[1:])
        await loops.until(lambda: far._exchange._queue, "the announcement")
        queue_pairs = list(simulation.queue_pairs())
        for qp in queue_pairs:
            qp.allowed = 0
        receiving = loops.create_task(far.recv())
        await loops.sleep(1)  # simulated time, which passes when nothing else can happen
        await loops.cancel(receiving)
        assert far.stats.bytes_pooled == 0  # the device can still write to that memory
        for qp in queue_pairs:
            qp.allowed = None
        assert await far.recv() == LARGE[1:]
        await near.drain()


async def test_a_stream_ends_while_messages_are_read_ahead(simulation: Simulation) -> None:
    async with message_streams(simulation.far, OPTIONS) as (near, far):
        for _ in range(2):
            near.send_soon(LARGE)
        with await far.recv_message(), await far.recv_message():
            pass  # two regions are kept for what follows
        queue_pairs = list(simulation.queue_pairs())
        for _ in range(2):
            near.send_soon(LARGE)
        await loops.until(lambda: near.stats.messages_announced == 2, "two announcements")
        for qp in queue_pairs:
            qp.allowed = 0
        receiving = loops.create_task(far.recv())
        await loops.sleep(1)
        assert len(far._receiver._landings) == 2
        far.abort()
        for qp in queue_pairs:
            qp.allowed = None
        with pytest.raises(LocalClosed):
            await receiving


async def test_memory_that_is_not_used_is_released(simulation: Simulation) -> None:
    async with message_streams(simulation.far, OPTIONS) as (near, far):
        for _ in range(3):
            near.send_soon(LARGE)
            assert await far.recv() == LARGE
        assert far.stats.bytes_pooled == len(LARGE)
        await loops.sleep(2 * IDLE_SECONDS + 1)
        assert far.stats.bytes_pooled == 0
        near.send_soon(LARGE)
        assert await far.recv() == LARGE


async def test_a_pool_keeps_the_latest_regions_up_to_its_limit(simulation: Simulation) -> None:
    options = MessageOptions(max_pooled=3 << 13)
    async with message_streams(simulation.far, options) as (near, far):
        for size in (1 << 13, 1 << 14, 1 << 16, 1 << 13):
            near.send_soon(bytes(size))
            assert len(await far.recv()) == size
        assert far.stats.bytes_pooled == 1 << 13
        near.send_soon(bytes(1 << 14))
        assert len(await far.recv()) == 1 << 14
        assert far.stats.bytes_pooled == 3 << 13


async def test_a_receive_buffer_is_not_released_while_a_slice_of_it_exists(
    simulation: Simulation,
) -> None:
    async with message_streams(simulation.far, OPTIONS) as (near, far):
        for number in range(2 * OPTIONS.window):
            await near.send(b"%03d" % number)
            message = await far.recv_message()
            part = message.frames[0][1:]
            for _ in range(2):
                with pytest.raises(BufferError, match="still in use"):
                    message.release()
            assert bytes(part) == b"%02d" % (number % 100)
            part.release()
            message.release()
            message.release()


async def test_memory_is_not_used_again_while_a_slice_of_it_exists(simulation: Simulation) -> None:
    async with message_streams(simulation.far, OPTIONS) as (near, far):
        parts = []
        for number in range(4):
            near.send_soon(bytes([number]) * len(LARGE))
            with await far.recv_message() as message:
                parts.append(message.frames[0][1:5])
        assert [bytes(part) for part in parts] == [bytes([number] * 4) for number in range(4)]


@pytest.mark.parametrize("size", [3, len(LARGE)])
async def test_frames_are_sent_back_from_the_memory_in_which_they_arrived(
    simulation: Simulation, size: int
) -> None:
    async with message_streams(simulation.far, OPTIONS) as (near, far):

        async def echo() -> None:
            async with contextlib.aclosing(far):
                while True:
                    with await far.recv_message() as message:
                        await far.send(message.frames)

        echoing = loops.create_task(echo())
        for number in range(10):
            near.send_soon([LARGE[:size], bytes([number])])
            with await near.recv_message() as message:
                assert [bytes(frame) for frame in message.frames] == [LARGE[:size], bytes([number])]
        await loops.cancel(echoing)


async def test_a_message_that_is_dropped_returns_its_credit(simulation: Simulation) -> None:
    async with message_streams(simulation.far, OPTIONS) as (near, far):
        for _ in range(3 * OPTIONS.window):
            await near.send(b"small")
            assert (await far.recv_message()).nbytes == 5
            await loops.sleep(0.01)


async def test_memory_of_the_user_stays_registered_until_the_peer_has_read_it(
    simulation: Simulation,
) -> None:
    """The region is closed while the peer may still read it: its sender was cancelled."""
    async with message_streams(simulation.far, OPTIONS) as (near, far):
        region = await near.register(bytearray(LARGE), AccessFlags.REMOTE_READ)
        sending = loops.create_task(near.send(region))
        await loops.sleep(1)
        await loops.cancel(sending)
        closing = loops.create_task(region.aclose())
        await loops.sleep(1)
        assert not closing.done()
        assert await far.recv() == LARGE
        await closing


async def test_memory_that_was_closed_is_refused(simulation: Simulation) -> None:
    async with message_streams(simulation.far, OPTIONS) as (near, far):
        good = await near.register(bytearray(LARGE), AccessFlags.REMOTE_READ)
        region = await near.register(bytearray(LARGE), AccessFlags.REMOTE_READ)
        await region.aclose()
        with pytest.raises(ValueError, match="closed"):
            await near.send([good, region])
        await good.aclose()
        await near.send(b"next")
        assert await far.recv() == b"next"


async def test_a_message_that_is_prepared_when_the_sending_side_is_ended(
    simulation: Simulation,
) -> None:
    async with message_streams(simulation.far, OPTIONS) as (near, far):
        simulation.world.calls.delay("ibv_reg_mr", before=1)
        sending = await loops.start(near.send(LARGE))
        await near.send_eof()
        with pytest.raises(LocalClosed, match="sending side"):
            await sending
        assert [message async for message in far] == []
        assert near._exchange.is_idle


async def test_the_peer_notices_that_nothing_more_is_sent(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No memory is left for the copy of a wire message: no task of this side may notice it."""
    async with message_streams(simulation.far, OPTIONS) as (near, far):
        receiving = [loops.create_task(side.recv()) for side in (near, far)]
        await loops.sleep(1)
        exchange = near._exchange
        failure = VerbsError(errno.ENOMEM, "ibv_reg_mr")
        monkeypatch.setattr(exchange.connection, "send", Mock(side_effect=failure), raising=False)
        exchange._outbox.controls.append(exchange.protocol.credit_update())
        exchange._must_post = True
        exchange._see_to_rest()
        with pytest.raises(VerbsError, match="ibv_reg_mr"):
            await receiving[0]
        with pytest.raises(PeerClosed):
            await receiving[1]


async def test_a_wire_message_that_is_left_is_posted_while_the_background_task_waits(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That task waits for the peer to read a message of send_soon()."""
    async with message_streams(simulation.far, OPTIONS) as (near, far):
        near.send_soon(LARGE)
        sending = loops.create_task(far.send(LARGE))
        await loops.sleep(1)
        exchange = near._exchange
        assert exchange._has_background_task
        assert exchange._is_pulling
        post_now, results = exchange._post_now, [True]  # as while the core collects requests
        monkeypatch.setattr(exchange, "_post_now", lambda: results.pop() if results else post_now())
        exchange._outbox.controls.append(exchange.protocol.credit_update())
        with await near.recv_message():
            await sending


async def test_an_exception_of_progress_is_raised_as_it_is(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "PIECE", len(LARGE) // 4)
    async with message_streams(simulation.far, OPTIONS) as (near, far):
        near.send_soon(LARGE)
        fail = Mock(side_effect=KeyError("of the user"))
        with pytest.raises(KeyError, match="of the user"):
            await far.recv_into(bytearray(len(LARGE)), progress=fail)


async def test_an_empty_buffer_for_a_frame_of_one_byte_is_refused(simulation: Simulation) -> None:
    async with message_streams(simulation.far, OPTIONS) as (near, far):
        near.send_soon([b"x", LARGE])
        with pytest.raises(ValueError, match="a frame of 1 bytes does not fit into 0"):
            await far.recv_frames(lambda sizes: [bytearray(), bytearray(len(LARGE))])
        assert await far.recv() == b"x" + LARGE
