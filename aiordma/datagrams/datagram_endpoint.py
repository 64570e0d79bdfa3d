"""open_datagram() and DatagramEndpoint: datagrams to and from anybody, and multicast."""

from __future__ import annotations

import ipaddress
import logging
import warnings
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import TYPE_CHECKING

from aiordma.cm import AsyncCmId
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

    `local_address` is `(host, port)`: a name or address of an RDMA device of this machine, and the
    port where peers can ask for it; 0 picks a free one. Datagrams belong to one device, so there is
    no "all addresses" here. iWARP has none.

    Cancelling leaves nothing behind. See rdma_bind_addr(3), rdma_create_qp(3).

    Raises:
        AddressError: the name is unknown, or stands for no RDMA device.
        VerbsError: EADDRINUSE or EADDRNOTAVAIL when the port is taken or the address is not this
            machine's; ENODEV when no RDMA device has it; EOPNOTSUPP when the device has no
            datagrams; ENOMEM when no more memory can be locked.
        ValueError: an option is more than the device can do.
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
            f"datagrams belong to one RDMA device, which {address.host} does not name: take an "
            "address from `python -m aiordma devices`"
        )
    cm = await AsyncCmId.create(PortSpace.UDP)
    async with cm.closed_on_failure():
        cm.bind_addr(address)
        queue_pair = DatagramQueuePair(cm, options)
        await queue_pair.open()
    return DatagramEndpoint(queue_pair)


class DatagramEndpoint(AbortingContextManagerMixin):
    """Sends datagrams to peers and groups, and receives them (RDMA's UD queue pair).

    From `open_datagram()`. Datagrams arrive whole or not at all; they may be lost, doubled or
    overtake each other. It is closed by `aclose()`, or by leaving the `async with` block it was
    opened in; one that is just dropped warns, and is then aborted.

    One task may receive at a time; any number may send. Belongs to the event loop it was made on.
    """

    def __init__(self, queue_pair: DatagramQueuePair) -> None:
        """For open_datagram(); not to be called by others."""
        self._queue_pair = queue_pair
        self._groups = MulticastGroups(queue_pair)
        self._local_address = queue_pair.cm.local_address

    @property
    def local_address(self) -> tuple[str, int]:
        """`(host, port)` where peers can ask for it, once it listens."""
        return self._local_address

    @property
    def qp_num(self) -> int:
        """The number of its queue pair, which peers send to."""
        return self._queue_pair.qp.number

    @property
    def max_message_size(self) -> int:
        """The largest datagram in bytes that send_to() takes."""
        return self._queue_pair.max_message_size

    @property
    def closed(self) -> bool:
        """Whether it ended. What came before can still be received if it was not ended here."""
        return self._queue_pair.closed

    # --- peers ---

    async def resolve(self, host: str, port: int, private_data: bytes = b"") -> DatagramPeer:
        """Ask who serves datagrams at a host and port: a peer to send to.

        The addresses of a name are tried in turn. Up to 180 bytes of `private_data` reach the peer
        with the request, and its own come back with the answer.

        Cancelling leaves nothing behind. A machine that does not answer keeps this waiting for
        about a minute. See rdma_resolve_addr(3), rdma_resolve_route(3), rdma_connect(3).

        Raises:
            AddressError: the name is unknown, or no way leads there from the endpoint's device.
            RouteError: no route was found.
            Rejected: nobody serves there (status 1), or the application refused (status 2).
            Unreachable: nobody answered.
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
        """Let peers ask for this endpoint; get_request() tells of them, or serve() answers all.

        At most `backlog` requests wait to be answered (0: as the options say); those beyond are
        rejected. See rdma_listen(3).

        Raises:
            VerbsError: EADDRINUSE or EADDRNOTAVAIL (the port is taken).
            RdmaError: it listens already.
            LocalClosed, DeviceRemoved, WorkRequestError: the endpoint has ended.
        """
        self._queue_pair.listen(backlog)

    async def get_request(self) -> DatagramRequest:
        """Wait for the next peer that asks, after listen().

        Cancelling loses none.

        Raises:
            RdmaError: it does not listen.
            BusyError: another task is waiting for requests.
            LocalClosed, DeviceRemoved, WorkRequestError: the endpoint has ended.
        """
        return DatagramRequest(await self._queue_pair.get_request(), self._queue_pair)

    async def serve(self, private_data: bytes = b"") -> None:
        """Accept every peer that asks, with `private_data`, until the endpoint is closed.

        Listens first, if it does not yet. Cancelling stops accepting, not listening.

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
                    logger.info("%r went away: %s", request, error)

    # --- groups ---

    async def join(self, group: str, *, send_only: bool = False) -> MulticastGroup:
        """Join a multicast group, by its IP address: to send to, and to receive from.

        With `send_only`, nothing is received from it. An endpoint can be in many groups; each can
        be joined once. RoCE has IPv4 groups only. Cancelling leaves nothing behind.
        See rdma_join_multicast(3), rdma_join_multicast_ex(3), ibv_attach_mcast(3).

        Raises:
            ValueError: it is no address of a multicast group.
            ConnectError: the subnet manager refused.
            VerbsError: 524 (the device has no such groups), ENOMEM (it can be in no more).
            RdmaError: the endpoint is in the group already.
            LocalClosed, DeviceRemoved, WorkRequestError: the endpoint has ended.
        """
        return await self._groups.join(_group_address(group), send_only)

    async def leave(self, group: MulticastGroup | str) -> None:
        """Leave a group, given by what join() returned, or by its address.

        A MulticastGroup that was left already is no error. Cancelling stops the waiting only.
        See rdma_leave_multicast(3).

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
        """Send one datagram: any bytes-like object, or several to be joined; it may be empty.

        Returns when the data is copied and posted, which is at once unless `send_depth` sends are
        on their way already, or the way to the peer has to be found first. `imm` is a number of 32
        bits that travels beside the data. Nobody tells whether it arrived. See ibv_post_send(3),
        ibv_create_ah(3).

        Cancelling while it waits sends nothing; the endpoint goes on.

        Raises:
            ValueError: the datagram is larger than max_message_size. The endpoint goes on.
            VerbsError: no way leads to the peer, or no more memory can be registered.
            LocalClosed: the endpoint is closed, or the group was left.
            DeviceRemoved, WorkRequestError: the endpoint has ended.
        """
        self._queue_pair.check_open()
        if isinstance(target, MulticastGroup):
            target.check_joined()
        destination = (target.qp_num, target.qkey)
        number = NO_IMMEDIATE if imm is None else checked_immediate(imm)
        payload = data if type(data) is bytes else _joined(data)
        await self._queue_pair.send_to(target.address_key, destination, payload, number)

    async def recv_from(self) -> Datagram:
        """Wait for the next datagram: what was sent, who sent it, and the number beside it if any.

        Cancelling loses no datagram. See ibv_post_recv(3).

        Raises:
            LocalClosed: it was closed on this side.
            DeviceRemoved: the RDMA device went away.
            WorkRequestError: the device reported a failure.
            BusyError: another task is receiving.
        """
        return await self._queue_pair.recv_from()

    def __aiter__(self) -> AsyncIterator[Datagram]:
        """Iterate over datagrams until the endpoint is closed; other ends raise."""
        return self

    async def __anext__(self) -> Datagram:
        try:
            return await self._queue_pair.recv_from()
        except LocalClosed:
            raise StopAsyncIteration from None

    # --- the end ---

    async def aclose(self) -> None:
        """Close: what was posted is sent, groups are left, and everything is destroyed. Idempotent.

        Takes at most `close_timeout` seconds until what is left is ended by force. Tasks that wait
        get LocalClosed. Cancelling ends it by force: everything is destroyed all the same.
        """
        await self._queue_pair.aclose()

    def abort(self) -> None:
        """End it at once, without letting posted datagrams be sent. Idempotent.

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
        raise ValueError(f"{group} is no address of a multicast group")
    return address


def _joined(data: Buffer | list[Buffer] | tuple[Buffer, ...]) -> bytes:
    """A copy: a datagram is small, and what it was made from may change while it waits."""
    return b"".join(data) if isinstance(data, (list, tuple)) else bytes(memoryview(data))
