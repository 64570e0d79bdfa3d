"""The frames that the host and the guest exchange over one ordered byte channel.

All frames use a single virtio-serial port: kind (1 byte), length (4 bytes), data. With one channel
the exit code always arrives after the last byte of output.

The host reads a chunk of standard input, and sends it, only after a `STDIN_REQUEST` of the guest.
So input does not accumulate in the guest if the command does not read it, a signal never waits
behind input, and the host sends no frame that the channel cannot take without blocking.

The guest imports this module on an emulated processor. Integers and no `enum` keep that fast.
"""

import struct
from collections.abc import Iterator

__all__ = ["CHUNK", "CLOCK", "PORT_NAME", "FrameReader", "pack"]

PORT_NAME = "aiordma.lab"
CHUNK = 32 * 1024
CLOCK = struct.Struct("!Q")
_HEADER = struct.Struct("!BI")

# From host to guest.
JOB = 1  # the command, its environment and its process settings (see job.py)
STDIN = 2  # a chunk of standard input; an empty chunk means end of file
SIGNAL = 3  # one byte: a signal to send to the command's foreground process group
WINDOW = 4  # terminal size: rows, columns (2 bytes each)
CLOSE = 5  # one byte: the output stream (1 or 2) whose reader has closed it

# From guest to host.
READY = 16  # the guest runs and waits for its JOB; its clock in ms (8 bytes), 0 at its start
STARTED = 17  # the command was started
OUTPUT = 18  # one byte: the stream (1 or 2), then the data
STDIN_REQUEST = 19  # the host can send the next STDIN
EXIT = 20  # one byte: the exit code; the host has received all output and all written files
FAILED = 21  # one sentence: the reason why the guest failed


def pack(kind: int, data: bytes = b"") -> bytes:
    """Return one encoded frame."""
    return _HEADER.pack(kind, len(data)) + data


class FrameReader:
    """A parser that splits a byte stream into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """Add bytes to the buffer; yield each frame that is complete."""
        self._buffer += data
        while len(self._buffer) >= _HEADER.size:
            kind, length = _HEADER.unpack_from(self._buffer)
            end = _HEADER.size + length
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_HEADER.size : end])
            del self._buffer[:end]
            yield kind, body
