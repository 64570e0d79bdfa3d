"""CmId: a communication identifier, the RDMA counterpart of a socket."""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from aiordma._native import ffi, lib
from aiordma.enums import (
    AccessFlags,
    AsyncEventType,
    CmEventType,
    IbOption,
    IdOption,
    JoinFlags,
    PortSpace,
    QpState,
    QpType,
    SendFlags,
    SrqType,
)
from aiordma.errors import check, last_error
from aiordma.rdmacm.address import IdAddresses, PackedAddress, SocketAddress, read_sockaddr
from aiordma.rdmacm.addrinfo import AddrInfo, PackedAddrInfo, default_qp_type, read_addrinfos
from aiordma.rdmacm.channel import EventChannel
from aiordma.rdmacm.contexts import device_contexts
from aiordma.rdmacm.event import CmEvent, read_event
from aiordma.rdmacm.own_objects import OwnObjects, OwnQueue
from aiordma.rdmacm.parameters import ConnectionParameters, Ece, PackedParameters, length_of
from aiordma.rdmacm.route import Route
from aiordma.verbs import (
    AddressHandle,
    Completion,
    Device,
    ProtectionDomain,
    QueuePair,
    QueuePairAttributes,
    QueuePairInit,
    Registration,
    SharedReceiveQueue,
    SharedReceiveQueueCaps,
)
from aiordma.verbs.queue_pair_init import read_caps

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from aiordma._native._lib import CmIdPtr, IbvPd, SgeArray, VoidPtr

Segment = tuple[Registration, int, int]
"""A piece of registered memory: the registration, an offset, and a length in bytes."""

_SIGNALED = SendFlags.SIGNALED
_UD = QpType.UD

# The C type of each option's value: uint8_t or int.
_OPTION_LAYOUT = {
    IdOption.TOS: struct.Struct("=B"),
    IdOption.REUSEADDR: struct.Struct("=i"),
    IdOption.AFONLY: struct.Struct("=i"),
    IdOption.ACK_TIMEOUT: struct.Struct("=B"),
}


class CmId:
    """`struct rdma_cm_id`. Each method is the C call of that name.

    "Start to" below means: on an event channel the call returns at once, and an event reports the
    result. On a synchronous id, which has no channel of the caller, the call blocks until the
    event, and take_event() returns it. The caller serialises all calls on one id.

    The `wr_id` of a work request is returned in its completion. The device uses the memory of a
    request until that completion. librdmacm makes completion queues for the id only if none were
    given to create_qp().
    """

    __slots__ = ("_ep_arguments", "_is_passive_ep", "address", "context", "pointer", "qp", "srq")

    def __init__(self, pointer: CmIdPtr) -> None:
        self.pointer = pointer
        """The C id. Once it is destroyed, this raises ValueError."""
        self.address = int(ffi.cast("uintptr_t", pointer))
        """The address of the C id, as in events. Unique until the id is destroyed."""
        self.context: object = None
        """Any object of the user. The `context` field of the C struct is not used."""
        self.qp: QueuePair | None = None
        """The queue pair made by create_qp(), or by get_request()."""
        self.srq: SharedReceiveQueue | None = None
        """The shared receive queue made by create_srq()."""
        self._is_passive_ep = False
        self._ep_arguments: tuple[ProtectionDomain | None, QueuePairInit | None] | None = None

    # --- making ---

    @classmethod
    def create(cls, channel: EventChannel | None, port_space: PortSpace) -> CmId:
        """Make an id on `channel`; without a channel, a synchronous one: rdma_create_id(3).

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
        """Make a synchronous id from a result of getaddrinfo(): rdma_create_ep(3).

        An active id has its address and route resolved, and a queue pair if `init` is given, in
        `pd` or in the default protection domain; this blocks, for up to 4 seconds. A passive id is
        bound. It stores `pd` and `init`: the ids that get_request() returns use them.

        Raises:
            VerbsError: ENODEV (no device has the address), ETIMEDOUT (no host has the address),
                EADDRINUSE, ENOMEM, EINVAL.
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
        made._ep_arguments = (pd, init)  # C has pointers to them
        if made.has_qp and init is not None:
            made.qp = QueuePair(made.pointer.qp, read_caps(attr.cap))
        return made

    @classmethod
    def from_address(cls, address: int) -> CmId:
        """Return the id at the address in an event."""
        return cls(ffi.cast("struct rdma_cm_id *", address))

    # --- the fields of struct rdma_cm_id ---

    @property
    def channel_fd(self) -> int:
        """The fd of the event channel; for a synchronous id, of its private channel."""
        return self.pointer.channel.fd

    @property
    def port_space(self) -> PortSpace:
        """The port space of the id."""
        return PortSpace(self.pointer.ps)

    @property
    def qp_type(self) -> QpType:
        """The type of queue pair that the id can have."""
        return QpType(self.pointer.qp_type)

    @property
    def is_datagram(self) -> bool:
        """True if the id is for datagrams, not for a connection."""
        return bool(self.pointer.qp_type == _UD)

    @property
    def has_device(self) -> bool:
        """True if the id is bound to a device. bind_addr() and resolve_addr() can bind it."""
        return self.pointer.verbs != ffi.NULL

    @property
    def has_qp(self) -> bool:
        """True if the id has a queue pair."""
        return self.pointer.qp != ffi.NULL

    @property
    def qp_num(self) -> int:
        """The number of the queue pair; 0 without one."""
        return self.pointer.qp.qp_num if self.has_qp else 0

    @property
    def port_num(self) -> int:
        """The port of the device, from 1; 0 before the id is bound to a device."""
        return self.pointer.port_num

    def device(self) -> Device:
        """Return the device that the id is bound to.

        Raises:
            ValueError: the id is not bound to a device yet.
        """
        if not self.has_device:
            raise ValueError("the id is not bound to a device yet")
        return device_contexts.device_of(self.pointer.verbs)

    # Both C functions only return this field. Calling them would release and reacquire the GIL.

    @property
    def local_address(self) -> SocketAddress | None:
        """The address that the id is bound to; None if there is none: rdma_get_local_addr(3)."""
        return read_sockaddr(ffi.addressof(self.pointer.route.addr, "src_addr"))

    @property
    def peer_address(self) -> SocketAddress | None:
        """The address of the peer; None before it is known: rdma_get_peer_addr(3)."""
        return read_sockaddr(ffi.addressof(self.pointer.route.addr, "dst_addr"))

    @property
    def addresses(self) -> IdAddresses:
        """Copies of both addresses, as they are now."""
        return IdAddresses(self.pointer.route.addr)

    @property
    def src_port(self) -> int:
        """The local port; 0 before the id has one: rdma_get_src_port(3)."""
        return socket.ntohs(lib.rdma_get_src_port(self.pointer))

    @property
    def dst_port(self) -> int:
        """The port of the peer; 0 before it is known: rdma_get_dst_port(3)."""
        return socket.ntohs(lib.rdma_get_dst_port(self.pointer))

    @property
    def route(self) -> Route:
        """The route to the peer, as far as it is resolved."""
        return Route.read(self.pointer.route)

    def take_event(self) -> CmEvent | None:
        """Return the event that ended the last call on a synchronous id; None if there is none.

        The event is acknowledged.
        """
        copy = ffi.new("struct aiordma_cm_event *")
        if not lib.aiordma_take_event(self.pointer, copy):
            return None
        return read_event(copy)

    # --- options ---

    def set_option(self, option: IdOption | IbOption, value: int | bytes) -> None:
        """Set an option: rdma_set_option(3).

        The options of IdOption take a number. `IbOption.PATH` takes an array of
        `struct ibv_path_data` as bytes. It replaces resolve_route(), and like that it only starts
        the operation.

        Raises:
            VerbsError: EINVAL (too late, or not allowed on this kind of id), ENOSYS (unknown).
        """
        if isinstance(option, IdOption):
            assert isinstance(value, int)
            level, packed = lib.RDMA_OPTION_ID, _OPTION_LAYOUT[option].pack(value)
        else:
            assert isinstance(value, bytes)
            level, packed = lib.RDMA_OPTION_IB, value
        data = ffi.new("char[]", packed)
        check(
            lib.rdma_set_option(self.pointer, level, option, data, len(packed)), "rdma_set_option"
        )

    def set_local_ece(self, ece: Ece) -> None:
        """Offer ECE options to the peer, before the queue pair is made: rdma_set_local_ece(3).

        Raises:
            VerbsError: EINVAL (the id has a queue pair).
        """
        check(lib.rdma_set_local_ece(self.pointer, ece.write()), "rdma_set_local_ece")

    def remote_ece(self) -> Ece:
        """Return the ECE options that the peer offered: rdma_get_remote_ece(3).

        Call it before the queue pair is made.

        Raises:
            VerbsError: EINVAL (the id has a queue pair).
        """
        ece = ffi.new("struct ibv_ece *")
        check(lib.rdma_get_remote_ece(self.pointer, ece), "rdma_get_remote_ece")
        return Ece.read(ece)

    # --- resolving ---

    def bind_addr(self, address: SocketAddress) -> None:
        """Bind to a local address; port 0 selects a free one: rdma_bind_addr(3). Does not block.

        Raises:
            VerbsError: EADDRINUSE or EADDRNOTAVAIL (in use, or not local), ENODEV, EACCES.
        """
        packed = PackedAddress(address)
        check(lib.rdma_bind_addr(self.pointer, packed.pointer), "rdma_bind_addr")

    def resolve_addr(
        self, source: SocketAddress | None, destination: SocketAddress, timeout_ms: int
    ) -> None:
        """Start to resolve `destination` to a device: rdma_resolve_addr(3).

        Raises:
            VerbsError: ENETUNREACH, ENODEV, EADDRNOTAVAIL, EINVAL.
        """
        src, dst = PackedAddress(source), PackedAddress(destination)
        check(
            lib.rdma_resolve_addr(self.pointer, src.pointer, dst.pointer, timeout_ms),
            "rdma_resolve_addr",
        )

    def resolve_route(self, timeout_ms: int) -> None:
        """Start to resolve the route: rdma_resolve_route(3). Can block if ibacm runs.

        Raises:
            VerbsError: EINVAL (the address is not resolved), ENODEV.
            ValueError: the id is not bound to a device yet (the C function would crash).
        """
        if not self.has_device:
            raise ValueError("the address is not resolved yet")
        check(lib.rdma_resolve_route(self.pointer, timeout_ms), "rdma_resolve_route")

    def resolve_addrinfo(
        self, node: str | None, service: str | None, hints: AddrInfo | None = None
    ) -> None:
        """Start to resolve a name: rdma_resolve_addrinfo(3). Needs rdma-core 60 and Linux 6.18.

        With the flag DNS it blocks for the resolver. ADDRINFO_RESOLVED or ADDRINFO_ERROR follows.

        Raises:
            VerbsError: ENOSYS (rdma-core is too old), EINVAL (the kernel is too old), EBUSY.
        """
        packed = PackedAddrInfo(hints) if hints is not None else None
        texts = [ffi.NULL if t is None else ffi.new("char[]", t.encode()) for t in (node, service)]
        pointer = packed.pointer if packed is not None else ffi.NULL
        result = lib.aiordma_resolve_addrinfo(self.pointer, texts[0], texts[1], pointer)
        check(result, "rdma_resolve_addrinfo")

    def query_addrinfo(self) -> list[AddrInfo]:
        """Return the result of resolve_addrinfo(): rdma_query_addrinfo(3). Needs rdma-core 60.

        Raises:
            VerbsError: ENOSYS (rdma-core is too old), ENOENT (nothing was resolved).
        """
        out = ffi.new("struct rdma_addrinfo **")
        check(lib.rdma_query_addrinfo(self.pointer, out), "rdma_query_addrinfo")
        try:
            return read_addrinfos(out[0])
        finally:
            lib.rdma_freeaddrinfo(out[0])

    # --- the queue pair ---

    def create_qp(self, init: QueuePairInit, pd: ProtectionDomain | None = None) -> QueuePair:
        """Make the id's queue pair: rdma_create_qp(3), or rdma_create_qp_ex(3) for create_flags.

        It is made in `pd`, or in librdmacm's default protection domain. Where `init` has no
        completion queue, librdmacm makes one for the id. Blocks for system calls.

        Raises:
            VerbsError: EINVAL (over a limit of the device, or the id has a queue pair), ENOMEM
                (memory, or the locked-memory limit), EOPNOTSUPP (type not supported).
            ValueError: an argument is closed, or the id is not bound to a device yet.
        """
        pd_pointer = self._pd_pointer(pd)
        attr = ffi.new("struct ibv_qp_init_attr_ex *")
        init.fill(attr, self.qp_type)
        if init.create_flags:
            attr.comp_mask = lib.IBV_QP_INIT_ATTR_PD | lib.IBV_QP_INIT_ATTR_CREATE_FLAGS
            attr.pd, attr.create_flags = pd_pointer, init.create_flags
            check(lib.rdma_create_qp_ex(self.pointer, attr), "rdma_create_qp_ex")
        else:
            plain = ffi.cast("struct ibv_qp_init_attr *", attr)  # the extended struct begins so
            check(lib.rdma_create_qp(self.pointer, pd_pointer, plain), "rdma_create_qp")
        self.qp = QueuePair(self.pointer.qp, read_caps(attr.cap))
        return self.qp

    def destroy_qp(self) -> None:
        """Destroy the queue pair and the completion queues of the id: rdma_destroy_qp(3).

        Blocks until their events are acknowledged. Idempotent.
        """
        qp, self.qp = self.qp, None
        if qp is not None:
            qp.forget()
        if self.has_qp:
            lib.rdma_destroy_qp(self.pointer)

    def init_qp_attr(self, state: QpState) -> QueuePairAttributes:
        """Return the attributes that move a queue pair to `state`: rdma_init_qp_attr(3).

        They are for a queue pair that create_qp() did not make.

        Raises:
            VerbsError: EINVAL (too early in the state of the id).
        """
        attributes = QueuePairAttributes.to_state(state)
        mask = ffi.new("int *")
        check(lib.rdma_init_qp_attr(self.pointer, attributes.pointer, mask), "rdma_init_qp_attr")
        attributes.mask = mask[0]
        return attributes

    def send_queue(self) -> OwnQueue:
        """Return the send completion queue that create_qp() made. Raises: ValueError if none."""
        return OwnQueue(self.pointer.send_cq, self.pointer.send_cq_channel)

    def recv_queue(self) -> OwnQueue:
        """Return the receive completion queue that create_qp() made. Raises: ValueError if none."""
        return OwnQueue(self.pointer.recv_cq, self.pointer.recv_cq_channel)

    # --- connecting ---

    def connect(self, parameters: ConnectionParameters | None = None) -> None:
        """Start to connect along the resolved route: rdma_connect(3).

        Without parameters, retries and resources are the maximum of the device. On iWARP the kernel
        connects a TCP socket before it returns, which can take minutes.

        Raises:
            VerbsError: EINVAL (wrong state, or a parameter over a limit); on iWARP also the errno
                of a TCP connect, such as ECONNREFUSED.
        """
        packed = PackedParameters(parameters)
        check(lib.rdma_connect(self.pointer, packed.pointer), "rdma_connect")

    def establish(self) -> None:
        """Confirm a connection whose queue pair the caller itself has moved: rdma_establish(3).

        Raises:
            VerbsError: EINVAL (no CONNECT_RESPONSE has arrived).
        """
        check(lib.rdma_establish(self.pointer), "rdma_establish")

    def listen(self, backlog: int) -> None:
        """Listen; a backlog of 0 means the system's maximum: rdma_listen(3). Does not block.

        Raises:
            VerbsError: EADDRINUSE or EADDRNOTAVAIL (in use), EINVAL (wrong state).
        """
        check(lib.rdma_listen(self.pointer, backlog), "rdma_listen")

    def get_request(self) -> CmId:
        """Wait for a connection request on a synchronous listener: rdma_get_request(3). Blocks.

        The new id is synchronous too. Its take_event() returns the CONNECT_REQUEST event.

        Raises:
            VerbsError: EINVAL (not synchronous, or another event arrived, see take_event()), ENOMEM
                (its queue pair could not be made), EAGAIN (the fd was made non-blocking).
        """
        out = ffi.new("struct rdma_cm_id **")
        if lib.rdma_get_request(self.pointer, out):
            raise last_error("rdma_get_request")
        child = type(self)(out[0])
        if child.has_qp:
            assert self.request_qp_arguments is not None
            _, init = self.request_qp_arguments
            child.qp = QueuePair(child.pointer.qp, init.caps)
        return child

    @property
    def request_qp_arguments(self) -> tuple[ProtectionDomain | None, QueuePairInit] | None:
        """The arguments of create_ep() for the queue pairs of requests; None without `init`."""
        if self._ep_arguments is None:
            return None
        pd, init = self._ep_arguments
        return None if init is None else (pd, init)

    def accept(self, parameters: ConnectionParameters | None = None) -> None:
        """Start to accept the request that made this id: rdma_accept(3).

        Without parameters (which needs a queue pair), the parameters of the peer are used. If this
        fails, the connection is lost, and the id can only be destroyed.

        Raises:
            VerbsError: EINVAL (the peer has disconnected, or a parameter is over a limit),
                ECONNRESET, ENOMEM.
            ValueError: no parameters and no queue pair (the C function would crash).
        """
        if parameters is None and not self.has_qp:
            raise ValueError("parameters are needed to accept without a queue pair")
        packed = PackedParameters(parameters)
        check(lib.rdma_accept(self.pointer, packed.pointer), "rdma_accept")

    def reject(self, private_data: bytes = b"", *, ece: bool = False) -> None:
        """Reject the request that made this id: rdma_reject(3). Does not block.

        With `ece`, the reason is the ECE options that the peer offered: rdma_reject_ece(3).

        Raises:
            VerbsError: EINVAL (the peer has disconnected, or over 148 bytes on InfiniBand and
                RoCE).
            ValueError: the private data is longer than 255 bytes.
        """
        data, nbytes = ffi.from_buffer("char[]", private_data), length_of(private_data)
        if ece:
            check(lib.rdma_reject_ece(self.pointer, data, nbytes), "rdma_reject_ece")
        else:
            check(lib.rdma_reject(self.pointer, data, nbytes), "rdma_reject")

    def notify(self, event: AsyncEventType = AsyncEventType.COMM_EST) -> None:
        """Notify the CM of an event of the queue pair: rdma_notify(3). Does not block.

        COMM_EST: data has arrived, so the connection is established.

        Raises:
            VerbsError: EISCONN (the connection is established already), EINVAL.
        """
        check(lib.rdma_notify(self.pointer, event), "rdma_notify")

    def disconnect(self) -> None:
        """Move the queue pair to its error state and start to disconnect: rdma_disconnect(3).

        Raises:
            VerbsError: EINVAL (never connected); others on iWARP if the peer disconnected first.
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

        The event contains `context`. The id must be bound to a device and be for datagrams. When
        the event is read, the queue pair of the id, if there is one, is attached to the group.

        Raises:
            VerbsError: EINVAL (wrong state, or not for datagrams), ENOSYS (iWARP), EOPNOTSUPP.
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
        """Leave a group: rdma_leave_multicast(3). Blocks until its events are acknowledged.

        Raises:
            VerbsError: EADDRNOTAVAIL (not joined).
        """
        packed = PackedAddress(group)
        check(lib.rdma_leave_multicast(self.pointer, packed.pointer), "rdma_leave_multicast")

    # --- channels ---

    def migrate(self, channel: EventChannel | None) -> None:
        """Move the id and its pending events to another event channel: rdma_migrate_id(3).

        None makes the id synchronous. Blocks until its events are acknowledged. No other thread may
        read the old channel meanwhile. The private channel of a synchronous id is closed.

        Raises:
            VerbsError: EINVAL (synchronous already), EMFILE.
            ValueError: the channel is closed.
        """
        pointer = ffi.NULL if channel is None else channel.open_pointer
        check(lib.rdma_migrate_id(self.pointer, pointer), "rdma_migrate_id")

    def write_event(self, status: int = 0, arg: int = 0) -> None:
        """Add a USER event to the id's channel: rdma_write_cm_event(3). Needs rdma-core 60.

        Callable from any thread. Does not block.

        Raises:
            VerbsError: ENOSYS (rdma-core is too old), EINVAL (Linux before 6.18).
        """
        result = lib.rdma_write_cm_event(self.pointer, CmEventType.USER, status, arg)
        check(result, "rdma_write_cm_event")

    # --- rdma_verbs.h ---

    # --- memory ---

    def reg_msgs(self, buffer: Buffer) -> Registration:
        """Register memory to send from and receive into: rdma_reg_msgs(3). Blocks.

        Raises:
            VerbsError: ENOMEM (the locked-memory limit is reached).
            ValueError: the id has no protection domain yet.
        """
        return self._register(buffer, AccessFlags.LOCAL_WRITE)

    def reg_read(self, buffer: Buffer) -> Registration:
        """Register memory that the peer can read: rdma_reg_read(3). Blocks. Raises: as reg_msgs."""
        return self._register(buffer, AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_READ)

    def reg_write(self, buffer: Buffer) -> Registration:
        """Register memory that the peer can write: rdma_reg_write(3). Raises: as reg_msgs.

        Blocks. `Registration.close` is rdma_dereg_mr(3) for all three functions.
        """
        return self._register(buffer, AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE)

    def _register(self, buffer: Buffer, access: AccessFlags) -> Registration:
        return Registration(self.pd(), buffer, access)

    def pd(self) -> ProtectionDomain:
        """Return the protection domain of the id: the one given, or librdmacm's default.

        The default belongs to the device. Do not close the result.

        Raises:
            ValueError: the id has none yet.
        """
        pointer = self.pointer.pd
        if pointer == ffi.NULL:
            raise ValueError("the id has no protection domain before it is bound to a device")
        return ProtectionDomain.wrap(self.device(), pointer)

    # --- shared receive queues ---

    def create_srq(
        self, pd: ProtectionDomain | None, caps: SharedReceiveQueueCaps
    ) -> SharedReceiveQueue:
        """Make a shared receive queue for the id's queue pair: rdma_create_srq(3).

        Blocks for a system call.

        Raises:
            VerbsError: EINVAL (over a limit of the device), ENOMEM, EOPNOTSUPP.
            ValueError: the id is not bound to a device yet.
        """
        attr = ffi.new("struct ibv_srq_init_attr *")
        caps.fill(attr.attr)
        check(lib.rdma_create_srq(self.pointer, self._pd_pointer(pd), attr), "rdma_create_srq")
        return self._wrap_srq(attr.attr.max_wr, attr.attr.max_sge)

    def create_srq_ex(
        self,
        pd: ProtectionDomain | None,
        caps: SharedReceiveQueueCaps,
        srq_type: SrqType = SrqType.BASIC,
    ) -> SharedReceiveQueue:
        """Make a shared receive queue of a given type: rdma_create_srq_ex(3).

        For XRC, librdmacm also makes the XRC domain and the completion queue.

        Raises:
            VerbsError: EOPNOTSUPP (type not supported by the device), EINVAL, ENOMEM.
            ValueError: the id is not bound to a device yet.
        """
        attr = ffi.new("struct ibv_srq_init_attr_ex *")
        caps.fill(attr.attr)
        attr.srq_type = srq_type
        attr.comp_mask = lib.IBV_SRQ_INIT_ATTR_TYPE | lib.IBV_SRQ_INIT_ATTR_PD
        attr.pd = self._pd_pointer(pd)
        check(lib.rdma_create_srq_ex(self.pointer, attr), "rdma_create_srq_ex")
        return self._wrap_srq(attr.attr.max_wr, attr.attr.max_sge)

    def _pd_pointer(self, pd: ProtectionDomain | None) -> IbvPd:
        """Return the C protection domain. Raise ValueError where C would crash without a device."""
        if not self.has_device:
            raise ValueError("the id is not bound to a device yet")
        return self.pd().open_pointer if pd is None else pd.open_pointer

    def _wrap_srq(self, max_wr: int, max_sge: int) -> SharedReceiveQueue:
        self.srq = SharedReceiveQueue(self.pointer.srq, SharedReceiveQueueCaps(max_wr, max_sge))
        return self.srq

    def destroy_srq(self) -> None:
        """Destroy the shared receive queue, and the objects made for XRC: rdma_destroy_srq(3).

        Do nothing if there is none, or if SharedReceiveQueue.close() has destroyed it already.
        """
        srq, self.srq = self.srq, None
        if srq is None or srq.pointer == ffi.NULL:
            self.pointer.srq = ffi.NULL
            return
        srq.forget()
        lib.rdma_destroy_srq(self.pointer)

    # --- requests ---

    def post_recv(self, wr_id: int, memory: Registration, offset: int, length: int) -> None:
        """Post a receive into one piece of memory: rdma_post_recv(3). Does not block.

        It is posted on the id's shared receive queue if there is one.

        Raises:
            VerbsError: ENOMEM (the queue is full), EINVAL (memory not registered, or wrong state).
            ValueError: the id has no queue pair.
        """
        address = self._address_of(memory, offset, length)
        pointer = self._pointer_with_receives()
        check(
            lib.rdma_post_recv(pointer, _context(wr_id), address, length, memory.pointer),
            "rdma_post_recv",
        )

    def post_send(
        self,
        wr_id: int,
        memory: Registration,
        offset: int,
        length: int,
        flags: SendFlags = _SIGNALED,
    ) -> None:
        """Post a send of one piece of memory: rdma_post_send(3). Raises: as post_recv."""
        address = self._address_of(memory, offset, length)
        check(
            lib.rdma_post_send(
                self._pointer_with_qp(), _context(wr_id), address, length, memory.pointer, flags
            ),
            "rdma_post_send",
        )

    def post_read(
        self, wr_id: int, segment: Segment, remote: int, rkey: int, flags: SendFlags = _SIGNALED
    ) -> None:
        """Post a read of the peer's memory at address `remote`: rdma_post_read(3).

        It is read into a local piece of memory.

        Raises: as post_recv.
        """
        memory, offset, length = segment
        address = self._address_of(memory, offset, length)
        check(
            lib.rdma_post_read(
                self._pointer_with_qp(),
                _context(wr_id),
                address,
                length,
                memory.pointer,
                flags,
                remote,
                rkey,
            ),
            "rdma_post_read",
        )

    def post_write(
        self, wr_id: int, segment: Segment, remote: int, rkey: int, flags: SendFlags = _SIGNALED
    ) -> None:
        """Post a write of a local piece to the peer's address `remote`: rdma_post_write(3).

        Raises: as post_recv.
        """
        memory, offset, length = segment
        address = self._address_of(memory, offset, length)
        check(
            lib.rdma_post_write(
                self._pointer_with_qp(),
                _context(wr_id),
                address,
                length,
                memory.pointer,
                flags,
                remote,
                rkey,
            ),
            "rdma_post_write",
        )

    def post_ud_send(
        self,
        wr_id: int,
        segment: Segment,
        handle: AddressHandle,
        remote_qpn: int,
        flags: SendFlags = _SIGNALED,
    ) -> None:
        """Post a send of a datagram, with the Q_Key of port space UDP: rdma_post_ud_send(3).

        `QueuePair.post_ud_send` sends with any key. Raises: as post_recv.
        """
        memory, offset, length = segment
        address = self._address_of(memory, offset, length)
        check(
            lib.rdma_post_ud_send(
                self._pointer_with_qp(),
                _context(wr_id),
                address,
                length,
                memory.pointer,
                flags,
                handle.pointer,
                remote_qpn,
            ),
            "rdma_post_ud_send",
        )

    def post_recvv(self, wr_id: int, segments: Sequence[Segment]) -> None:
        """Post a receive into several pieces: rdma_post_recvv(3). Raises: as post_recv."""
        sges = self._segments(segments)
        check(
            lib.rdma_post_recvv(
                self._pointer_with_receives(), _context(wr_id), sges, len(segments)
            ),
            "rdma_post_recvv",
        )

    def post_sendv(
        self, wr_id: int, segments: Sequence[Segment], flags: SendFlags = _SIGNALED
    ) -> None:
        """Post a send of several pieces in one message: rdma_post_sendv(3).

        Raises: as post_recv.
        """
        sges = self._segments(segments)
        check(
            lib.rdma_post_sendv(
                self._pointer_with_qp(), _context(wr_id), sges, len(segments), flags
            ),
            "rdma_post_sendv",
        )

    def post_readv(
        self,
        wr_id: int,
        segments: Sequence[Segment],
        remote: int,
        rkey: int,
        flags: SendFlags = _SIGNALED,
    ) -> None:
        """Post a read into several pieces: rdma_post_readv(3). Raises: as post_recv."""
        sges = self._segments(segments)
        check(
            lib.rdma_post_readv(
                self._pointer_with_qp(), _context(wr_id), sges, len(segments), flags, remote, rkey
            ),
            "rdma_post_readv",
        )

    def post_writev(
        self,
        wr_id: int,
        segments: Sequence[Segment],
        remote: int,
        rkey: int,
        flags: SendFlags = _SIGNALED,
    ) -> None:
        """Post a write of several pieces to one address: rdma_post_writev(3).

        The pieces are written one after the other. Raises: as post_recv.
        """
        sges = self._segments(segments)
        check(
            lib.rdma_post_writev(
                self._pointer_with_qp(), _context(wr_id), sges, len(segments), flags, remote, rkey
            ),
            "rdma_post_writev",
        )

    def _segments(self, segments: Sequence[Segment]) -> SgeArray:
        sges = ffi.new("struct ibv_sge[]", len(segments))
        for index, (memory, offset, length) in enumerate(segments):
            _check_inside(memory, offset, length)
            sge = sges[index]
            sge.addr, sge.length, sge.lkey = memory.address + offset, length, memory.lkey
        return sges

    def _address_of(self, memory: Registration, offset: int, length: int) -> VoidPtr:
        _check_inside(memory, offset, length)
        return ffi.cast("void *", memory.address + offset)

    def _pointer_with_qp(self) -> CmIdPtr:
        """Return the C id. Raise ValueError where C would crash without a queue pair."""
        if not self.has_qp:
            raise ValueError("the id has no queue pair")
        return self.pointer

    def _pointer_with_receives(self) -> CmIdPtr:
        if self.pointer.srq == ffi.NULL:
            return self._pointer_with_qp()
        return self.pointer

    # --- completions ---

    def get_send_comp(self) -> Completion:
        """Wait for the next completion of the id's send queue: rdma_get_send_comp(3). Blocks.

        Raises:
            VerbsError: the device was removed.
            ValueError: the id has no completion queue of its own for sending.
        """
        if self.pointer.send_cq_channel == ffi.NULL:
            raise ValueError("the id has no completion queue of its own for sending")
        wc = ffi.new("struct ibv_wc *")
        if lib.rdma_get_send_comp(self.pointer, wc) < 0:
            raise last_error("rdma_get_send_comp")
        return Completion.read(wc)

    def get_recv_comp(self) -> Completion:
        """Wait for the next completion of the id's receive queue: rdma_get_recv_comp(3). Blocks.

        Raises:
            VerbsError: the device was removed.
            ValueError: the id has no completion queue of its own for receiving.
        """
        if self.pointer.recv_cq_channel == ffi.NULL:
            raise ValueError("the id has no completion queue of its own for receiving")
        wc = ffi.new("struct ibv_wc *")
        if lib.rdma_get_recv_comp(self.pointer, wc) < 0:
            raise last_error("rdma_get_recv_comp")
        return Completion.read(wc)

    # --- the end ---

    @property
    def has_own_queues(self) -> bool:
        """True if own_objects() has more than a queue pair."""
        pointer, null = self.pointer, ffi.NULL
        return bool(
            self.srq is not None
            or pointer.recv_cq != null
            or pointer.send_cq != null
            or pointer.recv_cq_channel != null
            or pointer.send_cq_channel != null
        )

    def own_objects(self) -> OwnObjects:
        """Return the objects to destroy after the id. Call this before destroy()."""
        return OwnObjects(self.pointer, self.qp, self.srq)

    def destroy(self) -> None:
        """Free the id: rdma_destroy_id(3). The kernel notifies the peer if the state requires it.

        Can block for events of the id that are not acknowledged, and on iWARP for a connect under
        way. Its queue pair and queues are not destroyed, see own_objects(). A passive endpoint is
        freed by rdma_destroy_ep(3), together with the arguments that C stores.

        Raises:
            VerbsError: the kernel does not have the id.
            ValueError: the id is destroyed already.
        """
        pointer = self.take_pointer()
        if self._is_passive_ep:
            pointer.srq = ffi.NULL  # OwnObjects destroys it
            lib.rdma_destroy_ep(pointer)
        else:
            check(lib.aiordma_destroy_id(pointer), "rdma_destroy_id")

    def take_pointer(self) -> CmIdPtr:
        """Return the C id, which the caller destroys. This object cannot be used any more.

        Raises:
            ValueError: the id is destroyed already.
        """
        pointer = self.pointer
        self.__class__ = _DestroyedCmId  # first: another thread can look for the pointer
        del self.pointer
        return pointer


class _DestroyedCmId(CmId):
    """A CmId without a C id. Only here, because __getattr__() makes all attributes slower."""

    __slots__ = ()

    def __getattr__(self, name: str) -> NoReturn:
        if name == "pointer":
            raise ValueError("the id is destroyed")
        raise AttributeError(f"CmId has no attribute {name!r}")


def _context(wr_id: int) -> VoidPtr:
    return ffi.cast("void *", wr_id)


def _check_inside(memory: Registration, offset: int, length: int) -> None:
    """Raise ValueError for bytes that are not registered, where C has an assertion or no check."""
    if offset < 0 or length < 0 or offset + length > memory.length or not memory.is_open:
        raise ValueError(
            f"bytes {offset} to {offset + length} are not within the {memory.length} registered"
        )
