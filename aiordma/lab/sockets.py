"""The sockets of a lab: its address, and non-blocking sockets in a selector for its thread."""

import selectors
import socket
import struct
from collections.abc import Callable
from typing import Protocol

from . import frames

__all__ = ["SOCKET_PREFIX", "BufferedSocket", "FrameSocket", "Handler", "peer_user"]

SOCKET_PREFIX = "\0aiordma-lab-"
"""The begin of the address of a lab's socket, which is abstract. The id of the lab follows."""

_READ_SIZE = 256 * 1024


_CREDENTIALS = struct.Struct("3i")


def peer_user(connection: socket.socket) -> int:
    """Return the user id of the process at the other end of a Unix socket."""
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    user: int = _CREDENTIALS.unpack(packed)[1]
    return user


class Handler(Protocol):
    """The data of a registered file object: called with the events that are ready."""

    def __call__(self, events: int) -> None: ...


class BufferedSocket:
    """A stream socket in a selector. Bytes that it does not take at once wait in a buffer.

    `on_data` is called with the bytes that arrive, and `on_end` once, when the peer is gone.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        sock: socket.socket,
        on_data: Callable[[bytes], None],
        on_end: Callable[[], None],
    ) -> None:
        self._selector = selector
        self._socket = sock
        self._on_data = on_data
        self._on_end = on_end
        self._out = bytearray()
        self.is_open = True
        sock.setblocking(False)
        selector.register(sock, selectors.EVENT_READ, self._on_ready)

    @property
    def waiting(self) -> int:
        """The number of bytes in the buffer."""
        return len(self._out)

    def send(self, data: bytes) -> None:
        """Send bytes, or store them in the buffer. They are lost if the peer is gone."""
        if self.is_open:
            self._out += data
            if len(self._out) == len(data):
                self._write()

    def close(self) -> None:
        """Close the socket. `on_end` is not called."""
        if self.is_open:
            self.is_open = False
            self._selector.unregister(self._socket)
            self._socket.close()

    def _on_ready(self, events: int) -> None:
        if events & selectors.EVENT_WRITE and self.is_open:
            self._write()
        if events & selectors.EVENT_READ and self.is_open:
            self._read()

    def _read(self) -> None:
        try:
            data = self._socket.recv(_READ_SIZE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self._on_data(data)
        else:
            self.close()
            self._on_end()

    def _write(self) -> None:
        try:
            del self._out[: self._socket.send(self._out)]
        except BlockingIOError:
            pass
        except OSError:  # the end of file that follows is read later
            self._out.clear()
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._out else 0)
        self._selector.modify(self._socket, events, self._on_ready)


class FrameSocket:
    """A buffered socket that carries frames."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        sock: socket.socket,
        on_frame: Callable[["FrameSocket", int, int, bytes], None],
        on_end: Callable[["FrameSocket"], None],
    ) -> None:
        self._reader = frames.FrameReader()
        self._on_frame = on_frame
        self._socket = BufferedSocket(selector, sock, self._on_data, lambda: on_end(self))

    def send(self, kind: int, data: bytes = b"", session: int = 0) -> None:
        """Send a frame."""
        self._socket.send(frames.pack(kind, data, session))

    def close(self) -> None:
        """Close the socket. `on_end` is not called."""
        self._socket.close()

    def _on_data(self, data: bytes) -> None:
        for kind, session, body in self._reader.feed(data):
            if not self._socket.is_open:
                return
            self._on_frame(self, kind, session, body)
