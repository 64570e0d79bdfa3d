"""The peer of a test between two machines: node2 of the lab, and the program of servers there."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import blocking
import loops

from aiordma.lab.nodes import Node
from aiordma.lab.remote import RemoteCommand
from aiordma.rdmacm import DeviceAddress

PROGRAM = Path(__file__).with_name("network") / "peer_program.py"
# Without this capability, the limit of locked memory applies to the program, as to any user's.
WITHOUT_IPC_LOCK = ("setpriv", "--bounding-set", "-ipc_lock")
DESCRIPTORS, MUCH = 1024, 1 << 40
ANSWER_SECONDS = 150.0
HERE = Node("node1")
# $1: the process; $2: a line for rdma.max.
_LIMIT_OBJECTS = """
groups=/run/peer-groups
if [ ! -d $groups ]; then
    mkdir $groups
    mount -t cgroup2 none $groups
    echo +rdma >$groups/cgroup.subtree_control
    mkdir $groups/limited
fi
echo "$2" >$groups/limited/rdma.max
echo "$1" >$groups/limited/cgroup.procs
"""
_LEAVE_GROUP = '[ ! -d /run/peer-groups ] || echo "$1" >/run/peer-groups/cgroup.procs'


class Peer:
    """The program on the other node. mend() undoes what a test did to it and to the wire."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self._program: RemoteCommand | None = None
        self._is_off = False
        self._is_impaired = False
        self._is_suspended = False
        self._is_limited = False

    @property
    def program(self) -> RemoteCommand:
        """The running program."""
        assert self._program is not None
        return self._program

    @property
    def is_running(self) -> bool:
        """True if the program runs, or is stopped by a signal."""
        return self._program is not None

    def close(self) -> None:
        """End the program."""
        if self._program is not None:
            self._program.close()
            self._program = None
            self._is_suspended = self._is_limited = False

    # --- what fails ---

    def power_off(self) -> None:
        """Cut the power of the node."""
        with blocking.allowed():
            self._is_off = True
            self.node.power_off()
            self.close()

    def kill(self) -> None:
        """Kill the program with SIGKILL."""
        with blocking.allowed():
            self.program.kill()
            self.close()

    def suspend(self) -> None:
        """Stop the program with SIGSTOP, until resume(). Return when it has stopped."""
        with blocking.allowed():
            self._is_suspended = True
            self.program.send_signal(signal.SIGSTOP)
            stat = ("cat", f"/proc/{self.program.pid}/stat")
            while self.node.run(*stat).rpartition(") ")[2][0] != "T":
                pass

    def resume(self) -> None:
        """Let the program go on."""
        with blocking.allowed():
            self._is_suspended = False
            self.program.send_signal(signal.SIGCONT)

    def netem(self, *words: str) -> None:
        """Lose, delay or change the packets in both directions, in the words of tc-netem(8)."""
        with blocking.allowed():
            self._is_impaired = bool(words)
            for node in (HERE, self.node):
                node.netem(*words)

    def pull_cable(self) -> None:
        """Pull the cables of the node."""
        with blocking.allowed():
            self.node.pull_cable()

    def plug_cable(self) -> None:
        """Put the cables back."""
        with blocking.allowed():
            self.node.plug_cable()

    def block(self, *, to_peer: bool = False, from_peer: bool = False) -> None:
        """Lose all packets in one direction, or in both."""
        with blocking.allowed():
            if to_peer:
                HERE.block(self.node.name)
            if from_peer:
                self.node.block(HERE.name)

    def unblock(self) -> None:
        """Let packets pass in both directions."""
        with blocking.allowed():
            HERE.unblock(self.node.name)
            self.node.unblock(HERE.name)

    # --- what is used up ---

    def limit_locked_memory(self, nbytes: int) -> None:
        """Limit the memory that the program may register."""
        with blocking.allowed():
            self._is_limited = True
            self.node.limit_locked_memory(self.program.pid, nbytes)

    def limit_descriptors(self, count: int) -> None:
        """Let the program open no descriptor with the number `count` or above."""
        with blocking.allowed():
            self._is_limited = True
            self.node.limit_descriptors(self.program.pid, count)

    def limit_objects(self, device: str, count: int | str) -> None:
        """Limit the RDMA objects of a device that the program may make from now on.

        The limit is that of an rdma control group. Objects that exist do not count.
        """
        with blocking.allowed():
            self._is_limited = True
            limit = f"{device} hca_object={count}"
            self.node.run("sh", "-ec", _LIMIT_OBJECTS, "limit", str(self.program.pid), limit)

    # --- and works again ---

    def lift_limits(self) -> None:
        """Undo the limits of the program."""
        with blocking.allowed():
            self._is_limited = False
            self.node.limit_locked_memory(self.program.pid, MUCH)
            self.node.limit_descriptors(self.program.pid, DESCRIPTORS)
            self.node.run("sh", "-ec", _LEAVE_GROUP, "leave", str(self.program.pid))

    def mend(self) -> None:
        """Undo all faults. Boot the node if its power is off, and start the program."""
        with blocking.allowed():
            if self._is_off:
                self._is_off = False
                self.node.power_on()
            if self._is_impaired:
                self.netem()
            self.unblock()
            self.plug_cable()
            if self._is_suspended:
                self.resume()
            if self._is_limited:
                self.lift_limits()
            if self._program is None:
                self._program = self.node.start(*WITHOUT_IPC_LOCK, sys.executable, str(PROGRAM))
                self._read_answer()

    def stop(self) -> dict[str, int]:
        """End all servers and connections of the program. Return the RDMA resources left there."""
        with blocking.allowed():
            try:
                left: dict[str, int] = self._ask("stop", (), {})
            except TimeoutError:
                self.kill()  # so that the next test has a program that answers
                raise
            return left

    async def command(self, name: str, *arguments: object, **options: Any) -> Any:
        """Have the program perform a command. Return its answer."""
        return await loops.to_thread(self._ask, name, arguments, options)

    def _ask(self, name: str, arguments: tuple[object, ...], options: dict[str, Any]) -> Any:
        self.program.write(json.dumps([name, arguments, options]).encode() + b"\n")
        return self._read_answer()

    def _read_answer(self) -> Any:
        while True:
            word, _, text = self.program.read_line(ANSWER_SECONDS).partition(" ")
            if word == "answer":
                return json.loads(text)
            print("peer:", word, text)  # pytest shows it if the test fails

    def host(self, address: DeviceAddress) -> str:
        """Return the address of the peer's device that this node reaches with the device."""
        driver = address.device.rstrip("0").upper()
        return os.environ[f"AIORDMA_LAB_NODE2_{driver}{'6' if ':' in address.host else ''}"]
