"""Socket addresses, as C structs and as Python's `(host, port)`."""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from aiordma._native import ffi

if TYPE_CHECKING:
    from aiordma._native._lib import Bytes, RouteAddr, Sockaddr

_INET = struct.Struct("=H2s4s8x")  # sin_family, sin_port, sin_addr, sin_zero
_INET6 = struct.Struct("=H2s4s16sI")  # sin6_family, _port, _flowinfo, _addr, _scope_id
_FAMILY = struct.Struct("=H")


@dataclass(frozen=True, slots=True)
class SocketAddress:
    """A numeric IPv4 or IPv6 address with its port, for librdmacm's arguments and results."""

    host: str
    port: int
    family: socket.AddressFamily = socket.AF_INET
    scope_id: int = 0

    @property
    def pair(self) -> tuple[str, int]:
        """`(host, port)`. A link-local host includes its interface, as in `fe80::1%eth0`."""
        if not self.scope_id:
            return self.host, self.port
        try:
            scope = socket.if_indextoname(self.scope_id)
        except OSError:  # the interface was removed
            scope = str(self.scope_id)
        return f"{self.host}%{scope}", self.port

    def pack(self) -> bytes:
        """Return the bytes of a `struct sockaddr_in` or `struct sockaddr_in6`."""
        port = self.port.to_bytes(2, "big")
        packed = socket.inet_pton(self.family, self.host)
        if self.family == socket.AF_INET6:
            return _INET6.pack(self.family, port, bytes(4), packed, self.scope_id)
        return _INET.pack(self.family, port, packed)


class PackedAddress:
    """A `struct sockaddr *` and the memory behind it."""

    __slots__ = ("_memory", "length", "pointer")

    def __init__(self, address: SocketAddress | None) -> None:
        self.pointer: Sockaddr = ffi.NULL
        self.length = 0
        self._memory: Bytes | None = None
        if address is not None:
            packed = address.pack()
            self.length = len(packed)
            self._memory = ffi.new("char[]", packed)
            self.pointer = ffi.cast("struct sockaddr *", self._memory)


def read_sockaddr(pointer: Sockaddr) -> SocketAddress | None:
    """Return the address at a C pointer; None if it is not set, or of another family."""
    (family,) = _FAMILY.unpack(ffi.buffer(pointer, _FAMILY.size))
    if family == socket.AF_INET:
        _, port, packed = _INET.unpack(ffi.buffer(pointer, _INET.size))
        host = socket.inet_ntop(socket.AF_INET, packed)
        return SocketAddress(host, int.from_bytes(port, "big"))
    if family == socket.AF_INET6:
        _, port, _, packed, scope = _INET6.unpack(ffi.buffer(pointer, _INET6.size))
        host = socket.inet_ntop(socket.AF_INET6, packed)
        return SocketAddress(host, int.from_bytes(port, "big"), socket.AF_INET6, scope)
    return None


class IdAddresses:
    """Copies of the two addresses of an id, which can be read when the id is destroyed.

    They are converted when they are first asked for: most connections are never asked.
    """

    __slots__ = ("_copy", "_local", "_peer")

    def __init__(self, addresses: RouteAddr) -> None:
        self._copy = ffi.new("struct rdma_addr *", addresses)
        # No functools.cached_property: it takes a lock.
        self._local: tuple[str, int] | None = None
        self._peer: tuple[str, int] | None = None

    @property
    def local(self) -> tuple[str, int]:
        """`(host, port)` of this side; `("", 0)` before the id is bound to an address."""
        if self._local is None:
            self._local = _pair(read_sockaddr(ffi.addressof(self._copy[0], "src_addr")))
        return self._local

    @property
    def peer(self) -> tuple[str, int]:
        """`(host, port)` of the peer; `("", 0)` before it is known."""
        if self._peer is None:
            self._peer = _pair(read_sockaddr(ffi.addressof(self._copy[0], "dst_addr")))
        return self._peer


def _pair(address: SocketAddress | None) -> tuple[str, int]:
    return ("", 0) if address is None else address.pair


def parse_address(host: str, port: int = 0) -> SocketAddress:
    """Return the SocketAddress of a numeric host, which can have a scope (`fe80::1%eth0`).

    Raises:
        ValueError: `host` is not a numeric address, or `port` is not between 0 and 65535.
    """
    # The number of an interface can change.
    return _parse_address(host, port) if "%" in host else _parse_unscoped(host, port)


def _parse_address(host: str, port: int) -> SocketAddress:
    if not 0 <= port <= 65535:
        raise ValueError(f"port {port} is not between 0 and 65535")
    bare, percent, scope = host.partition("%")
    family = socket.AF_INET6 if ":" in bare else socket.AF_INET
    try:
        packed = socket.inet_pton(family, bare)
    except OSError as error:
        raise ValueError(f"{host!r} does not appear to be an IPv4 or IPv6 address") from error
    bare = socket.inet_ntop(family, packed)  # one spelling for each address
    if family == socket.AF_INET:
        if percent:
            raise ValueError(f"{host!r}: only an IPv6 address has a scope")
        return SocketAddress(bare, port)
    return SocketAddress(bare, port, socket.AF_INET6, _scope_id(scope) if percent else 0)


_parse_unscoped = lru_cache(maxsize=256)(_parse_address)


def _scope_id(scope: str) -> int:
    if scope.isdecimal() and int(scope) < 1 << 32:
        return int(scope)
    try:
        return socket.if_nametoindex(scope)
    except OSError as error:
        raise ValueError(f"there is no interface {scope!r}") from error


def format_address(pair: tuple[str, int]) -> str:
    """Return `host:port` for messages, with brackets around a host that has colons."""
    host, port = pair
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
