"""The counts that `rdma resource show` prints, requested from the kernel over netlink.

Starting a process for them takes too long. See linux/rdma/rdma_netlink.h.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

NETLINK_RDMA = 20
RES_GET = (5 << 10) | 9  # RDMA_NL_NLDEV, RDMA_NLDEV_CMD_RES_GET
REQUEST_DUMP = 0x1 | 0x300
DONE = 3
NAME, SUMMARY, ENTRY_NAME, ENTRY_COUNT = 2, 15, 17, 18
_HEADER = struct.Struct("=IHHII")


def rdma_resources() -> dict[str, dict[str, int]]:
    """Return the number of objects of each kind on each device of this machine."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_RDMA) as kernel:
        kernel.send(_HEADER.pack(_HEADER.size, RES_GET, REQUEST_DUMP, 1, 0))
        return dict(_devices(kernel))


def _devices(kernel: socket.socket) -> Iterator[tuple[str, dict[str, int]]]:
    while True:
        rest = kernel.recv(1 << 16)
        while rest:
            length, kind, *_ = _HEADER.unpack_from(rest)
            if kind == DONE:
                return
            yield _device(rest[_HEADER.size : length])
            rest = rest[(length + 3) & ~3 :]


def _device(message: bytes) -> tuple[str, dict[str, int]]:
    attributes = dict(_attributes(message))
    entries = (dict(_attributes(entry)) for _, entry in _attributes(attributes[SUMMARY]))
    counts = {
        _text(entry[ENTRY_NAME]): int.from_bytes(entry[ENTRY_COUNT], "little") for entry in entries
    }
    return _text(attributes[NAME]), counts


def _text(value: bytes) -> str:
    return value.rstrip(b"\0").decode()


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    while data:
        length, kind = struct.unpack_from("=HH", data)
        yield kind & 0x3FFF, data[4:length]
        data = data[(length + 3) & ~3 :]
