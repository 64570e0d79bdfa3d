"""Calls of connect, accept, send and recv that are cancelled again and again. They leak nothing.

Time is the subject: delays select the moments of the cancellations. Each assertion holds at any
moment.

The fixture `no_leaks` counts ids, queue pairs, memory regions and descriptors around each test.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from functools import partial

import loops
import pytest
from helpers import TIME_LIMIT, connected

import aiordma
from aiordma import Connection, ConnectionOptions
from aiordma.rdmacm import DeviceAddress

ROUNDS = 40
SMALL = ConnectionOptions(send_depth=4, recv_depth=4, max_message_size=4096)


async def cancel_after(start: Callable[[], Awaitable[object]], delay: float) -> bool:
    """Start an await and cancel it after `delay` seconds. Return True if it was cancelled."""
    task = loops.create_task(start())
    await loops.sleep(delay)
    task.cancel()
    await loops.wait([task])
    if not task.cancelled() and task.exception() is None:
        result = task.result()
        if isinstance(result, Connection):
            await result.aclose()
    return task.cancelled()


def delays(seed: int, longest: float, zeros: int = 5) -> list[float]:
    """Return ROUNDS delays in seconds: first `zeros` zeros, then random ones up to `longest`.

    After a delay of zero nothing has completed yet: the loop has run one iteration only.
    """
    chance = random.Random(seed)
    return [0.0] * zeros + [chance.uniform(0, longest) for _ in range(ROUNDS - zeros)]


async def test_cancelled_connects_leak_nothing(address: DeviceAddress) -> None:
    async def connect_once(where: tuple[str, int]) -> Connection:
        return await aiordma.connect(*where, options=SMALL)

    async def receive_until_closed(connection: Connection) -> None:
        async for _ in connection:
            pass

    cancelled = 0
    async with aiordma.listen(address.host, 0, options=SMALL) as listener:
        serving = loops.create_task(listener.serve(receive_until_closed))
        where = listener.local_address
        for delay in delays(1, 0.08, ROUNDS // 4 + 1):
            cancelled += await cancel_after(lambda: connect_once(where), delay)
        await listener.aclose()
        await serving
    assert cancelled > ROUNDS // 4


async def test_cancelled_accepts_leak_nothing(address: DeviceAddress) -> None:
    cancelled = 0
    async with aiordma.listen(address.host, 0, options=SMALL) as listener:
        for delay in delays(2, 0.05, ROUNDS // 8 + 1):
            connecting = loops.create_task(open_one(listener.local_address))
            request = await listener.get_request()
            cancelled += await cancel_after(request.accept, delay)
            await loops.wait([connecting])
            if connecting.exception() is None:
                await connecting.result().aclose()
    assert cancelled > ROUNDS // 8


async def open_one(where: tuple[str, int]) -> Connection:
    return await aiordma.connect(*where, options=SMALL)


async def test_a_cancelled_get_request_loses_no_request(address: DeviceAddress) -> None:
    async with aiordma.listen(address.host, 0, options=SMALL) as listener:
        for delay in delays(3, 0.05)[:20]:
            connecting = loops.create_task(open_one(listener.local_address))
            waiting = loops.create_task(listener.get_request())
            await loops.sleep(delay)
            waiting.cancel()
            await loops.wait([waiting])
            request = await listener.get_request() if waiting.cancelled() else waiting.result()
            await request.reject()
            await loops.wait([connecting])
            assert isinstance(connecting.exception(), aiordma.Rejected)


@pytest.mark.transport("IB")
async def test_a_cancelled_send_on_a_full_queue_sends_nothing(
    address: DeviceAddress,
) -> None:
    """All other messages arrive, whole and in order."""
    options = ConnectionOptions(
        send_depth=2, recv_depth=2, max_message_size=4096, close_timeout=TIME_LIMIT
    )
    full = loops.make_event()

    async def receive(connection: Connection, into: list[int]) -> None:
        await full.wait()
        async for message in connection:
            number = int.from_bytes(message[:4], "big")
            assert message == number.to_bytes(4, "big") * (len(message) // 4)
            into.append(number)
            await loops.sleep(0.001)  # keeps the queue full for some of the sends

    async with connected(address, options, options) as pair:
        received: list[int] = []
        receiving = loops.create_task(receive(pair.server, received))
        sent = []
        chance = random.Random(4)
        for number in range(ROUNDS):
            message = number.to_bytes(4, "big") * chance.choice([1, 100, 1000])
            if not await cancel_after(partial(pair.client.send, message), chance.uniform(0, 0.002)):
                sent.append(number)
            else:
                full.set()
        assert full.is_set(), "no send had to wait"
        await pair.client.aclose()
        await receiving
    # A send that is cancelled before its message is posted sends nothing.
    assert received == sent


async def test_a_cancelled_recv_loses_no_message(address: DeviceAddress) -> None:
    collected: list[bytes] = []

    async def collect(connection: Connection) -> None:
        chance = random.Random(5)
        rounds = cancelled = 0
        while rounds < ROUNDS or len(collected) <= ROUNDS // 8:
            rounds += 1
            task = loops.create_task(connection.recv())
            # Longer after each cancellation: some calls end before theirs, on any machine.
            await loops.sleep(chance.uniform(0, 0.003 * (1 + cancelled)))
            task.cancel()
            await loops.wait([task])
            cancelled += 1
            if not task.cancelled():
                collected.append(task.result())
                cancelled = 0

    async with connected(address, SMALL, SMALL) as pair:
        collecting = loops.create_task(collect(pair.server))
        count = 0
        while not collecting.done():
            # Never send more than the peer has receives posted: iWARP would end the connection.
            if count - len(collected) < SMALL.recv_depth:
                await pair.client.send(b"%d" % count)
                count += 1
            await loops.sleep(0.002)  # paces the messages
        await collecting
        await pair.client.aclose()
        collected += [message async for message in pair.server]
    assert collected == [b"%d" % number for number in range(count)]
    assert count > ROUNDS // 8


async def test_clients_cancelled_at_random_moments_do_not_stop_the_server(
    address: DeviceAddress,
) -> None:
    """Echo clients connect, exchange messages and are cancelled. The server goes on."""
    chance = random.Random(6)

    async def echo(connection: Connection) -> None:
        async for message in connection:
            await connection.send(message)

    async def exchange_messages(where: tuple[str, int]) -> None:
        async with aiordma.connect(*where, options=SMALL) as connection:
            while True:
                await connection.send(b"x" * chance.randrange(4096))
                await connection.recv()

    async with aiordma.listen(address.host, 0, options=SMALL) as listener:
        serving = loops.create_task(listener.serve(echo))
        where = listener.local_address
        for _ in range(6):
            await loops.gather(
                *(
                    cancel_after(lambda: exchange_messages(where), chance.uniform(0, 0.4))
                    for _ in range(6)
                )
            )
        await listener.aclose()
        await serving
