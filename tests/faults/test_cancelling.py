"""Calls of connect and accept that are cancelled at random moments. They leak nothing.

Time is the subject: delays select the moments of the cancellations. The fixture `no_leaks` counts
ids, queue pairs, memory regions and descriptors around each test. tests/device/test_cancel_*.py
cancels each await at a known moment; make soak cancels all of them at random.
"""

from __future__ import annotations

import contextlib
import random

import loops
import pytest
from cancelling import cancelled

import aiordma
from aiordma import ConnectionOptions
from aiordma.rdmacm import DeviceAddress

ROUNDS, AT_ONCE = 40, 10
SMALL = ConnectionOptions(send_depth=4, recv_depth=4, max_message_size=4096)


@pytest.mark.parametrize("side", ["connect", "accept"])
async def test_calls_cancelled_at_random_moments_leak_nothing(
    address: DeviceAddress, side: str
) -> None:
    """In the first rounds the loop runs only some iterations before: nothing has completed."""
    chance = random.Random(side)
    async with aiordma.listen(address.host, 0, options=SMALL) as listener:

        async def call(side: str) -> None:
            with contextlib.suppress(aiordma.RdmaError):
                if side == "connect":
                    connection = await aiordma.connect(*listener.local_address, options=SMALL)
                else:
                    connection = await listener.accept()
                await connection.aclose()

        count = 0
        for number in range(ROUNDS):
            peer = loops.create_task(call("accept" if side == "connect" else "connect"))
            seconds = 0.0 if number < AT_ONCE else chance.uniform(0, 0.08)
            count += await cancelled(lambda: call(side), seconds=seconds)
            peer.cancel()
            await loops.wait([peer])
    assert count >= AT_ONCE // 2
