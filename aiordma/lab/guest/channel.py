"""The guest's end of the channel to the host."""

import os
import select

from .. import frames

__all__ = ["Channel", "GuestError", "find_port"]


class GuestError(Exception):
    """A failure in the guest; `str()` is the sentence to send to the host."""


def find_port() -> str:
    """Return the path of the virtio-serial port to the host.

    Raises: GuestError if there is none.
    """
    ports = "/sys/class/virtio-ports"
    for name in os.listdir(ports):
        with open(f"{ports}/{name}/name") as file:
            if file.read().strip() == frames.PORT_NAME:
                return f"/dev/{name}"
    raise GuestError("the guest found no virtio-serial port to the host")


class Channel:
    """The port to the host: sends and receives frames. Only flush() and wait_for() block."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._reader = frames.FrameReader()
        self._out = bytearray()

    @property
    def full(self) -> bool:
        """True if much output waits for the host. The command's output is not read meanwhile."""
        return len(self._out) > frames.CHUNK

    @property
    def pending(self) -> bool:
        """True if there are bytes to write."""
        return bool(self._out)

    def send(self, kind: int, data: bytes = b"", session: int = 0) -> None:
        """Queue a frame and write as much as the port takes."""
        self._out += frames.pack(kind, data, session)
        self.write()

    def write(self) -> None:
        """Write as much as the port takes now."""
        while self._out:
            try:
                written = os.write(self.port, self._out[: frames.CHUNK])
            except BlockingIOError:
                return
            del self._out[:written]

    def flush(self) -> None:
        """Write all queued bytes. Blocks until the port has taken them."""
        while self._out:
            select.select([], [self.port], [])
            self.write()

    def receive(self) -> list[tuple[int, int, bytes]]:
        """Return kind, session and data of the frames that have arrived completely."""
        try:
            data = os.read(self.port, 2 * frames.CHUNK)
        except BlockingIOError:
            return []
        return list(self._reader.feed(data))

    def wait_for(self, kind: int) -> bytes:
        """Wait for a frame of this kind. Return its data. Other frames are discarded."""
        while True:
            select.select([self.port], [], [])
            for got, _, data in self.receive():
                if got == kind:
                    return data
