"""MulticastGroup: a group that an endpoint is in; Groups: all of them."""

from __future__ import annotations

import copy
import logging
from contextlib import suppress
from types import TracebackType
from typing import Self

from aiordma.cm import AsyncCmId
from aiordma.cm.failures import error_for_event
from aiordma.datagrams.datagram_queue_pair import DatagramQueuePair
from aiordma.datagrams.peer import AddressKey
from aiordma.enums import CmEventType, JoinFlags
from aiordma.errors import LocalClosed, RdmaError
from aiordma.rdmacm import CmEvent, SocketAddress

logger = logging.getLogger(__name__)


class MulticastGroup:
    """A multicast group, to send to and, unless joined to send only, to receive from.

    From `DatagramEndpoint.join()`. It is left by `leave()`, by leaving an `async with` block, or
    with the endpoint.
    """

    def __init__(
        self, groups: MulticastGroups, cm: AsyncCmId, address: str, event: CmEvent
    ) -> None:
        """For join(); not to be called by others."""
        assert event.ah_attr is not None
        self.address_key: AddressKey = event.ah_attr
        """How to get there."""
        self.gid = event.ah_attr.dgid
        """The group's 16-byte address in RDMA."""
        self.lid = event.ah_attr.dlid
        """Its local identifier; 0 on RoCE."""
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
        """The number that stands for all queue pairs: 0xffffff."""
        return self._event.qp_num

    @property
    def qkey(self) -> int:
        """The key without which its members take nothing."""
        return self._event.qkey

    @property
    def joined(self) -> bool:
        """Whether it is not left yet."""
        return self._groups.has(self)

    def check_joined(self) -> None:
        """Make sure that it can be sent to.

        Raises:
            LocalClosed: it was left.
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
        """Leave the group; what has arrived can still be received. Idempotent.

        See ibv_detach_mcast(3) and rdma_leave_multicast(3). Cancelling stops the waiting only.
        """
        await self._groups.leave(self)

    @property
    def cm(self) -> AsyncCmId:
        """The id that is in the group; the kernel leaves it when the id is closed."""
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
    """The groups of one endpoint. Each has an id of its own; the queue pair is attached here."""

    def __init__(self, queue_pair: DatagramQueuePair) -> None:
        self._queue_pair = queue_pair
        self._joined: dict[str, MulticastGroup | None] = {}

    def has(self, group: MulticastGroup) -> bool:
        """Whether the endpoint is open, and in the group."""
        return self._joined.get(group.address) is group and not self._queue_pair.closed

    def find(self, address: str) -> MulticastGroup:
        """The group of that address.

        Raises:
            RdmaError: the endpoint is not in it.
        """
        group = self._joined.get(address)
        if group is None:
            raise RdmaError(f"the endpoint is not in the group {address}")
        return group

    async def join(self, address: SocketAddress, send_only: bool) -> MulticastGroup:
        """See DatagramEndpoint.join."""
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
        cm = await self._queue_pair.other_id()
        flags = JoinFlags.SENDONLY_FULLMEMBER if send_only else JoinFlags.FULLMEMBER
        async with cm.closed_on_failure():
            cm.bind_addr(self._queue_pair.source)
            group = MulticastGroup(self, cm, address.host, await cm.join_multicast(address, flags))
            if not send_only:
                await self._attach(group)
        return group

    async def _attach(self, group: MulticastGroup) -> None:
        handle, qp = self._queue_pair.cm.handle, self._queue_pair.qp
        gid, lid = group.gid, group.lid

        def attach() -> None:
            qp.attach_mcast(gid, lid)
            # A queue pair that is attached cannot be destroyed.
            handle.add_pre_destroy_hook(gid, lambda: qp.detach_mcast(gid, lid))

        self._queue_pair.receive_ring.group_names[gid] = group.address
        try:
            await handle.call(attach)
        except BaseException:
            self._detach(group)
            raise

    def _detach(self, group: MulticastGroup) -> None:
        """In a worker thread, also if this task is cancelled."""
        handle, gid = self._queue_pair.cm.handle, group.gid
        self._queue_pair.receive_ring.group_names.pop(gid, None)

        def detach() -> None:
            hook = handle.remove_pre_destroy_hook(gid)
            if hook is not None:
                hook()

        handle.submit(detach)

    async def leave(self, group: MulticastGroup) -> None:
        """See MulticastGroup.leave."""
        if self._joined.get(group.address) is group:
            self._detach(group)
            group.cm.abort()
            del self._joined[group.address]
        with suppress(LocalClosed):  # with the endpoint, everything is left
            await self._queue_pair.cm.handle.call(lambda: None)  # behind the detaching
        await group.cm.aclose()
