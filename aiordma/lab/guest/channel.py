"""The guest's end of the channel to the host."""

import os
import select

from .. import frames

__all__ = ["Channel", "GuestError", "find_port"]


class GuestError(Exception):
    """A sentence for the host."""


def find_port() -> str:
    """The device file of the port to the host.

    Raises: GuestError when there is none.
    """
    ports = "/sys/class/virtio-ports"
    for name in os.listdir(ports):
        with open(f"{ports}/{name}/name") as file:
            if file.read().strip() == frames.PORT_NAME:
                return f"/dev/{name}"
    raise GuestError("the guest found no channel to the host")


class Channel:
    """The port to the host: frames in, frames out, nothing blocks."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._reader = frames.FrameReader()
        self._out = bytearray()

    @property
    def full(self) -> bool:
        """Output waits for the host; the commands's streams should not be read now."""
        return len(self._out) > frames.CHUNK

    @property
    def pending(self) -> bool:
        """There is something to write."""
        return bool(self._out)

    def send(self, kind: int, data: bytes = b"") -> None:
        """Queue a frame and write what the port takes."""
        self._out += frames.pack(kind, data)
        self.write()

    def write(self) -> None:
        """Write what the port takes now."""
        while self._out:
            try:
                written = os.write(self.port, self._out[: frames.CHUNK])
            except BlockingIOError:
                return
            del self._out[:written]

    def flush(self) -> None:
        """Write everything."""
        while self._out:
            select.select([], [self.port], [])
            self.write()

    def receive(self) -> list[tuple[int, bytes]]:
        """The frames that arrived."""
        try:
            data = os.read(self.port, 2 * frames.CHUNK)
        except BlockingIOError:
            return []
        return list(self._reader.feed(data))

    def wait_for(self, kind: int) -> bytes:
        """Wait for the one frame that can come now."""
        while True:
            select.select([self.port], [], [])
            for got, data in self.receive():
                if got == kind:
                    return data
