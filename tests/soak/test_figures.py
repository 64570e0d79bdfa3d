"""The figures of docs/security.md and docs/transports.md that no other campaign prints.

They are the cost of a protection domain for each connection, and the time until a peer that lost
its power is noticed. Memory is what the kernel has locked for the process (VmPin), and the objects
that the kernel counts, which do not vary from round to round.
"""

from __future__ import annotations

import asyncio
import re
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import machine
import pytest
from helpers import TIME_LIMIT, connected
from netlink import rdma_resources
from silence import queue_pair_of, silent
from streaming import receive_exactly

import aiordma
from aiordma import ByteStream, Connection, ConnectionOptions, PeerTimeout, StreamOptions
from aiordma.rdmacm import DeviceAddress

pytestmark = pytest.mark.asyncio

CONNECTIONS = 40
ROUNDS = 5
COPIED = bytes(4000)
"""A message that does not fit inline, so that each end uses its memory for copies."""

End = Connection | ByteStream


def pinned_bytes() -> int:
    """Return the memory that the kernel has locked for devices that this process uses."""
    found = re.search(r"VmPin:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def counts(address: DeviceAddress) -> dict[str, int]:
    """Return the number of protection domains and memory regions of a device."""
    found = rdma_resources()[address.device]
    return {kind: found[kind] for kind in ("pd", "mr")}


@dataclass
class Cost:
    """The cost of connections, in seconds each, and of one end, in bytes and objects."""

    connecting: list[float] = field(default_factory=list)
    closing: list[float] = field(default_factory=list)
    pinned: set[int] = field(default_factory=set)
    objects: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        connecting, closing = map(statistics.median, (self.connecting, self.closing))
        pinned = " or ".join(str(each >> 10) for each in sorted(self.pinned))
        objects = ", ".join(f"{number:.1f} {kind}" for kind, number in self.objects.items())
        return (
            f"connect and accept {connecting * 1e3:.1f} ms, close {closing * 1e3:.1f} ms, "
            f"one end: {pinned} KiB locked, {objects}"
        )


async def measure(
    address: DeviceAddress, cost: Cost, pair: Callable[[], Awaitable[tuple[End, End]]]
) -> None:
    """Make connections, let both ends send, and close them."""
    pinned, before = pinned_bytes(), counts(address)
    begin = time.perf_counter()
    ends = [end for _ in range(CONNECTIONS) for end in await pair()]
    cost.connecting.append((time.perf_counter() - begin) / CONNECTIONS)
    for near, far in zip(ends[::2], ends[1::2], strict=True):
        for sender, receiver in ((near, far), (far, near)):
            await sender.send(COPIED)
            if isinstance(receiver, ByteStream):
                await receive_exactly(receiver, len(COPIED))
            else:
                assert len(await receiver.recv()) == len(COPIED)
    cost.pinned.add((pinned_bytes() - pinned) // len(ends))
    after = counts(address)
    cost.objects = {kind: (after[kind] - before[kind]) / len(ends) for kind in after}
    begin = time.perf_counter()
    for end in ends:
        await end.aclose()
    cost.closing.append((time.perf_counter() - begin) / CONNECTIONS)


async def compare(
    address: DeviceAddress,
    measured: Callable[[Cost, bool], Awaitable[None]],
    capsys: pytest.CaptureFixture[str],
    what: str,
) -> None:
    """Measure without and with a protection domain of each connection, in turn."""
    costs = {False: Cost(), True: Cost()}
    await measured(Cost(), False)  # what exists once for the process
    for _ in range(ROUNDS):
        for is_own, cost in costs.items():
            await measured(cost, is_own)
    with capsys.disabled():
        print(f"\n{what}, {address.device}\n  shared: {costs[False]}\n  own:    {costs[True]}")
    # Without the option, one protection domain is for all of them.
    assert costs[False].objects["pd"] <= 1 / CONNECTIONS
    assert 1 <= costs[True].objects["pd"] <= 1 + 1 / CONNECTIONS
    assert min(costs[True].pinned) >= min(costs[False].pinned)


@pytest.mark.parametrize("device", machine.one_per_device(), ids=lambda found: found.device)
async def test_the_cost_of_protection_domains_of_message_connections(
    device: DeviceAddress, capsys: pytest.CaptureFixture[str]
) -> None:
    async def measured(cost: Cost, is_own: bool) -> None:
        options = ConnectionOptions(own_protection_domain=is_own)
        async with aiordma.listen(device.host, 0, options=options) as listener:

            async def pair() -> tuple[End, End]:
                accepting = asyncio.create_task(listener.accept())
                near = await aiordma.connect(*listener.local_address, options=options)
                return near, await accepting

            await measure(device, cost, pair)

    await compare(device, measured, capsys, "messages")


@pytest.mark.parametrize("device", machine.one_per_device(), ids=lambda found: found.device)
async def test_the_cost_of_protection_domains_of_byte_streams(
    device: DeviceAddress, capsys: pytest.CaptureFixture[str]
) -> None:
    async def measured(cost: Cost, is_own: bool) -> None:
        options = StreamOptions(own_protection_domain=is_own)
        async with aiordma.listen_stream(device.host, 0, options=options) as listener:

            async def pair() -> tuple[End, End]:
                accepting = asyncio.create_task(listener.accept())
                near = await aiordma.connect_stream(*listener.local_address, options=options)
                return near, await accepting

            await measure(device, cost, pair)

    await compare(device, measured, capsys, "byte streams")


@pytest.mark.transport("IB")
@pytest.mark.parametrize("ack_timeout", [None, 16])
async def test_the_time_until_a_send_notices_that_the_peer_lost_power(
    address: DeviceAddress, ack_timeout: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ConnectionOptions(ack_timeout=ack_timeout)
    async with connected(address, options, options) as pair:
        await pair.client.send(b"ping")
        assert await pair.server.recv() == b"ping"
        with silent(address, queue_pair_of(pair.server)):
            begin = time.perf_counter()
            await pair.client.send(b"unanswered")
            with pytest.raises(PeerTimeout):
                async with asyncio.timeout(TIME_LIMIT):
                    await pair.client.recv()
            seconds = time.perf_counter() - begin
    with capsys.disabled():
        print(f"\n{address.device}, ack_timeout={ack_timeout}: noticed after {seconds:.1f} s")
