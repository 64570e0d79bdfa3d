"""RemoteBuffer: memory of the peer's, as this side names it."""

from __future__ import annotations

import struct
from dataclasses import dataclass

_PACKED = struct.Struct(">QII")


def bounds_of(part: slice, length: int) -> tuple[int, int]:
    """Where a slice of `length` bytes starts, and how long it is.

    Raises:
        ValueError: it has a step.
    """
    start, stop, step = part.indices(length)
    if step != 1:
        raise ValueError("memory can be sliced without a step only")
    return start, max(0, stop - start)


@dataclass(frozen=True, slots=True)
class RemoteBuffer:
    """`length` bytes at address `addr` of the peer, which gave the key `rkey` for them.

    The peer gets it from `MemoryRegion.remote` and sends it along, pickled or packed. Slicing gives
    a part. Nothing is checked here but the bounds: the peer's device checks every access.

    Raises:
        ValueError: a number is out of range.
    """

    addr: int
    rkey: int
    length: int

    def __post_init__(self) -> None:
        for name, bits in (("addr", 64), ("rkey", 32), ("length", 32)):
            value = getattr(self, name)
            if not 0 <= value < 1 << bits:
                raise ValueError(f"{name} is {value}, not a number of {bits} bits")

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, part: slice) -> RemoteBuffer:
        """A part of it: `remote[16:32]`.

        Raises:
            ValueError: the slice has a step.
        """
        start, length = bounds_of(part, self.length)
        return RemoteBuffer(self.addr + start, self.rkey, length)

    def pack(self) -> bytes:
        """16 bytes, in network byte order: the address, the key, the length."""
        return _PACKED.pack(self.addr, self.rkey, self.length)

    @classmethod
    def unpack(cls, data: bytes | bytearray | memoryview) -> RemoteBuffer:
        """What pack() made, from the first 16 bytes.

        Raises:
            ValueError: there are fewer.
        """
        if len(data) < _PACKED.size:
            raise ValueError(f"a RemoteBuffer has {_PACKED.size} bytes, not {len(data)}")
        return cls(*_PACKED.unpack_from(data))
