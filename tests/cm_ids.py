"""Helpers for tests of ids of both kinds: listening, resolving and connecting, call by call."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar

import loops
import pytest
from helpers import Host

from aiordma import AsyncCmId, PortSpace, SyncCmId
from aiordma.cm import CmState
from aiordma.enums import AccessFlags, QpState, QpType, WcStatus
from aiordma.rdmacm import parse_address
from aiordma.verbs import (
    CompletionChannel,
    CompletionQueue,
    ProtectionDomain,
    QueuePair,
    QueuePairCaps,
    QueuePairInit,
    Registration,
)

MESSAGE_SIZE = 16
CAPS = QueuePairCaps(max_send_wr=4, max_recv_wr=4, max_inline_data=MESSAGE_SIZE)
SMALL = QueuePairInit(CAPS, sq_sig_all=True)

CmId = AsyncCmId | SyncCmId
Kind = type[AsyncCmId] | type[SyncCmId]
K = TypeVar("K", AsyncCmId, SyncCmId, CmId)
both_kinds = pytest.mark.parametrize("kind", [AsyncCmId, SyncCmId])


async def listening(
    address: Host, kind: type[K], port_space: PortSpace = PortSpace.TCP, port: int = 0
) -> K:
    """Return an id that listens."""
    listener = await kind.create(port_space)
    listener.bind_addr(parse_address(address.host, port))
    listener.listen()
    return listener


async def resolved(
    where: tuple[str, int],
    kind: type[K],
    port_space: PortSpace = PortSpace.TCP,
    init: QueuePairInit | None = SMALL,
) -> K:
    """Return an id with a route to an address, and with a queue pair unless `init` is None."""
    client = await kind.create(port_space)
    await client.resolve_addr(parse_address(*where))
    await client.resolve_route()
    if init is not None:
        await client.create_qp(init)
    return client


async def connect(
    client: CmId, listener: K, init: QueuePairInit = SMALL, pd: ProtectionDomain | None = None
) -> K:
    """Connect an id to a listener. Return the id that has accepted, with a queue pair."""
    connecting = loops.create_task(client.connect())
    server = await listener.get_request()
    await server.create_qp(init, pd)
    await server.accept()
    await connecting
    return server


@asynccontextmanager
async def connected(
    address: Host, kind: type[K], init: QueuePairInit = SMALL
) -> AsyncIterator[tuple[K, K]]:
    """Yield the ids of the client and the server of a connection."""
    async with (
        await listening(address, kind) as listener,
        await resolved(listener.local_address, kind, init=init) as client,
        await connect(client, listener, init) as server,
    ):
        yield client, server


class OwnQueuePair:
    """A queue pair that belongs to no id. The user moves it to its states."""

    def __init__(self, cm: CmId) -> None:
        """Make it on the device of an id."""
        self._pd = ProtectionDomain(cm.device())
        self._channel = CompletionChannel(cm.device())
        self._cq = CompletionQueue(self._channel, 16)
        init = QueuePairInit(CAPS, self._cq, self._cq, qp_type=QpType.RC)
        self.qp = QueuePair.create(self._pd, init)
        self._inbox = bytearray(MESSAGE_SIZE)
        self._memory = Registration(self._pd, self._inbox, AccessFlags.LOCAL_WRITE)

    def modify(self, cm: CmId, *states: QpState) -> None:
        """Move the queue pair to these states, with the attributes of the id."""
        for state in states:
            self.qp.modify(cm.init_qp_attr(state))

    async def ask(self, message: bytes) -> bytes:
        """Send a message, and return the answer of the peer, which is as long."""
        self.qp.post_recv(1, self._memory.address, MESSAGE_SIZE, self._memory.lkey)
        self.qp.post_send_inline(2, message)
        statuses: list[int] = []

        def are_completed() -> bool:
            statuses.extend(wc.status for wc in self._cq.poll())
            return len(statuses) == 2

        await loops.until(are_completed, "the message and its answer to arrive")
        assert statuses == [WcStatus.SUCCESS, WcStatus.SUCCESS]
        return bytes(self._inbox[: len(message)])

    def destroy(self) -> None:
        """Destroy the queue pair and what it uses."""
        self.qp.destroy()
        for thing in (self._memory, self._cq, self._channel, self._pd):
            thing.close()


async def exchange(client: CmId, server: CmId) -> None:
    """Send one message through the queues that belong to the ids."""
    memory = bytearray(16)
    inbox, outbox = await server.reg_msgs(memory), await client.reg_msgs(bytearray(b"hello"))
    server.cm_id.post_recv(1, inbox, 0, 16)
    client.cm_id.post_send(2, outbox, 0, 5)
    assert (await client.get_send_comp()).check().wr_id == 2
    assert (await server.get_recv_comp()).check().byte_len == 5
    assert memory[:5] == b"hello"


async def close(*cms: CmId) -> None:
    """Close ids, one after the other, and check their states."""
    for cm in cms:
        await cm.aclose()
        assert cm.state is CmState.CLOSED
