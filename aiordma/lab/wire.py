"""A wire: a switch for Ethernet frames between the network cards of the nodes.

QEMU connects each card to a stream socket of this process. A frame follows its length (4 bytes).
Nothing leaves this process and its virtual machines.
"""

import selectors
import socket
import struct
from collections.abc import Callable

from .sockets import BufferedSocket

__all__ = ["Wire"]

_LENGTH = struct.Struct("!I")
_ADDRESS_SIZE = 6
# A card's frames are dropped while more than this number of bytes waits, as a switch does.
_QUEUE_LIMIT = 4 * 1024 * 1024


class _Port:
    """The port of one card. It splits the bytes that arrive into frames."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        sock: socket.socket,
        forward: Callable[[bytes], None],
        on_end: Callable[[], None],
    ) -> None:
        self._received = bytearray()
        self._forward = forward
        self._socket = BufferedSocket(selector, sock, self._on_data, on_end)

    def send(self, frame: bytes) -> None:
        """Send a frame, with its length, to the card."""
        if self._socket.waiting < _QUEUE_LIMIT:
            self._socket.send(frame)

    def close(self) -> None:
        """Close the socket of the card."""
        self._socket.close()

    def _on_data(self, data: bytes) -> None:
        received = self._received
        received += data
        begin = 0
        while len(received) >= begin + _LENGTH.size:
            end = begin + _LENGTH.size + _LENGTH.unpack_from(received, begin)[0]
            if len(received) < end:
                break
            self._forward(bytes(received[begin:end]))
            begin = end
        del received[:begin]


class Wire:
    """The wire of one device: it connects the cards of all nodes."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._ports: dict[str, _Port] = {}
        self._macs: dict[bytes, str] = {}
        self._blocked: set[tuple[str, str]] = set()

    def connect(self, node: str, mac: str, sock: socket.socket) -> None:
        """Connect the card of a node. If the node's machine ends, its port is closed."""
        self._macs[bytes.fromhex(mac.replace(":", ""))] = node
        self._ports[node] = _Port(
            self._selector,
            sock,
            lambda frame: self._forward(node, frame),
            lambda: self.disconnect(node),
        )

    def disconnect(self, node: str) -> None:
        """Close the port of a node, if it has one."""
        port = self._ports.pop(node, None)
        if port is not None:
            port.close()

    def block(self, source: str, target: str) -> None:
        """Drop all frames of one node to another."""
        self._blocked.add((source, target))

    def unblock(self, source: str, target: str) -> None:
        """Forward frames of one node to another again."""
        self._blocked.discard((source, target))

    def _forward(self, source: str, frame: bytes) -> None:
        """Send a frame to the node of its address, or to all nodes if it is for several."""
        address = frame[_LENGTH.size : _LENGTH.size + _ADDRESS_SIZE]
        owner = self._macs.get(address)
        for target in list(self._ports) if owner is None else [owner]:
            port = self._ports.get(target)
            if target != source and port and (source, target) not in self._blocked:
                port.send(frame)
