"""QEMU's monitor: commands in JSON (QMP) to a running virtual machine."""

import json
import selectors
import socket
from collections import deque
from collections.abc import Callable

from .sockets import BufferedSocket

__all__ = ["Monitor"]

Done = Callable[[str | None], None]
"""A function that is called with the error of a command, or with None."""


class Monitor:
    """The connection to the monitor of one virtual machine."""

    def __init__(self, selector: selectors.BaseSelector, sock: socket.socket) -> None:
        self._received = bytearray()
        self._waiting: deque[Done] = deque()
        self._socket = BufferedSocket(selector, sock, self._on_data, self._on_end)
        self._execute("qmp_capabilities", {}, lambda error: None)

    def set_link(self, card: str, up: bool, done: Done) -> None:
        """Plug the cable of a network card in, or pull it. The guest sees its carrier change."""
        self._execute("set_link", {"name": card, "up": up}, done)

    def close(self) -> None:
        """Close the connection. Commands under way fail."""
        self._socket.close()
        self._on_end()

    def _execute(self, command: str, arguments: dict[str, object], done: Done) -> None:
        self._waiting.append(done)
        request = {"execute": command, "arguments": arguments}
        self._socket.send(json.dumps(request).encode() + b"\n")

    def _on_data(self, data: bytes) -> None:
        self._received += data
        *lines, rest = self._received.split(b"\n")
        self._received = rest
        for line in lines:
            answer = json.loads(line)
            if "return" in answer:
                self._waiting.popleft()(None)
            elif "error" in answer:
                self._waiting.popleft()(answer["error"]["desc"])

    def _on_end(self) -> None:
        while self._waiting:
            self._waiting.popleft()("the machine has ended")
