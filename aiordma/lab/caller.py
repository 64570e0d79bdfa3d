"""The caller's end of a connection to the lab: frames over a blocking socket."""

import contextlib
import select
import socket
from collections.abc import Iterator

from . import frames
from .errors import LabError

__all__ = ["CallerSocket"]


class CallerSocket:
    """A socket that carries one command or one request, and is closed after a `with` block."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._reader = frames.FrameReader()

    def __enter__(self) -> "CallerSocket":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the socket. The lab then kills the command, if it still runs."""
        self._socket.close()

    def fileno(self) -> int:
        """Return the descriptor of the socket."""
        return self._socket.fileno()

    def is_ready(self, timeout: float | None) -> bool:
        """Wait until receive() need not block, at most `timeout` seconds. Return False then."""
        return bool(select.select([self._socket], [], [], timeout)[0])

    def send(self, kind: int, data: bytes) -> None:
        """Send a frame. If the lab has ended, the next receive() raises."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._socket.sendall(frames.pack(kind, data))

    def receive(self) -> Iterator[tuple[int, bytes]]:
        """Yield kind and data of the frames that have arrived, after waiting for some data.

        Raises: LabError if the lab has ended, or if it has failed: after the frames before that.
        """
        try:
            data = self._socket.recv(4 * frames.CHUNK)
        except ConnectionResetError:
            data = b""
        if not data:
            raise LabError("the lab has ended")
        for kind, _, body in self._reader.feed(data):
            if kind == frames.FAILED:
                raise LabError.from_reason(body.decode(errors="replace"))
            yield kind, body
