"""What the lab and its guest say to each other, over one ordered byte channel.

Everything travels in frames on a single virtio-serial port: kind (1 byte), length (4 bytes), data.
One channel, because only then is the exit code known to come after the last byte of output.

Standard input is lockstep: the host reads and sends a chunk only after the guest's `WANT`. So
nothing piles up in the guest for a command that does not read, a signal never queues behind data,
and no frame from the host is larger than what the channel takes without blocking.

The guest imports this module on an emulated processor, hence plain integers and no `enum`.
"""

import struct
from collections.abc import Iterator

__all__ = ["CHUNK", "PORT_NAME", "FrameReader", "pack"]

PORT_NAME = "aiordma.lab"
CHUNK = 32 * 1024
_HEADER = struct.Struct("!BI")

# From host to guest.
JOB = 1  # the command and its surroundings (see job.py)
STDIN = 2  # a chunk of standard input; empty at its end
SIGNAL = 3  # one byte: the signal for the command's foreground process group
WINDOW = 4  # terminal size: rows, columns (2 bytes each)
CLOSE = 5  # one byte: nobody reads this output stream (1 or 2) any more

# From guest to host.
HELLO = 16  # the guest runs and waits for its JOB
STARTED = 17  # the command runs
OUTPUT = 18  # one byte: the stream (1 or 2), then the data
WANT = 19  # the next STDIN is welcome
EXIT = 20  # one byte: the exit code; everything the command wrote is with the host by now
FAILED = 21  # a sentence: the guest could not do its part


def pack(kind: int, data: bytes = b"") -> bytes:
    """One frame, ready to be written."""
    return _HEADER.pack(kind, len(data)) + data


class FrameReader:
    """Cuts a byte stream into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """Take in bytes; yield the frames they complete."""
        self._buffer += data
        while len(self._buffer) >= _HEADER.size:
            kind, length = _HEADER.unpack_from(self._buffer)
            end = _HEADER.size + length
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_HEADER.size : end])
            del self._buffer[:end]
            yield kind, body
