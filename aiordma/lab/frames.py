"""The frames that a command's caller, the lab and a node's agent exchange over byte channels.

A frame is: kind (1 byte), session (4 bytes), length (4 bytes), data. A session is one command, from
its start until its exit code. Each node has one virtio-serial port, which carries all its sessions.
So the exit code of a command always arrives after the last byte of its output. The lab numbers the
sessions of commands, which are even; the agent numbers those of callers in its node, which are odd.
On the socket of a caller the session is 0.

No channel fills up. The caller reads a chunk of standard input, and sends it, only after a
`STDIN_REQUEST`. The agent reads output only while less than `OUTPUT_WINDOW` bytes wait for
`OUTPUT_TAKEN`. So a command that does not read, or a caller that does not write, delays no other.

The agent imports this module on an emulated processor. Integers and no `enum` keep that fast.
"""

import struct
from collections.abc import Iterator

__all__ = ["CHUNK", "CLOCK", "COUNT", "OUTPUT_WINDOW", "PORT_NAME", "FrameReader", "pack"]

PORT_NAME = "aiordma.lab"
CHUNK = 32 * 1024
OUTPUT_WINDOW = 8 * CHUNK
CLOCK = struct.Struct("!Q")
COUNT = struct.Struct("!I")
_HEADER = struct.Struct("!BII")

# From the lab to an agent, session 0.
SETTINGS = 1  # name, clock and variables of the node (see job.py)

# From the lab to an agent.
JOB = 2  # starts a session: the command, its environment and its process settings (see job.py)

# From a caller, through the lab, to the agent of the command.
STDIN = 3  # a chunk of standard input; an empty chunk means end of file
SIGNAL = 4  # one byte: a signal to send to the command's foreground process group
WINDOW = 5  # terminal size: rows, columns (2 bytes each)
CLOSE = 6  # one byte: the output stream (1 or 2) whose reader has closed it
OUTPUT_TAKEN = 7  # a number of bytes of output that the caller has written (4 bytes)
HANGUP = 8  # the caller is gone: the command is to be killed

# From a caller to the lab.
OPEN = 9  # a node and a job
REQUEST = 10  # a list: the name of an action of the lab, and its arguments

# From an agent to the lab, session 0.
READY = 16  # the guest runs and waits for SETTINGS; its clock in ms (8 bytes), 0 at its start
UP = 17  # the guest has its devices and can run commands

# From the agent of a command, through the lab, to its caller.
STARTED = 18  # the command was started; its process id on the node (4 bytes)
OUTPUT = 19  # one byte: the stream (1 or 2), then the data
STDIN_REQUEST = 20  # the caller can send the next STDIN
EXIT = 21  # one byte: the exit code; the host has all output and all written files
RESULT = 22  # the result of a REQUEST
FAILED = 23  # why the node or the lab failed: a sentence and, in a second line, the path of a log


def pack(kind: int, data: bytes = b"", session: int = 0) -> bytes:
    """Return one encoded frame."""
    return _HEADER.pack(kind, session, len(data)) + data


class FrameReader:
    """A parser that splits a byte stream into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[int, int, bytes]]:
        """Add bytes to the buffer; yield kind, session and data of each frame that is complete."""
        self._buffer += data
        while len(self._buffer) >= _HEADER.size:
            kind, session, length = _HEADER.unpack_from(self._buffer)
            end = _HEADER.size + length
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_HEADER.size : end])
            del self._buffer[:end]
            yield kind, session, body
