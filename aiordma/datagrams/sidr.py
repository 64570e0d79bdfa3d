"""The SIDR exchange: requests for a queue pair number, from peers and to peers.

SIDR is the service ID resolution protocol of InfiniBand's communication manager.
"""

from __future__ import annotations

import logging

from aiordma.cm import AsyncCmId
from aiordma.datagrams.datagram_queue_pair import DatagramQueuePair
from aiordma.datagrams.peer import DatagramPeer
from aiordma.errors import ConnectError
from aiordma.loop import checkpoint
from aiordma.options import DATAGRAM_LIMITS, check_private_data
from aiordma.rdmacm import ConnectionParameters, SocketAddress

logger = logging.getLogger(__name__)


class DatagramRequest:
    """A peer's request for this endpoint's queue pair number. Accept it or reject it.

    The answer is no permission: a peer that knows the number and the queue key can send without
    asking. A request that is garbage-collected without an answer is rejected, with a
    ResourceWarning.
    """

    def __init__(self, cm: AsyncCmId, queue_pair: DatagramQueuePair) -> None:
        """Called by DatagramEndpoint; not for users."""
        self._cm = cm
        self._queue_pair = queue_pair
        self._private_data = cm.request.private_data if cm.request is not None else b""
        self._peer_address = cm.peer_address

    @property
    def peer_address(self) -> tuple[str, int]:
        """`(host, port)` that the peer sent the request from. resolve() does not find it there."""
        return self._peer_address

    @property
    def private_data(self) -> bytes:
        """The private data of the request, padded with zeros to 180 bytes."""
        return self._private_data

    async def accept(self, private_data: bytes = b"") -> None:
        """Send the peer the queue pair number, with up to 136 bytes of `private_data`.

        The peer does not confirm the answer. If the answer is lost, the peer asks again. Cancelling
        does not take the answer back. See rdma_accept(3).

        Raises:
            ConnectError: the peer gave up.
            LocalClosed: the request was answered already.
            ValueError: the private data is too long; the request can still be answered.
        """
        self._cm.check_unanswered()
        check_private_data(private_data, DATAGRAM_LIMITS.accept)
        qp_num = self._queue_pair.qp.number
        try:
            await self._cm.accept(ConnectionParameters(private_data, qp_num=qp_num))
        finally:
            self._cm.abort()  # runs after the call, even if this task is cancelled

    async def reject(self, private_data: bytes = b"") -> None:
        """Reject the request. The peer gets Rejected, with up to 136 bytes of `private_data`.

        Does nothing if the peer gave up already. Cancelling does not take the rejection back. See
        rdma_reject(3).

        Raises:
            LocalClosed: the request was answered already.
            ValueError: the private data is too long; the request can still be answered.
        """
        try:
            self._cm.check_unanswered()
        except ConnectError as error:
            logger.debug("the peer to be rejected has given up: %s", error)
            await checkpoint()
            return
        self._cm.reject(private_data)
        await self._cm.aclose()

    def __repr__(self) -> str:
        host, port = self._peer_address
        return f"<DatagramRequest from {host} port {port}>"


async def resolve_peer(
    queue_pair: DatagramQueuePair, destination: SocketAddress, private_data: bytes
) -> DatagramPeer:
    """Ask for the endpoint at `destination` and return it. See DatagramEndpoint.resolve."""
    cm = await queue_pair.create_id()
    try:
        peer = await _exchange(cm, queue_pair, destination, private_data)
    except Exception:
        await cm.aclose()  # so that nothing of a failed attempt is left when this raises
        raise
    finally:
        cm.abort()
    return peer


async def _exchange(
    cm: AsyncCmId, queue_pair: DatagramQueuePair, destination: SocketAddress, private_data: bytes
) -> DatagramPeer:
    timeout = queue_pair.options.resolve_timeout
    await cm.resolve_addr(destination, source=queue_pair.source, timeout=timeout)
    await cm.resolve_route(timeout=timeout)
    # The id has no queue pair, so it sends the number that is given here.
    await cm.connect(ConnectionParameters(private_data, qp_num=queue_pair.qp.number))
    assert cm.established is not None
    return DatagramPeer.from_event(destination.pair, cm.established)
