"""A verbs provider in C without a device. The C code posts to it and polls it."""

from __future__ import annotations

import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cffi

from aiordma._native import ffi
from aiordma.enums import WcOpcode, WcStatus

untyped_ffi: Any = ffi
"""The ffi of the library, for casts that _lib.pyi does not declare."""
RECEIVE = 1 << 31
NUMBER_MASK = RECEIVE - 1

_DECLARATIONS = """
struct posted {
    uint64_t wr_id;
    uint64_t address;
    char kind;
    int opcode;
    unsigned int flags;
    int num_sge;
    unsigned int length;
    unsigned int lkey;
    uint64_t remote;
    unsigned int rkey;
    unsigned int imm_data;
    unsigned char data[64];
};
struct fake;
struct fake *fake_new(void);
void fake_free(struct fake *fake);
uintptr_t fake_address(struct fake *fake, char what);
void fake_destroy(struct fake *fake);
void fake_refuse(struct fake *fake, int result, int code);
void fake_accept_sends(struct fake *fake, int count);
void fake_block_posts(struct fake *fake, int on);
void fake_break(struct fake *fake, int poll_result, int arm_result);
unsigned int fake_count(struct fake *fake, char what);
struct posted *fake_post(struct fake *fake, unsigned int index);
void fake_put(struct fake *fake, uint64_t wr_id, int status, int opcode, unsigned int length,
              unsigned int flags, unsigned int imm_data, unsigned int qp_num);
void fake_watch(struct fake *fake, int fd);
"""


def compile_verbs(folder: Path) -> Path:
    """Compile the provider. Return the path of the shared library."""
    library = folder / "fake_verbs.so"
    source = Path(__file__).with_name("fake_verbs.c")
    options = ["-O1", "-g", "-Wall", "-Werror", "-shared", "-fPIC"]
    subprocess.run(["gcc", *options, "-o", str(library), str(source)], check=True)
    return library


@dataclass(frozen=True)
class Posted:
    """A posted work request. `data` is a copy of a send's memory at the time of the posting."""

    kind: str
    wr_id: int
    address: int
    length: int
    lkey: int
    num_sge: int
    opcode: int
    flags: int
    remote: tuple[int, int]
    imm_data: int
    data: bytes


class FakeVerbs:
    """One queue pair, one shared receive queue and one completion queue. The user closes it."""

    def __init__(self, library: Path) -> None:
        self._ffi = cffi.FFI()
        self._ffi.cdef(_DECLARATIONS)
        self._lib: Any = self._ffi.dlopen(str(library))
        self._fake = self._lib.fake_new()
        self.qp_cell, self.srq_cell, self.cq, self.channel = (
            self._lib.fake_address(self._fake, what) for what in (b"p", b"s", b"c", b"h")
        )

    def close(self) -> None:
        self._lib.fake_free(self._fake)

    def destroy(self) -> None:
        """Set the cells of the queue pair and of the shared receive queue to NULL."""
        self._lib.fake_destroy(self._fake)

    def refuse(self, result: int, code: int = 0) -> None:
        """Refuse all requests: posting returns `result`, and sets errno to a `code` that is not 0.

        A `result` of 0 ends that.
        """
        self._lib.fake_refuse(self._fake, result, code)

    def accept_sends(self, count: int) -> None:
        """Accept this number of sends before refuse() takes effect."""
        self._lib.fake_accept_sends(self._fake, count)

    def break_queue(self, poll: int = 0, arm: int = 0) -> None:
        """Set the results of polling (if negative) and of arming."""
        self._lib.fake_break(self._fake, poll, arm)

    def block_posts(self, on: bool) -> None:
        """Block the threads that post, or let them continue."""
        self._lib.fake_block_posts(self._fake, on)

    @property
    def blocked_posts(self) -> int:
        """The number of threads that are blocked."""
        return int(self._lib.fake_count(self._fake, b"h"))

    @property
    def polls(self) -> int:
        """The number of calls of ibv_poll_cq()."""
        return int(self._lib.fake_count(self._fake, b"l"))

    @property
    def calls(self) -> int:
        """The number of calls of ibv_post_send()."""
        return int(self._lib.fake_count(self._fake, b"c"))

    @property
    def arms(self) -> int:
        """The number of calls of ibv_req_notify_cq()."""
        return int(self._lib.fake_count(self._fake, b"a"))

    @property
    def waiting(self) -> int:
        """The number of completions that were not polled yet."""
        return int(self._lib.fake_count(self._fake, b"w"))

    @property
    def acknowledged(self) -> int:
        """The number of acknowledged events of the completion queue."""
        return int(self._lib.fake_count(self._fake, b"e"))

    @property
    def posted(self) -> int:
        """The number of posted requests."""
        return int(self._lib.fake_count(self._fake, b"p"))

    @property
    def posts(self) -> list[Posted]:
        """All posted requests. At most 65536 are stored."""
        return [self.post(index) for index in range(self.posted)]

    def post(self, index: int) -> Posted:
        found = self._lib.fake_post(self._fake, index)
        data = bytes(self._ffi.buffer(found.data))[: found.length]
        return Posted(
            found.kind.decode(),
            found.wr_id,
            found.address,
            found.length,
            found.lkey,
            found.num_sge,
            found.opcode,
            found.flags,
            (found.remote, found.rkey),
            found.imm_data,
            data,
        )

    def put(
        self,
        wr_id: int,
        length: int = 0,
        *,
        status: WcStatus = WcStatus.SUCCESS,
        opcode: WcOpcode = WcOpcode.RECV,
        flags: int = 0,
        imm_data: int = 0,
        qp_num: int = 0,
    ) -> None:
        """Add a completion."""
        self._lib.fake_put(self._fake, wr_id, status, opcode, length, flags, imm_data, qp_num)

    def sent(self, key: int, number: int, status: WcStatus = WcStatus.SUCCESS) -> None:
        """Add the completion of a send."""
        self.put(key << 32 | number, status=status, opcode=WcOpcode.SEND)

    def received(self, key: int, slot: int, length: int = 0, **more: Any) -> None:
        """Add the completion of a receive."""
        self.put(key << 32 | RECEIVE | slot, length, **more)

    def watch(self, descriptor: int) -> None:
        """Make the completion channel read its events from this file descriptor."""
        self._lib.fake_watch(self._fake, descriptor)

    def event(self) -> bytes:
        """Return an event of the completion queue, in the format of the kernel."""
        return struct.pack("Q", self.cq)
