"""AddressHandle: the destination of datagrams; AddressHandleAttributes: the path to it."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiordma._native import ffi, lib
from aiordma.enums import WcFlags
from aiordma.errors import check_errno, last_error

if TYPE_CHECKING:
    from aiordma._native._lib import Gid, IbvAh, IbvAhAttr
    from aiordma.verbs.device import Device
    from aiordma.verbs.protection_domain import ProtectionDomain

GID_SIZE = 16
GRH_SIZE = 40


def read_gid(gid: Gid) -> bytes:
    """Return the 16 bytes of a C gid."""
    return bytes(ffi.buffer(gid.raw, GID_SIZE))


def make_gid(raw: bytes) -> Gid:
    """Return a C gid with these 16 bytes.

    Raises:
        ValueError: there are more or fewer bytes.
    """
    if len(raw) != GID_SIZE:
        raise ValueError(f"a gid has {GID_SIZE} bytes, not {len(raw)}")
    gid = ffi.new("union ibv_gid *")
    ffi.memmove(gid.raw, raw, GID_SIZE)
    return gid


def gid_host(gid: bytes) -> str:
    """Return the IP address in a RoCE gid. Any other gid gives an IPv6 address, too."""
    address = ipaddress.IPv6Address(gid)
    return str(address.ipv4_mapped or address)


@dataclass(frozen=True, slots=True)
class LinkHeader:
    """The fields of a datagram's `struct ibv_wc` about the link to its sender.

    `is_global` is True if the datagram has a global route header (IBV_WC_GRH). RoCE sets only this
    field.
    """

    slid: int = 0
    sl: int = 0
    dlid_path_bits: int = 0
    is_global: bool = True


@dataclass(frozen=True, slots=True)
class AddressHandleAttributes:
    """`struct ibv_ah_attr`: the path to a port. See ibv_create_ah(3).

    `dgid` to `traffic_class` are its `grh` (global route header), which is used if `is_global`.
    """

    dlid: int = 0
    sl: int = 0
    src_path_bits: int = 0
    static_rate: int = 0
    is_global: bool = False
    port_num: int = 1
    dgid: bytes = bytes(GID_SIZE)
    flow_label: int = 0
    sgid_index: int = 0
    hop_limit: int = 0
    traffic_class: int = 0

    @classmethod
    def read(cls, attr: IbvAhAttr) -> AddressHandleAttributes:
        """Return the value of a C struct."""
        grh = attr.grh
        return cls(
            dlid=attr.dlid,
            sl=attr.sl,
            src_path_bits=attr.src_path_bits,
            static_rate=attr.static_rate,
            is_global=bool(attr.is_global),
            port_num=attr.port_num,
            dgid=read_gid(grh.dgid),
            flow_label=grh.flow_label,
            sgid_index=grh.sgid_index,
            hop_limit=grh.hop_limit,
            traffic_class=grh.traffic_class,
        )

    @classmethod
    def of_sender(
        cls, device: Device, port_num: int, link: LinkHeader, grh: bytes
    ) -> AddressHandleAttributes:
        """Return the path back to the sender of a datagram: ibv_init_ah_from_wc(3).

        `grh` is the 40 bytes before the datagram. Reads system files.

        Raises:
            VerbsError: EINVAL (the datagram's destination is no address of the port, but for
                example a group).
            ValueError: `grh` does not have 40 bytes.
        """
        if len(grh) != GRH_SIZE:
            raise ValueError(f"a global route header has {GRH_SIZE} bytes, not {len(grh)}")
        wc = ffi.new("struct ibv_wc *")
        wc.slid, wc.sl, wc.dlid_path_bits = link.slid, link.sl, link.dlid_path_bits
        wc.wc_flags = WcFlags.GRH if link.is_global else 0
        attr = ffi.new("struct ibv_ah_attr *")
        error = lib.aiordma_ah_from_wc(
            device.context, port_num, wc, ffi.from_buffer("char[]", grh), attr
        )
        check_errno(error, "ibv_init_ah_from_wc")
        return cls.read(attr)

    def write(self) -> IbvAhAttr:
        """Return a C struct with this value."""
        attr = ffi.new("struct ibv_ah_attr *")
        attr.dlid, attr.sl, attr.src_path_bits = self.dlid, self.sl, self.src_path_bits
        attr.static_rate, attr.is_global, attr.port_num = (
            self.static_rate,
            self.is_global,
            self.port_num,
        )
        ffi.memmove(attr.grh.dgid.raw, self.dgid, GID_SIZE)
        attr.grh.flow_label, attr.grh.sgid_index = self.flow_label, self.sgid_index
        attr.grh.hop_limit, attr.grh.traffic_class = self.hop_limit, self.traffic_class
        return attr


class AddressHandle:
    """`struct ibv_ah`: the destination of datagrams."""

    __slots__ = ("pointer",)

    def __init__(self, pd: ProtectionDomain, attributes: AddressHandleAttributes) -> None:
        """Create an address handle: ibv_create_ah(3).

        Can block for seconds on RoCE, while the kernel resolves the neighbour's address.

        Raises:
            VerbsError: EINVAL (no such path), ENOMEM, ETIMEDOUT.
            ValueError: the protection domain is closed.
        """
        if pd.pointer is None:
            raise ValueError("the protection domain is closed")
        pointer = lib.ibv_create_ah(pd.pointer, attributes.write())
        if pointer == ffi.NULL:
            raise last_error("ibv_create_ah")
        self.pointer: IbvAh = pointer

    def close(self) -> None:
        """Destroy the handle: ibv_destroy_ah(3). Idempotent.

        All sends that use the handle must have completed.
        """
        pointer, self.pointer = self.pointer, ffi.NULL
        if pointer != ffi.NULL:
            check_errno(lib.ibv_destroy_ah(pointer), "ibv_destroy_ah")
