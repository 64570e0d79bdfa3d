"""The ids of a simulation at each step: resolved, requested, connected. For tests of ids."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import loops

from aiordma.cm import AsyncCmId
from aiordma.cm.base_id import BaseCmId
from aiordma.enums import PortSpace
from aiordma.rdmacm import ConnectionParameters, SocketAddress, parse_address
from aiordma.verbs import QueuePairCaps, QueuePairInit
from simulator.simulation import Simulation

PORT = 7471
SMALL = QueuePairInit(QueuePairCaps(max_send_wr=4, max_recv_wr=4))


def target(simulation: Simulation, port: int = PORT) -> SocketAddress:
    """Return an address of the far device."""
    return parse_address(simulation.far.host, port)


async def resolved(
    simulation: Simulation, port_space: PortSpace = PortSpace.TCP, port: int = PORT
) -> AsyncCmId:
    """Return an id with a route to the far device."""
    cm_id = await AsyncCmId.create(port_space)
    await cm_id.resolve_addr(target(simulation, port))
    await cm_id.resolve_route()
    return cm_id


async def connect(cm_id: BaseCmId, private_data: bytes = b"") -> None:
    """Make a queue pair and connect."""
    await cm_id.connect(ConnectionParameters(private_data), lambda: make_qp(cm_id))


async def accept(cm_id: BaseCmId, private_data: bytes = b"") -> None:
    """Make a queue pair and accept."""
    await cm_id.accept(ConnectionParameters(private_data), lambda: make_qp(cm_id))


def make_qp(cm_id: BaseCmId) -> None:
    """Make a small queue pair, with completion queues of its own. Called in a worker thread."""
    cm_id.make_qp(SMALL)


async def send_one(active: BaseCmId, passive: BaseCmId) -> None:
    """Send a message of 16 bytes. Its completion is in the receive queue of `passive`."""
    sent, received = await active.reg_read(bytes(16)), await passive.reg_msgs(bytearray(16))
    passive.cm_id.post_recv(7, received, 0, 16)
    active.cm_id.post_send(8, sent, 0, 16)
    await loops.sleep(1)


@asynccontextmanager
async def listening(
    simulation: Simulation, port_space: PortSpace = PortSpace.TCP, backlog: int = 0
) -> AsyncIterator[AsyncCmId]:
    """Make an id that listens at the far device during the block."""
    async with await AsyncCmId.create(port_space) as listener:
        listener.bind_addr(target(simulation))
        listener.listen(backlog)
        yield listener


@dataclass
class Request:
    """An id that connects, and the id of its request."""

    active: AsyncCmId
    passive: AsyncCmId
    connecting: loops.Task[None]


@asynccontextmanager
async def requested(simulation: Simulation, private_data: bytes = b"") -> AsyncIterator[Request]:
    """Make a request that is not answered yet. Close everything after the block."""
    async with listening(simulation) as listener, await resolved(simulation) as active:
        connecting = loops.create_task(connect(active, private_data))
        async with await listener.get_request() as passive:
            yield Request(active, passive, connecting)
        active.abort()
        await loops.wait([connecting])


@asynccontextmanager
async def connected(simulation: Simulation) -> AsyncIterator[tuple[AsyncCmId, AsyncCmId]]:
    """Connect two ids during the block: the active one and the passive one."""
    async with requested(simulation) as request:
        await accept(request.passive)
        await request.connecting
        yield request.active, request.passive
