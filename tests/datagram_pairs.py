"""Two datagram endpoints on one device."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import loops

import aiordma
from aiordma import DatagramEndpoint, DatagramOptions, DatagramPeer
from aiordma.rdmacm import DeviceAddress

DEFAULT = DatagramOptions()


@contextlib.asynccontextmanager
async def two_endpoints(
    address: DeviceAddress, near: DatagramOptions = DEFAULT, far: DatagramOptions = DEFAULT
) -> AsyncIterator[tuple[DatagramEndpoint, DatagramEndpoint]]:
    """Yield an endpoint, and another one that listens."""
    async with (
        aiordma.open_datagram((address.host, 0), options=near) as one,
        aiordma.open_datagram((address.host, 0), options=far) as other,
    ):
        other.listen()
        yield one, other


@contextlib.asynccontextmanager
async def endpoints(
    address: DeviceAddress, near: DatagramOptions = DEFAULT, far: DatagramOptions = DEFAULT
) -> AsyncIterator[tuple[DatagramEndpoint, DatagramEndpoint, DatagramPeer]]:
    """Yield an endpoint, a second one that serves, and the second one as a peer."""
    async with two_endpoints(address, near, far) as (one, other):
        serving = loops.create_task(other.serve(b"welcome"))
        peer = await one.resolve(*other.local_address)
        try:
            yield one, other, peer
        finally:
            await other.aclose()
            await serving
