"""The control socket of a node: processes in the guest ask the lab for something through it.

A caller sends frames as one on the host does: it opens a session on any node, or sends a request.
The agent passes them on, and does not look into them.
"""

import select
import socket

from .. import frames

__all__ = ["CONTROL_PATH", "Caller", "Listener"]

CONTROL_PATH = "/run/lab/control"


class Listener:
    """The listening socket."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(path)
        self._socket.listen(64)
        self.fd = self._socket.fileno()

    def accept(self) -> "Caller":
        """Accept a caller that has connected."""
        return Caller(self._socket.accept()[0])


class Caller:
    """The connection of one caller."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._socket.setblocking(False)
        self._reader = frames.FrameReader()
        self._out = bytearray()
        self.is_gone = False

    def add_interest(self, interest: dict[int, int], *, can_read: bool) -> None:
        """Add the descriptor to wait for. `can_read`: the channel to the host takes data."""
        events = (select.POLLIN if can_read else 0) | (select.POLLOUT if self._out else 0)
        interest[self._socket.fileno()] = events

    def on_ready(self, ready: dict[int, int]) -> list[tuple[int, bytes]]:
        """Write what waits, and return kind and data of the frames that have arrived."""
        events = ready.get(self._socket.fileno(), 0)
        if events & select.POLLOUT:
            self._write()
        if not events & (select.POLLIN | select.POLLHUP | select.POLLERR):
            return []
        try:
            data = self._socket.recv(2 * frames.CHUNK)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            self.is_gone = True
            self._socket.close()
        return [(kind, body) for kind, _, body in self._reader.feed(data)]

    def send(self, kind: int, data: bytes) -> None:
        """Send a frame of the lab to the caller."""
        self._out += frames.pack(kind, data)
        self._write()

    def _write(self) -> None:
        try:
            del self._out[: self._socket.send(self._out)]
        except BlockingIOError:
            pass
        except OSError:  # the caller is gone: on_ready() notices it
            self._out.clear()
