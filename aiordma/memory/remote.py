"""RemoteBuffer: the address, key and length of registered memory of the peer."""

from __future__ import annotations

import struct
from dataclasses import dataclass

_PACKED = struct.Struct(">QII")


def bounds_of(part: slice, length: int) -> tuple[int, int]:
    """Return the start and the length, both in bytes, of a slice of `length` bytes of memory.

    Raises:
        ValueError: the slice has a step.
    """
    start, stop, step = part.indices(length)
    if step != 1:
        raise ValueError("memory can only be sliced without a step")
    return start, max(0, stop - start)


@dataclass(frozen=True, slots=True)
class RemoteBuffer:
    """Memory of the peer: `length` bytes at address `addr`, which the remote key `rkey` names.

    The peer gets the object from `MemoryRegion.remote`, and sends what pack() returns. Slicing
    returns a part. This side checks only the bounds; the peer's device checks every access.

    Pickling is for processes that trust each other. Never unpickle what a peer has sent: that can
    run any code.

    Raises:
        ValueError: `addr`, `rkey` or `length` is out of range.
    """

    addr: int
    rkey: int
    length: int

    def __post_init__(self) -> None:
        for name, bits in (("addr", 64), ("rkey", 32), ("length", 32)):
            value = getattr(self, name)
            if not 0 <= value < 1 << bits:
                raise ValueError(f"{name} is {value}, not a number of {bits} bits")

    def __reduce__(self) -> tuple[type[RemoteBuffer], tuple[int, int, int]]:
        """Pickle the arguments, so that unpickling checks them."""
        return RemoteBuffer, (self.addr, self.rkey, self.length)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, part: slice) -> RemoteBuffer:
        """Return a part of the memory. The bounds are in bytes: `remote[16:32]`.

        Raises:
            ValueError: the slice has a step.
        """
        start, length = bounds_of(part, self.length)
        return RemoteBuffer(self.addr + start, self.rkey, length)

    def pack(self) -> bytes:
        """Return 16 bytes, in network byte order: the address, the key, the length."""
        return _PACKED.pack(self.addr, self.rkey, self.length)

    @classmethod
    def unpack(cls, data: bytes | bytearray | memoryview) -> RemoteBuffer:
        """Return the RemoteBuffer that pack() turned into the first 16 bytes of `data`.

        Raises:
            ValueError: `data` has fewer than 16 bytes.
        """
        if len(data) < _PACKED.size:
            raise ValueError(f"a RemoteBuffer has {_PACKED.size} bytes, not {len(data)}")
        return cls(*_PACKED.unpack_from(data))
