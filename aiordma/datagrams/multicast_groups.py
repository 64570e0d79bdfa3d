"""MulticastGroup: a group that an endpoint has joined. MulticastGroups: all of its groups."""

from __future__ import annotations

import copy
import logging
from contextlib import suppress
from types import TracebackType
from typing import Self

from aiordma.cm import AsyncCmId, close_after
from aiordma.cm.failures import error_for_event
from aiordma.datagrams.datagram_queue_pair import DatagramQueuePair
from aiordma.datagrams.peer import AddressKey
from aiordma.enums import CmEventType, JoinFlags
from aiordma.errors import LocalClosed, RdmaError
from aiordma.rdmacm import CmEvent, SocketAddress

logger = logging.getLogger(__name__)


class MulticastGroup:
    """A multicast group that an endpoint has joined, to send to it and to receive from it.

    `DatagramEndpoint.join()` returns one. With `send_only`, nothing is received from the group.
    The endpoint leaves it by `leave()`, at the end of an `async with` block, or when it is closed.
    """

    def __init__(
        self, groups: MulticastGroups, cm: AsyncCmId, address: str, event: CmEvent
    ) -> None:
        """Called by join(); not for users."""
        assert event.ah_attr is not None
        self.address_key: AddressKey = event.ah_attr
        """The attributes of the group's address handle."""
        self.gid = event.ah_attr.dgid
        """The group's 16-byte address in RDMA."""
        self.lid = event.ah_attr.dlid
        """The group's local identifier (LID); 0 on RoCE."""
        self._groups = groups
        self._cm = cm
        self._address = address
        self._event = event
        self._failure: RdmaError | None = None
        cm.on_change = self._on_cm_change

    @property
    def address(self) -> str:
        """The group's IP address."""
        return self._address

    @property
    def qp_num(self) -> int:
        """The queue pair number of all multicast datagrams: 0xffffff."""
        return self._event.qp_num

    @property
    def qkey(self) -> int:
        """The queue key (qkey). The members drop datagrams that have another one."""
        return self._event.qkey

    @property
    def joined(self) -> bool:
        """True until the endpoint leaves the group or is closed."""
        return self._groups.has(self)

    def check_joined(self) -> None:
        """Make sure that the endpoint can send to the group.

        Raises:
            LocalClosed: the endpoint has left the group.
            ConnectError: the subnet manager ended the membership.
        """
        if not self.joined:
            raise LocalClosed(f"the group {self._address} was left")
        if self._failure is not None:
            raise copy.copy(self._failure)

    def _on_cm_change(self) -> None:
        event = self._cm.event
        if event is not None and event.type is CmEventType.MULTICAST_ERROR:
            self._failure = error_for_event(event, self._address)
            logger.warning("%s", self._failure)

    async def leave(self) -> None:
        """Leave the group. Datagrams that have arrived can still be received. Idempotent.

        Cancelling stops only the waiting: the group is left all the same. See ibv_detach_mcast(3)
        and rdma_leave_multicast(3).
        """
        await self._groups.leave(self)

    @property
    def cm(self) -> AsyncCmId:
        """The id that has joined the group. Closing the id makes the kernel leave the group."""
        return self._cm

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.leave()

    def __repr__(self) -> str:
        state = "joined" if self.joined else "left"
        return f"<MulticastGroup {self._address}, {state}>"


class MulticastGroups:
    """The groups of one endpoint. Each group has its own id; the queue pair is attached to all."""

    def __init__(self, queue_pair: DatagramQueuePair) -> None:
        self._queue_pair = queue_pair
        self._joined: dict[str, MulticastGroup | None] = {}

    def has(self, group: MulticastGroup) -> bool:
        """Return True if the endpoint is open and in the group."""
        return self._joined.get(group.address) is group and not self._queue_pair.closed

    def find(self, address: str) -> MulticastGroup:
        """Return the group with the IP address `address`.

        Raises:
            RdmaError: the endpoint is not in the group.
        """
        group = self._joined.get(address)
        if group is None:
            raise RdmaError(f"the endpoint is not in the group {address}")
        return group

    async def join(self, address: SocketAddress, send_only: bool) -> MulticastGroup:
        """Join a group. See DatagramEndpoint.join."""
        host = address.host
        if host in self._joined:
            raise RdmaError(f"the endpoint is in the group {host} already")
        self._joined[host] = None
        try:
            self._joined[host] = group = await self._join(address, send_only)
        except BaseException:
            del self._joined[host]
            raise
        return group

    async def _join(self, address: SocketAddress, send_only: bool) -> MulticastGroup:
        cm = await self._queue_pair.create_id()
        flags = JoinFlags.SENDONLY_FULLMEMBER if send_only else JoinFlags.FULLMEMBER
        try:
            cm.bind_addr(self._queue_pair.source)
            group = MulticastGroup(self, cm, address.host, await cm.join_multicast(address, flags))
            if not send_only:
                await self._attach(group)
        except BaseException as error:
            await close_after(cm, error)
            raise
        return group

    async def _attach(self, group: MulticastGroup) -> None:
        """Attach the queue pair to the group, so that it receives the group's datagrams."""
        handle, qp = self._queue_pair.cm.handle, self._queue_pair.qp
        gid, lid = group.gid, group.lid

        def attach() -> None:
            qp.attach_mcast(gid, lid)
            # An attached queue pair cannot be destroyed.
            handle.add_pre_destroy_hook(gid, lambda: qp.detach_mcast(gid, lid))

        self._queue_pair.receive_ring.group_names[gid] = group.address
        try:
            await handle.call(attach)
        except BaseException:
            self._detach(group)
            raise

    def _detach(self, group: MulticastGroup) -> None:
        """Have a worker thread detach the queue pair from the group. Does not wait for it."""
        handle, gid = self._queue_pair.cm.handle, group.gid
        self._queue_pair.receive_ring.group_names.pop(gid, None)

        def detach() -> None:
            hook = handle.remove_pre_destroy_hook(gid)
            if hook is not None:
                hook()

        handle.submit(detach)

    async def leave(self, group: MulticastGroup) -> None:
        """Leave a group. See MulticastGroup.leave."""
        if self._joined.get(group.address) is group:
            self._detach(group)
            group.cm.abort()
            del self._joined[group.address]
        with suppress(LocalClosed):  # a closed endpoint has left all groups
            # This job runs after that of _detach(), so its end means that detaching is done.
            await self._queue_pair.cm.handle.call(lambda: None)
        await group.cm.aclose()
