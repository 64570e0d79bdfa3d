"""open_datagram() and DatagramEndpoint: unconnected datagrams and multicast."""

from __future__ import annotations

import ipaddress
import logging
import warnings
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import TYPE_CHECKING

from aiordma.cm import AsyncCmId, close_after
from aiordma.cm.resolving import is_loopback, resolve_host, try_addresses
from aiordma.datagrams import (
    Datagram,
    DatagramOptions,
    DatagramPeer,
    DatagramQueuePair,
    DatagramRequest,
    MulticastGroup,
)
from aiordma.datagrams.multicast_groups import MulticastGroups
from aiordma.datagrams.sidr import resolve_peer
from aiordma.enums import PortSpace
from aiordma.errors import AddressError, ConnectError, LocalClosed, VerbsError
from aiordma.loop import running_loop
from aiordma.loop.context_managers import AbortingContextManagerMixin, AwaitableContextManager
from aiordma.options import DATAGRAM_LIMITS, check_private_data
from aiordma.rdmacm import SocketAddress, parse_address
from aiordma.verbs.queue_pair import NO_IMMEDIATE, checked_immediate

if TYPE_CHECKING:
    from typing_extensions import Buffer

logger = logging.getLogger(__name__)

DEFAULT_OPTIONS = DatagramOptions()


def open_datagram(
    local_address: tuple[str, int], *, options: DatagramOptions = DEFAULT_OPTIONS
) -> AwaitableContextManager[DatagramEndpoint]:
    """Open an endpoint: `await open_datagram(...)` or `async with open_datagram(...) as endpoint`.

    `local_address` is `(host, port)`: the name or address of an RDMA device of this machine, and
    the port where peers can resolve the endpoint. Port 0 picks a free one. A datagram endpoint
    belongs to one device, so wildcard addresses are not possible. iWARP has no datagrams.

    Cancelling leaves nothing behind. See rdma_bind_addr(3), rdma_create_qp(3).

    Raises:
        AddressError: the name is unknown, or it is not the name of one RDMA device.
        VerbsError: EADDRINUSE or EADDRNOTAVAIL when the port is in use or the address does not
            belong to this machine; ENODEV when no RDMA device has the address; EOPNOTSUPP when the
            device has no datagrams; ENOMEM when no more memory can be locked.
        ValueError: an option exceeds a limit of the device.
    """
    return AwaitableContextManager(_open(local_address, options))


async def _open(local_address: tuple[str, int], options: DatagramOptions) -> DatagramEndpoint:
    addresses = await resolve_host(running_loop(), *local_address)
    for address in addresses[:-1]:
        with suppress(VerbsError, AddressError):
            return await _open_at(address, options)
    return await _open_at(addresses[-1], options)


async def _open_at(address: SocketAddress, options: DatagramOptions) -> DatagramEndpoint:
    if is_loopback(address) or ipaddress.ip_address(address.host).is_unspecified:
        raise AddressError(
            f"{address.host} is not the address of one RDMA device, which a datagram endpoint "
            "needs: see `python -m aiordma devices` for addresses"
        )
    cm = await AsyncCmId.create(PortSpace.UDP)
    try:
        cm.bind_addr(address)
        queue_pair = DatagramQueuePair(cm, options)
        await queue_pair.open()
    except BaseException as error:
        await close_after(cm, error)
        raise
    return DatagramEndpoint(queue_pair)


class DatagramEndpoint(AbortingContextManagerMixin):
    """An endpoint that sends and receives datagrams (an RDMA queue pair of type UD).

    `open_datagram()` returns one. A datagram arrives whole or not at all. Datagrams can be lost,
    duplicated or reordered. Close the endpoint with `aclose()`, or by leaving the `async with`
    block it was opened in. An open endpoint that is garbage-collected is aborted, with a
    ResourceWarning.

    One task can receive at a time; any number of tasks can send. The endpoint belongs to the event
    loop it was created on.
    """

    def __init__(self, queue_pair: DatagramQueuePair) -> None:
        """Called by open_datagram(); not for users."""
        self._queue_pair = queue_pair
        self._groups = MulticastGroups(queue_pair)
        self._local_address = queue_pair.cm.local_address

    @property
    def local_address(self) -> tuple[str, int]:
        """`(host, port)` where peers can resolve the endpoint, once it listens."""
        return self._local_address

    @property
    def qp_num(self) -> int:
        """The number of the queue pair, which peers send to."""
        return self._queue_pair.qp.number

    @property
    def max_message_size(self) -> int:
        """The size of the largest datagram that send_to() accepts, in bytes."""
        return self._queue_pair.max_message_size

    @property
    def closed(self) -> bool:
        """True if the endpoint has ended.

        Datagrams that arrived before can still be received, unless it was closed on this side.
        """
        return self._queue_pair.closed

    # --- peers ---

    async def resolve(self, host: str, port: int, private_data: bytes = b"") -> DatagramPeer:
        """Ask the machine at `host` for the datagram endpoint at `port`. Return a peer to send to.

        The addresses of a name are tried one after another. The request carries up to 180 bytes of
        `private_data` to the peer; the answer carries the peer's private data back.

        Cancelling leaves nothing behind. If the machine does not answer, this takes about a minute.
        See rdma_resolve_addr(3), rdma_resolve_route(3), rdma_connect(3).

        Raises:
            AddressError: the name is unknown, or no route leads there from the endpoint's device.
            RouteError: no route was found.
            Rejected: no endpoint listens there (status 1), or the application refused (status 2).
            Unreachable: the machine did not answer.
            LocalClosed, DeviceRemoved, WorkRequestError: the endpoint has ended.
            ValueError: the private data is too long.
        """
        self._queue_pair.check_open()
        check_private_data(private_data, DATAGRAM_LIMITS.connect)
        family = self._queue_pair.source.family
        found = await resolve_host(running_loop(), host, port)
        return await try_addresses(
            [address for address in found if address.family == family],
            lambda address: resolve_peer(self._queue_pair, address, private_data),
            (host, port),
        )

    def listen(self, backlog: int = 0) -> None:
        """Let peers resolve this endpoint. get_request() returns each request; serve() accepts all.

        At most `backlog` requests wait for an answer (0: the `backlog` of the options); further
        ones are rejected. See rdma_listen(3).

        Raises:
            VerbsError: EADDRINUSE or EADDRNOTAVAIL (the port is in use).
            RdmaError: the endpoint listens already.
            LocalClosed, DeviceRemoved, WorkRequestError: the endpoint has ended.
        """
        self._queue_pair.listen(backlog)

    async def get_request(self) -> DatagramRequest:
        """Wait for the next request of a peer, after listen().

        Cancelling loses no request.

        Raises:
            RdmaError: the endpoint does not listen.
            BusyError: another task is waiting for requests.
            LocalClosed, DeviceRemoved, WorkRequestError: the endpoint has ended.
        """
        return DatagramRequest(await self._queue_pair.get_request(), self._queue_pair)

    async def serve(self, private_data: bytes = b"") -> None:
        """Accept all requests, with `private_data`, until the endpoint is closed.

        Calls listen() first unless the endpoint listens already. Cancelling stops accepting, not
        listening.

        Raises: as get_request(), except for LocalClosed.
        """
        check_private_data(private_data, DATAGRAM_LIMITS.accept)
        with suppress(LocalClosed):
            if not self._queue_pair.is_listening:
                self._queue_pair.listen(0)
            while True:
                request = await self.get_request()
                try:
                    await request.accept(private_data)
                except ConnectError as error:
                    logger.info("%r could not be accepted: %s", request, error)

    # --- groups ---

    async def join(self, group: str, *, send_only: bool = False) -> MulticastGroup:
        """Join a multicast group, given by its IP address, to send to it and to receive from it.

        With `send_only`, nothing is received from it. An endpoint can join many groups, but each
        only once. RoCE has IPv4 groups only. Cancelling leaves nothing behind.
        See rdma_join_multicast(3), rdma_join_multicast_ex(3), ibv_attach_mcast(3).

        Raises:
            ValueError: `group` is not the address of a multicast group.
            ConnectError: the subnet manager refused.
            VerbsError: 524 (the device does not support such groups), ENOMEM (too many groups).
            RdmaError: the endpoint is in the group already.
            LocalClosed, DeviceRemoved, WorkRequestError: the endpoint has ended.
        """
        return await self._groups.join(_group_address(group), send_only)

    async def leave(self, group: MulticastGroup | str) -> None:
        """Leave a group: `group` is the result of join(), or the group's address.

        Leaving a MulticastGroup again does nothing. Cancelling stops only the waiting: the group
        is left all the same. See rdma_leave_multicast(3).

        Raises:
            RdmaError: the endpoint is not in the group with that address.
        """
        if isinstance(group, str):
            group = self._groups.find(_group_address(group).host)
        await group.leave()

    # --- datagrams ---

    async def send_to(
        self,
        target: DatagramPeer | MulticastGroup,
        data: Buffer | list[Buffer] | tuple[Buffer, ...],
        *,
        imm: int | None = None,
    ) -> None:
        """Send one datagram: a bytes-like object, or several, which are joined. It can be empty.

        Returns when the data is copied and posted. That is at once, unless `send_depth` sends are
        in flight, or the peer needs a new address handle. `imm` is a 32-bit number that travels
        beside the data (immediate data). The sender is not notified if the datagram is lost.
        See ibv_post_send(3), ibv_create_ah(3).

        Cancelling while it waits sends nothing; the endpoint stays open.

        Raises:
            ValueError: the datagram is larger than max_message_size, or `imm` has more than 32
                bits. The endpoint stays open.
            VerbsError: no route leads to the peer, or no more memory can be registered.
            LocalClosed: the endpoint is closed, or the group was left.
            DeviceRemoved, WorkRequestError: the endpoint has ended.
        """
        self._queue_pair.check_open()
        if isinstance(target, MulticastGroup):
            target.check_joined()
        destination = (target.qp_num, target.qkey)
        number = NO_IMMEDIATE if imm is None else checked_immediate(imm)
        payload = data if type(data) is bytes else _copy(data)
        await self._queue_pair.send_to(target.address_key, destination, payload, number)

    async def recv_from(self) -> Datagram:
        """Wait for the next datagram. Return its data, its sender and its immediate data, if any.

        Cancelling loses no datagram. See ibv_post_recv(3).

        Raises:
            LocalClosed: the endpoint was closed on this side.
            DeviceRemoved: the RDMA device was removed.
            WorkRequestError: the device reported a failure.
            BusyError: another task is receiving.
        """
        return await self._queue_pair.recv_from()

    def __aiter__(self) -> AsyncIterator[Datagram]:
        """Iterate over datagrams until the endpoint is closed. A failure raises."""
        return self

    async def __anext__(self) -> Datagram:
        try:
            return await self._queue_pair.recv_from()
        except LocalClosed:
            raise StopAsyncIteration from None

    # --- the end ---

    async def aclose(self) -> None:
        """Wait for posted sends, leave all groups and destroy the queue pair. Idempotent.

        After `close_timeout` seconds the endpoint is aborted. Waiting tasks get LocalClosed.
        Cancelling aborts the endpoint: everything is destroyed all the same.
        """
        await self._queue_pair.aclose()

    def abort(self) -> None:
        """End the endpoint at once, without waiting for posted sends. Idempotent.

        Everything is destroyed in the background.
        """
        self._queue_pair.abort()

    def __del__(self) -> None:
        queue_pair = getattr(self, "_queue_pair", None)
        if queue_pair is not None and not queue_pair.released:
            name = repr(self)
            queue_pair.abandon()
            warnings.warn(f"unclosed {name}", ResourceWarning, source=self, stacklevel=2)

    def __repr__(self) -> str:
        host, port = self._local_address
        state = "closed" if self.closed else "open"
        return f"<DatagramEndpoint at {host} port {port}, {state}>"


def _group_address(group: str) -> SocketAddress:
    address = parse_address(group)
    if not ipaddress.ip_address(address.host).is_multicast:
        raise ValueError(f"{group} is not the address of a multicast group")
    return address


def _copy(data: Buffer | list[Buffer] | tuple[Buffer, ...]) -> bytes:
    """Return a copy: a datagram is small, and its sources might change while the send waits."""
    return b"".join(data) if isinstance(data, (list, tuple)) else bytes(memoryview(data))
