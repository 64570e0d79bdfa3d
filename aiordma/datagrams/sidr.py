"""The SIDR exchange: requests for a queue pair number, of peers and to peers."""

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
    """A peer that wants to send datagrams here: accept it or reject it.

    It is told the endpoint's numbers, no more: nothing keeps a peer that knows them from sending.
    One that is just dropped is rejected, with a ResourceWarning.
    """

    def __init__(self, cm: AsyncCmId, queue_pair: DatagramQueuePair) -> None:
        """For DatagramEndpoint; not to be called by others."""
        self._cm = cm
        self._queue_pair = queue_pair
        self._private_data = cm.event.private_data if cm.event is not None else b""
        self._peer_address = cm.peer_address

    @property
    def peer_address(self) -> tuple[str, int]:
        """`(host, port)` that the peer asks from: not where it can be asked."""
        return self._peer_address

    @property
    def private_data(self) -> bytes:
        """What the peer sent along, padded with zeros to 180 bytes."""
        return self._private_data

    async def accept(self, private_data: bytes = b"") -> None:
        """Tell the peer where to send; it gets up to 136 bytes of `private_data` along.

        Nobody confirms: the answer may be lost, and the peer then asks again. Cancelling does not
        take the answer back. See rdma_accept(3).

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
            self._cm.abort()  # behind the call, also if that is not waited for any more

    async def reject(self, private_data: bytes = b"") -> None:
        """Refuse the peer, who gets Rejected with up to 136 bytes of `private_data`.

        A peer that gave up already is no error. Cancelling does not take the refusal back. See
        rdma_reject(3).

        Raises:
            LocalClosed: the request was answered already.
            ValueError: the private data is too long; the request can still be answered.
        """
        check_private_data(private_data, DATAGRAM_LIMITS.reject)
        try:
            self._cm.check_unanswered()
        except ConnectError as error:
            logger.debug("nobody is there to be refused: %s", error)
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
    """The peer that serves at `destination`, as it answers. See DatagramEndpoint.resolve."""
    cm = await queue_pair.other_id()
    try:
        peer = await _exchange(cm, queue_pair, destination, private_data)
    except Exception:
        await cm.aclose()  # nothing of a failed attempt is left when its error arrives
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
    # Without a queue pair of its own, the id speaks for the number given here.
    await cm.connect(ConnectionParameters(private_data, qp_num=queue_pair.qp.number))
    assert cm.established is not None
    return DatagramPeer.answering(destination.pair, cm.established)
