"""The self-test of a device: a connection of this process to itself, through the device."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Sequence

from aiordma.doctor.finding import Finding, ok, problem, warning
from aiordma.errors import RdmaError
from aiordma.messages.connect import connect, listen
from aiordma.messages.connection import Connection
from aiordma.rdmacm import DeviceAddress

ROUND_TRIPS = 20


async def self_tests(
    devices: Sequence[str], addresses: Sequence[DeviceAddress], seconds: float
) -> AsyncIterator[Finding]:
    """Connect each device to itself at its first address, and exchange messages.

    `addresses` are those of active ports. The test of a device takes at most `seconds`.
    """
    firsts = {address.device: address for address in reversed(addresses)}
    for device in devices:
        if device in firsts:
            yield await _self_test(firsts[device], seconds)
        else:
            text = "not made, because no active port of the device has an IP address"
            yield warning(f"{device} self-test", text, "mend its ports first")


async def _self_test(address: DeviceAddress, seconds: float) -> Finding:
    subject = f"{address.device} self-test"
    where = f"through {address.host}"
    try:
        async with asyncio.timeout(seconds):
            median = await _exchange(address.host)
    except TimeoutError:
        mend = "look at the port above, and at the machine's firewall (UDP port 4791 for RoCE v2)"
        return problem(subject, f"no answer {where} within {seconds:g} s", mend)
    except (RdmaError, OSError, ValueError) as error:
        return problem(subject, f"failed {where}: {error}", "mend the problems above first")
    text = f"{ROUND_TRIPS} messages there and back {where}, each in {median * 1e6:.0f} us (median)"
    return ok(subject, text)


async def _exchange(host: str) -> float:
    """Return the median of the round-trip times, in seconds."""
    times = []
    async with listen(host, 0) as listener:
        serving = asyncio.create_task(listener.serve(_echo))
        try:
            async with connect(*listener.local_address) as connection:
                for number in range(ROUND_TRIPS):
                    message = number.to_bytes(64, "big")
                    began = time.perf_counter()
                    await connection.send(message)
                    if await connection.recv() != message:
                        raise RdmaError("a message came back changed")
                    times.append(time.perf_counter() - began)
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
    return statistics.median(times)


async def _echo(connection: Connection) -> None:
    async for message in connection:
        await connection.send(message)
