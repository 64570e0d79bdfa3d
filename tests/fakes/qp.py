"""Memory and completions for tests of an endpoint without a device."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

from aiordma.enums import AccessFlags, WcFlags, WcOpcode, WcStatus


def completion(
    length: int = 0,
    *,
    opcode: WcOpcode = WcOpcode.RECV,
    imm: int | None = None,
    invalidated: int | None = None,
    status: WcStatus = WcStatus.SUCCESS,
    qp_num: int = 17,
) -> Any:
    """Return a fake `struct ibv_wc`."""
    flags, number = WcFlags(0), 0xDEAD
    if imm is not None:
        flags, number = flags | WcFlags.WITH_IMM, socket.htonl(imm)
    if invalidated is not None:
        flags, number = flags | WcFlags.WITH_INV, invalidated
    return SimpleNamespace(
        opcode=opcode,
        byte_len=length,
        wc_flags=int(flags),
        imm_data=number,
        status=status,
        qp_num=qp_num,
        vendor_err=0,
    )


class FakePages:
    """Memory with the attributes of an AllocatedRegion that is not registered."""

    def __init__(self, pd: object, nbytes: int, access: AccessFlags) -> None:
        self.memory = bytearray(nbytes)
        self.view = memoryview(self.memory)
        self.address = 0x7F00_0000_0000
        self.lkey = 99
        self.access = access
        self.closed = False

    def close(self) -> None:
        self.closed = True
