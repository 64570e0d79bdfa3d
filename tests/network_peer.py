"""The peer of a test between two machines: node2 of the lab, and the program of servers there."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import blocking
import loops

from aiordma.lab.nodes import Node
from aiordma.lab.remote import RemoteCommand
from aiordma.rdmacm import DeviceAddress

PROGRAM = Path(__file__).with_name("network") / "peer_program.py"
LIMIT = 150.0
HERE = Node("node1")


class Peer:
    """The program on the other node. It is started again when the node has lost its power."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self._program: RemoteCommand | None = None
        self._impaired = False

    @property
    def program(self) -> RemoteCommand:
        """The running program."""
        assert self._program is not None
        return self._program

    def start(self) -> None:
        """Start the program."""
        self._program = self.node.start(sys.executable, str(PROGRAM))
        while self._program.read_line(LIMIT) != "ready":
            pass

    def close(self) -> None:
        """End the program."""
        if self._program is not None:
            self._program.close()
            self._program = None

    def mend(self) -> None:
        """Undo all faults: boot the node if its power is off, and start the program."""
        with blocking.allowed():
            if self._impaired:
                self._impaired = False
                self.netem()
            HERE.unblock(self.node.name)
            self.node.unblock(HERE.name)
            for node in (HERE, self.node):
                if self._program is not None:
                    node.plug_cable()
            if self._program is None:
                self.node.power_on()
                self.start()

    def power_off(self) -> None:
        """Cut the power of the node."""
        with blocking.allowed():
            self.node.power_off()
            self.close()

    def netem(self, *words: str) -> None:
        """Lose, delay or change the packets in both directions, in the words of tc-netem(8)."""
        with blocking.allowed():
            self._impaired |= bool(words)
            for node in (HERE, self.node):
                node.netem(*words)

    async def command(self, name: str, *arguments: object, **options: Any) -> Any:
        """Have the program perform a command. Return its answer."""
        line = json.dumps([name, arguments, options])

        def ask() -> Any:
            self.program.write(line.encode() + b"\n")
            return json.loads(self.program.read_line(LIMIT))

        return await loops.to_thread(ask)

    def host(self, address: DeviceAddress) -> str:
        """Return the address of the peer's device that this node reaches with the device."""
        driver = address.device.rstrip("0").upper()
        return os.environ[f"AIORDMA_LAB_NODE2_{driver}{'6' if ':' in address.host else ''}"]
