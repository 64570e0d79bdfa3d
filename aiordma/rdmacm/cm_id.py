"""CmId: a communication identifier, RDMA's counterpart of a socket."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiordma._native import ffi, lib
from aiordma.enums import (
    AsyncEventType,
    CmEventType,
    JoinFlags,
    PortSpace,
)
from aiordma.errors import check, last_error
from aiordma.rdmacm.address import PackedAddress, SocketAddress
from aiordma.rdmacm.addrinfo import AddrInfo, PackedAddrInfo, default_qp_type
from aiordma.rdmacm.channel import EventChannel
from aiordma.rdmacm.id_setup import IdSetup
from aiordma.rdmacm.own_objects import OwnObjects
from aiordma.rdmacm.parameters import ConnectionParameters, PackedParameters
from aiordma.verbs import ProtectionDomain, QueuePair, QueuePairInit
from aiordma.verbs.queue_pair_init import read_caps

if TYPE_CHECKING:
    from aiordma._native._lib import CmIdPtr


class CmId(IdSetup):
    """`struct rdma_cm_id`. Each method is the C call of that name.

    "Starts" below means that on an event channel the call returns at once, and an event tells the
    result. On a synchronous id, made without a channel, it blocks until then, and take_event()
    gives that event. All calls on one id are the caller's to serialise.
    """

    __slots__ = ("_is_passive_ep", "_kept")

    def __init__(self, pointer: CmIdPtr) -> None:
        super().__init__(pointer)
        self._is_passive_ep = False
        self._kept: tuple[ProtectionDomain | None, QueuePairInit | None] | None = None

    # --- making ---

    @classmethod
    def create(cls, channel: EventChannel | None, port_space: PortSpace) -> CmId:
        """Make an id on `channel`, or a synchronous one: rdma_create_id(3).

        Raises:
            VerbsError: ENODEV (no device), ENOMEM.
            ValueError: the channel is closed.
        """
        pointer = ffi.NULL if channel is None else channel.open_pointer
        out = ffi.new("struct rdma_cm_id **")
        check(lib.rdma_create_id(pointer, out, ffi.NULL, port_space), "rdma_create_id")
        return cls(out[0])

    @classmethod
    def create_ep(
        cls,
        info: AddrInfo,
        pd: ProtectionDomain | None = None,
        init: QueuePairInit | None = None,
    ) -> CmId:
        """Make a synchronous id from what getaddrinfo() gave: rdma_create_ep(3).

        An active one has its address and route resolved, and a queue pair if `init` is given, in
        `pd` or in the default one; this blocks, for up to 4 seconds. A passive one is bound, and
        keeps `pd` and `init` for the ids that get_request() gives.

        Raises:
            VerbsError: ENODEV (no device there), ETIMEDOUT (nobody has the address), EADDRINUSE,
                ENOMEM, EINVAL.
            ValueError: an argument is closed.
        """
        packed = PackedAddrInfo(info)
        out = ffi.new("struct rdma_cm_id **")
        pd_pointer = ffi.NULL if pd is None else pd.open_pointer
        if init is None:
            result = lib.rdma_create_ep(out, packed.pointer, pd_pointer, ffi.NULL)
        else:
            attr = ffi.new("struct ibv_qp_init_attr *")
            init.fill(attr, default_qp_type(info.port_space))
            result = lib.rdma_create_ep(out, packed.pointer, pd_pointer, attr)
        check(result, "rdma_create_ep")
        made = cls(out[0])
        made._is_passive_ep = info.is_passive
        made._kept = (pd, init)  # C has pointers to them
        if made.has_qp and init is not None:
            made.qp = QueuePair(made.pointer.qp, read_caps(attr.cap))
        return made

    @classmethod
    def from_address(cls, address: int) -> CmId:
        """The id that an event names by its address."""
        return cls(ffi.cast("struct rdma_cm_id *", address))

    # --- connecting ---

    def connect(self, parameters: ConnectionParameters | None = None) -> None:
        """Start to connect along the resolved route: rdma_connect(3).

        Without parameters: as many retries and resources as the device can. On iWARP the kernel
        connects a TCP socket before it returns, which can take minutes.

        Raises:
            VerbsError: EINVAL (wrong state; a parameter over a limit); on iWARP also what a TCP
                connect gives, such as ECONNREFUSED.
        """
        packed = PackedParameters(parameters)
        check(lib.rdma_connect(self.pointer, packed.pointer), "rdma_connect")

    def establish(self) -> None:
        """Confirm a connection whose queue pair was moved by hand: rdma_establish(3).

        Raises:
            VerbsError: EINVAL (no CONNECT_RESPONSE has come).
        """
        check(lib.rdma_establish(self.pointer), "rdma_establish")

    def listen(self, backlog: int) -> None:
        """Start listening; 0 is the system's longest backlog: rdma_listen(3). Does not block.

        Raises:
            VerbsError: EADDRINUSE or EADDRNOTAVAIL (taken), EINVAL (wrong state).
        """
        check(lib.rdma_listen(self.pointer, backlog), "rdma_listen")

    def get_request(self) -> CmId:
        """Wait for a connection request on a synchronous listener: rdma_get_request(3). Blocks.

        The new id is synchronous too. Its request's event is for take_event().

        Raises:
            VerbsError: EINVAL (not synchronous, or another event came, see take_event()), ENOMEM
                (its queue pair could not be made), EAGAIN (the fd was made non-blocking).
        """
        out = ffi.new("struct rdma_cm_id **")
        if lib.rdma_get_request(self.pointer, out):
            raise last_error("rdma_get_request")
        child = type(self)(out[0])
        if child.has_qp:
            assert self.for_requests is not None
            _, init = self.for_requests
            child.qp = QueuePair(child.pointer.qp, init.caps)
        return child

    @property
    def for_requests(self) -> tuple[ProtectionDomain | None, QueuePairInit] | None:
        """What create_ep() was told of queue pairs for the ids of requests, if it was."""
        if self._kept is None:
            return None
        pd, init = self._kept
        return None if init is None else (pd, init)

    def accept(self, parameters: ConnectionParameters | None = None) -> None:
        """Start to accept the request that made this id: rdma_accept(3).

        Without parameters (which needs a queue pair): what the peer asked for. If it fails the
        connection is lost: the only thing left to do is to destroy the id.

        Raises:
            VerbsError: EINVAL (the peer is gone; a parameter over a limit), ECONNRESET, ENOMEM.
            ValueError: neither parameters nor a queue pair (the C function would crash).
        """
        if parameters is None and not self.has_qp:
            raise ValueError("parameters are needed to accept without a queue pair")
        packed = PackedParameters(parameters)
        check(lib.rdma_accept(self.pointer, packed.pointer), "rdma_accept")

    def reject(self, private_data: bytes = b"", *, ece: bool = False) -> None:
        """Refuse the request that made this id: rdma_reject(3). Does not block.

        With `ece`, because of the options that the peer's card offered: rdma_reject_ece(3).

        Raises:
            VerbsError: EINVAL (the peer is gone; over 148 bytes on InfiniBand and RoCE).
        """
        data = ffi.from_buffer("char[]", private_data)
        if ece:
            result = lib.rdma_reject_ece(self.pointer, data, len(private_data))
            check(result, "rdma_reject_ece")
        else:
            check(lib.rdma_reject(self.pointer, data, len(private_data)), "rdma_reject")

    def notify(self, event: AsyncEventType = AsyncEventType.COMM_EST) -> None:
        """Tell the CM of an event of the queue pair: rdma_notify(3). Does not block.

        COMM_EST: data has come, so the connection stands.

        Raises:
            VerbsError: EISCONN (it knows already), EINVAL.
        """
        check(lib.rdma_notify(self.pointer, event), "rdma_notify")

    def disconnect(self) -> None:
        """Move the queue pair to its error state and start to disconnect: rdma_disconnect(3).

        Raises:
            VerbsError: EINVAL (never connected); others on iWARP when the peer closed first.
        """
        check(lib.rdma_disconnect(self.pointer), "rdma_disconnect")

    # --- multicast ---

    def join_multicast(
        self,
        group: SocketAddress,
        context: int = 0,
        flags: JoinFlags = JoinFlags.FULLMEMBER,
    ) -> None:
        """Start to join a group: rdma_join_multicast(3), or rdma_join_multicast_ex(3) for flags.

        `context` comes back in the event. The id is bound to a device, and carries datagrams. When
        the event is read, the queue pair of the id is attached if it has one.

        Raises:
            VerbsError: EINVAL (wrong state, or no datagrams), ENOSYS (iWARP), EOPNOTSUPP.
        """
        packed = PackedAddress(group)
        token = ffi.cast("void *", context)
        if flags is JoinFlags.FULLMEMBER:
            result = lib.rdma_join_multicast(self.pointer, packed.pointer, token)
            check(result, "rdma_join_multicast")
            return
        attr = ffi.new("struct rdma_cm_join_mc_attr_ex *")
        attr.comp_mask = lib.RDMA_CM_JOIN_MC_ATTR_ADDRESS | lib.RDMA_CM_JOIN_MC_ATTR_JOIN_FLAGS
        attr.join_flags, attr.addr = flags, packed.pointer
        result = lib.rdma_join_multicast_ex(self.pointer, attr, token)
        check(result, "rdma_join_multicast_ex")

    def leave_multicast(self, group: SocketAddress) -> None:
        """Leave a group: rdma_leave_multicast(3). Waits until its events are acknowledged.

        Raises:
            VerbsError: EADDRNOTAVAIL (not joined).
        """
        packed = PackedAddress(group)
        check(lib.rdma_leave_multicast(self.pointer, packed.pointer), "rdma_leave_multicast")

    # --- channels ---

    def migrate(self, channel: EventChannel | None) -> None:
        """Move to another event channel, with pending events; None: rdma_migrate_id(3).

        None makes it synchronous. Waits until its events are acknowledged; nobody may be reading
        the channel it leaves. A synchronous id's fd is closed.

        Raises:
            VerbsError: EINVAL (synchronous already), EMFILE.
            ValueError: the channel is closed.
        """
        pointer = ffi.NULL if channel is None else channel.open_pointer
        check(lib.rdma_migrate_id(self.pointer, pointer), "rdma_migrate_id")

    def write_event(self, status: int = 0, arg: int = 0) -> None:
        """Put a USER event onto the id's channel: rdma_write_cm_event(3), of rdma-core 60.

        From any thread. Does not block.

        Raises:
            VerbsError: ENOSYS (this rdma-core does not have it), EINVAL (Linux before 6.18).
        """
        result = lib.aiordma_write_cm_event(self.pointer, CmEventType.USER, status, arg)
        check(result, "rdma_write_cm_event")

    # --- the end ---

    def own_objects(self) -> OwnObjects:
        """What is to be destroyed after the id: to be asked for before."""
        return OwnObjects(self.pointer, self.qp, self.srq)

    def destroy(self) -> None:
        """Free the id, telling the peer what its state demands: rdma_destroy_id(3).

        Can block: for the events of the id in flight, and on iWARP for a connect under way. Its
        queue pair and queues are not destroyed, see own_objects(). A passive endpoint is freed by
        rdma_destroy_ep(3), with what it kept.

        Raises:
            VerbsError: the kernel does not know the id.
            ValueError: it is destroyed already.
        """
        pointer = self.pointer
        self._pointer = None
        if self._is_passive_ep:
            pointer.srq = ffi.NULL  # it is among the own objects
            lib.rdma_destroy_ep(pointer)
        else:
            check(lib.rdma_destroy_id(pointer), "rdma_destroy_id")
