"""IdSetup: what is done with an id before it connects: options, the way, the queue pair."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from aiordma._native import ffi, lib
from aiordma.enums import IbOption, IdOption, QpState
from aiordma.errors import check
from aiordma.rdmacm.address import PackedAddress, SocketAddress
from aiordma.rdmacm.addrinfo import AddrInfo, PackedAddrInfo, read_addrinfos
from aiordma.rdmacm.id_verbs import IdVerbs
from aiordma.rdmacm.own_objects import OwnQueue
from aiordma.rdmacm.parameters import Ece
from aiordma.verbs import ProtectionDomain, QueuePair, QueuePairAttributes, QueuePairInit
from aiordma.verbs.queue_pair_init import read_caps

if TYPE_CHECKING:
    from aiordma._native._lib import CmIdPtr

# How each option's value is laid out in C: uint8_t or int.
_OPTION_LAYOUT = {
    IdOption.TOS: struct.Struct("=B"),
    IdOption.REUSEADDR: struct.Struct("=i"),
    IdOption.AFONLY: struct.Struct("=i"),
    IdOption.ACK_TIMEOUT: struct.Struct("=B"),
}


class IdSetup(IdVerbs):
    """The part of CmId that comes before connecting."""

    __slots__ = ("qp",)

    def __init__(self, pointer: CmIdPtr) -> None:
        super().__init__(pointer)
        self.qp: QueuePair | None = None
        """The queue pair made by create_qp(), or by get_request()."""

    # --- options ---

    def set_option(self, option: IdOption | IbOption, value: int | bytes) -> None:
        """Set an option: rdma_set_option(3).

        Those of level ID take a number, `IbOption.PATH` an array of `struct ibv_path_data` as
        bytes; it takes the place of resolve_route(), and "starts".

        Raises:
            VerbsError: EINVAL (too late for it, or not on this kind of id), ENOSYS (unknown).
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
        """Offer options to the peer's card, before the queue pair is made: rdma_set_local_ece(3).

        Raises:
            VerbsError: EINVAL (the id has a queue pair).
        """
        check(lib.rdma_set_local_ece(self.pointer, ece.write()), "rdma_set_local_ece")

    def remote_ece(self) -> Ece:
        """What the peer's card offered, before the queue pair is made: rdma_get_remote_ece(3).

        Raises:
            VerbsError: EINVAL (the id has a queue pair).
        """
        ece = ffi.new("struct ibv_ece *")
        check(lib.rdma_get_remote_ece(self.pointer, ece), "rdma_get_remote_ece")
        return Ece.read(ece)

    # --- finding the way ---

    def bind_addr(self, address: SocketAddress) -> None:
        """Bind to a local address; port 0 picks one: rdma_bind_addr(3). Does not block.

        Raises:
            VerbsError: EADDRINUSE or EADDRNOTAVAIL (taken, or not local), ENODEV, EACCES.
        """
        packed = PackedAddress(address)
        check(lib.rdma_bind_addr(self.pointer, packed.pointer), "rdma_bind_addr")

    def resolve_addr(
        self, source: SocketAddress | None, destination: SocketAddress, timeout_ms: int
    ) -> None:
        """Start to find the device for `destination`: rdma_resolve_addr(3).

        Raises:
            VerbsError: ENETUNREACH, ENODEV, EADDRNOTAVAIL, EINVAL.
        """
        src, dst = PackedAddress(source), PackedAddress(destination)
        check(
            lib.rdma_resolve_addr(self.pointer, src.pointer, dst.pointer, timeout_ms),
            "rdma_resolve_addr",
        )

    def resolve_route(self, timeout_ms: int) -> None:
        """Start to find the route: rdma_resolve_route(3). Can block, where ibacm runs.

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
        """Start to look a name up: rdma_resolve_addrinfo(3), of rdma-core 60 and Linux 6.18.

        With the flag DNS it blocks for the resolver. ADDRINFO_RESOLVED or ADDRINFO_ERROR follows.

        Raises:
            VerbsError: ENOSYS (this rdma-core does not have it), EINVAL (this kernel), EBUSY.
        """
        packed = PackedAddrInfo(hints) if hints is not None else None
        texts = [ffi.NULL if t is None else ffi.new("char[]", t.encode()) for t in (node, service)]
        pointer = packed.pointer if packed is not None else ffi.NULL
        result = lib.aiordma_resolve_addrinfo(self.pointer, texts[0], texts[1], pointer)
        check(result, "rdma_resolve_addrinfo")

    def query_addrinfo(self) -> list[AddrInfo]:
        """What resolve_addrinfo() found: rdma_query_addrinfo(3), of rdma-core 60 and later.

        Raises:
            VerbsError: ENOSYS (this rdma-core does not have it), ENOENT (nothing was resolved).
        """
        out = ffi.new("struct rdma_addrinfo **")
        check(lib.aiordma_query_addrinfo(self.pointer, out), "rdma_query_addrinfo")
        try:
            return read_addrinfos(out[0])
        finally:
            lib.rdma_freeaddrinfo(out[0])

    # --- the queue pair ---

    def create_qp(self, init: QueuePairInit, pd: ProtectionDomain | None = None) -> QueuePair:
        """Make the id's queue pair: rdma_create_qp(3), or rdma_create_qp_ex(3) for create_flags.

        In `pd`, or librdmacm's default one; where `init` names no completion queue, the id gets one
        of its own. System calls.

        Raises:
            VerbsError: EINVAL (more than the device can, or it has one), ENOMEM (memory, or the
                locked-memory limit), EOPNOTSUPP (not this type).
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
            plain = ffi.cast("struct ibv_qp_init_attr *", attr)  # the beginning of the other
            check(lib.rdma_create_qp(self.pointer, pd_pointer, plain), "rdma_create_qp")
        self.qp = QueuePair(self.pointer.qp, read_caps(attr.cap))
        return self.qp

    def destroy_qp(self) -> None:
        """Destroy the queue pair and the id's own completion queues: rdma_destroy_qp(3).

        Waits until their events are acknowledged. Idempotent.
        """
        qp, self.qp = self.qp, None
        if self.has_qp:
            lib.rdma_destroy_qp(self.pointer)
        if qp is not None:
            qp.forget()

    def init_qp_attr(self, state: QpState) -> QueuePairAttributes:
        """What a queue pair made by hand needs to go to `state`: rdma_init_qp_attr(3).

        Raises:
            VerbsError: EINVAL (the id is not so far).
        """
        attributes = QueuePairAttributes.to_state(state)
        mask = ffi.new("int *")
        check(lib.rdma_init_qp_attr(self.pointer, attributes.pointer, mask), "rdma_init_qp_attr")
        attributes.mask = mask[0]
        return attributes

    def send_queue(self) -> OwnQueue:
        """The completion queue for sending that create_qp() made. Raises: ValueError if none."""
        return OwnQueue(self.pointer.send_cq, self.pointer.send_cq_channel)

    def recv_queue(self) -> OwnQueue:
        """The completion queue for receiving that create_qp() made. Raises: ValueError if none."""
        return OwnQueue(self.pointer.recv_cq, self.pointer.recv_cq_channel)
