"""The request of no bytes that shows that the peer's device answers, after other requests."""

from __future__ import annotations

import loops
from helpers import connected
from streaming import streaming

from aiordma import ConnectionOptions, StreamOptions
from aiordma.rdmacm import DeviceAddress

DEPTH = 16


async def test_a_probe_follows_a_full_round_of_the_send_queue(address: DeviceAddress) -> None:
    """On siw, the queue keeps the segments of older requests."""
    options = ConnectionOptions(send_depth=DEPTH, max_inline=0)
    async with connected(address, options, options) as pair:
        for _ in range(2 * DEPTH):
            await pair.client.send(b"not inline")
            await pair.server.recv()
        data_path = pair.client._endpoint.data_path
        assert data_path.probe()
        await loops.until(lambda: data_path.snapshot().sends_posted == 0, "the probe to complete")
        await pair.client.send(b"and more")
        assert await pair.server.recv() == b"and more"


async def test_a_probe_of_a_stream_follows_a_full_round_of_the_send_queue(
    address: DeviceAddress,
) -> None:
    options = StreamOptions(send_depth=DEPTH, max_inline=0)
    async with streaming(address, options, options) as pair:
        for _ in range(2 * DEPTH):
            await pair.client.send(b"not inline")
            await pair.server.receive()
        data_path = pair.client._core.data_path
        assert data_path.probe()
        await loops.until(lambda: not len(data_path.sends), "the probe to complete")
        await pair.client.send(b"and more")
        assert await pair.server.receive() == b"and more"
