"""AddrInfo: the addresses of a name, and everything else that an endpoint is made from."""

from __future__ import annotations

import errno
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiordma._native import ffi, lib
from aiordma.enums import AddrInfoFlags, PortSpace, QpType
from aiordma.errors import AddressError, VerbsError
from aiordma.rdmacm.address import PackedAddress, SocketAddress, read_sockaddr

if TYPE_CHECKING:
    from aiordma._native._lib import AddrInfoPtr, Bytes, Sockaddr

EAI_BADFLAGS = -1
NO_FLAGS = AddrInfoFlags(0)


@dataclass(frozen=True, slots=True)
class AddrInfo:
    """`struct rdma_addrinfo`. See rdma_getaddrinfo(3).

    As hints: each field that is set narrows the search; `source` is a local address to start from.
    As a result: the argument of CmId.create_ep. `route` is an array of `struct ibv_path_data`.
    `connect` is sent before the private data of a request. Both are empty if ibacm does not run. A
    `qp_type` of None means the default type of the port space.
    """

    flags: AddrInfoFlags = NO_FLAGS
    family: int = 0
    qp_type: QpType | None = None
    port_space: PortSpace = PortSpace.TCP
    source: SocketAddress | None = None
    destination: SocketAddress | None = None
    source_canonname: str = ""
    destination_canonname: str = ""
    route: bytes = b""
    connect: bytes = b""

    @property
    def is_passive(self) -> bool:
        """True for an address to listen at (`source`), not to connect to (`destination`)."""
        return AddrInfoFlags.PASSIVE in self.flags


def default_qp_type(port_space: PortSpace) -> QpType:
    """Return the queue pair type that rdma_create_id(3) chooses for a port space."""
    is_datagram = port_space in (PortSpace.UDP, PortSpace.IPOIB)
    return QpType.UD if is_datagram else QpType.RC


class PackedAddrInfo:
    """A `struct rdma_addrinfo *` and all the memory that it points at."""

    __slots__ = ("_memory", "pointer")

    def __init__(self, info: AddrInfo) -> None:
        self._memory: list[object] = []
        self.pointer = pointer = ffi.new("struct rdma_addrinfo *")
        pointer.ai_flags, pointer.ai_family = info.flags, info.family
        qp_type = default_qp_type(info.port_space) if info.qp_type is None else info.qp_type
        pointer.ai_qp_type, pointer.ai_port_space = qp_type, info.port_space
        pointer.ai_src_addr, pointer.ai_src_len = self._address(info.source)
        pointer.ai_dst_addr, pointer.ai_dst_len = self._address(info.destination)
        pointer.ai_route, pointer.ai_route_len = self._bytes(info.route)
        pointer.ai_connect, pointer.ai_connect_len = self._bytes(info.connect)

    def _address(self, address: SocketAddress | None) -> tuple[Sockaddr, int]:
        packed = PackedAddress(address)
        self._memory.append(packed)
        return packed.pointer, packed.length

    def _bytes(self, data: bytes) -> tuple[Bytes, int]:
        if not data:
            return ffi.NULL, 0
        memory = ffi.new("char[]", data)
        self._memory.append(memory)
        return memory, len(data)


def getaddrinfo(
    node: str | None, service: str | int | None = None, hints: AddrInfo | None = None
) -> list[AddrInfo]:
    """Resolve a name and a port: rdma_getaddrinfo(3). Blocks for the resolver, and for ibacm.

    librdmacm returns the first address only. `node` can be None with the flag PASSIVE. The C list
    is freed before this returns: rdma_freeaddrinfo(3).

    Raises:
        AddressError: the name or the service is unknown (EAI_NONAME or a similar error).
        VerbsError: ENODEV (no RDMA device), ENOMEM.
        ValueError: no node, no service and no address in the hints was given.
    """
    if node is None and service is None and (hints is None or hints.source is None):
        raise ValueError("a node or a service is needed")
    packed = PackedAddrInfo(hints) if hints is not None else None
    out = ffi.new("struct rdma_addrinfo **")
    ffi.errno = 0
    result = lib.rdma_getaddrinfo(
        _text(node),
        _text(None if service is None else str(service)),
        packed.pointer if packed is not None else ffi.NULL,
        out,
    )
    if result:
        raise _failure(result, ffi.errno, node, service)
    try:
        return read_addrinfos(out[0])
    finally:
        lib.rdma_freeaddrinfo(out[0])


def _text(text: str | None) -> Bytes:
    return ffi.NULL if text is None else ffi.new("char[]", text.encode())


def _failure(
    result: int, code: int, node: str | None, service: str | int | None
) -> AddressError | VerbsError:
    # librdmacm returns -1 and sets errno; the resolver's EAI_BADFLAGS is -1, too.
    if result == EAI_BADFLAGS and code:
        return VerbsError(abs(code), "rdma_getaddrinfo")
    if result == socket.EAI_SYSTEM:
        return VerbsError(code or errno.EIO, "rdma_getaddrinfo")
    why = ffi.string(lib.gai_strerror(result)).decode()
    return AddressError(f"{node or '*'}, service {service}, cannot be resolved: {why}")


def read_addrinfos(pointer: AddrInfoPtr) -> list[AddrInfo]:
    """Return the values of a C list."""
    found: list[AddrInfo] = []
    while pointer != ffi.NULL:
        found.append(read_addrinfo(pointer))
        pointer = pointer.ai_next
    return found


def read_addrinfo(pointer: AddrInfoPtr) -> AddrInfo:
    """Return the value of one C struct."""
    return AddrInfo(
        flags=AddrInfoFlags(pointer.ai_flags),
        family=pointer.ai_family,
        qp_type=QpType(pointer.ai_qp_type),
        port_space=PortSpace(pointer.ai_port_space),
        source=_read_address(pointer.ai_src_addr),
        destination=_read_address(pointer.ai_dst_addr),
        source_canonname=_read_text(pointer.ai_src_canonname),
        destination_canonname=_read_text(pointer.ai_dst_canonname),
        route=_read_bytes(pointer.ai_route, pointer.ai_route_len),
        connect=_read_bytes(pointer.ai_connect, pointer.ai_connect_len),
    )


def _read_address(pointer: Sockaddr) -> SocketAddress | None:
    return read_sockaddr(pointer) if pointer != ffi.NULL else None


def _read_text(pointer: Bytes) -> str:
    return ffi.string(pointer).decode() if pointer != ffi.NULL else ""


def _read_bytes(pointer: Bytes, length: int) -> bytes:
    return bytes(ffi.buffer(pointer, length)) if length else b""
