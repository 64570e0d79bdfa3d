"""Asking a peer for its queue pair: the kernel's SIDR exchange."""

from __future__ import annotations

from aiordma.cm import AsyncCmId
from aiordma.datagrams.datagram_queue_pair import DatagramEngine
from aiordma.datagrams.peer import DatagramPeer
from aiordma.rdmacm import ConnectionParameters, SocketAddress


async def resolve_peer(
    engine: DatagramEngine, destination: SocketAddress, private_data: bytes
) -> DatagramPeer:
    """The peer that serves at `destination`, as it answers. See DatagramEndpoint.resolve."""
    cm = await engine.other_id()
    try:
        peer = await _ask(cm, engine, destination, private_data)
    except Exception:
        await cm.aclose()  # nothing of a failed attempt is left when its error arrives
        raise
    finally:
        cm.abort()
    return peer


async def _ask(
    cm: AsyncCmId, engine: DatagramEngine, destination: SocketAddress, private_data: bytes
) -> DatagramPeer:
    timeout = engine.options.resolve_timeout
    await cm.resolve_addr(destination, source=engine.source, timeout=timeout)
    await cm.resolve_route(timeout=timeout)
    # Without a queue pair of its own, the id speaks for the number given here.
    await cm.connect(ConnectionParameters(private_data, qp_num=engine.qp.number))
    assert cm.established is not None
    return DatagramPeer.answering(destination.pair, cm.established)
