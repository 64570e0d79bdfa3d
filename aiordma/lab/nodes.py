"""The nodes of a running lab, for tests and tools: run programs there, and bring about faults.

These calls block. They work in a process on a node, and on the machine that runs the lab.
"""

import sys
from dataclasses import dataclass
from typing import cast

from .control import connect, request
from .errors import LabError
from .remote import RemoteCommand

__all__ = ["Node", "NodeState", "nodes"]

_JUMP_CLOCK = """
import sys, time
time.clock_settime(time.CLOCK_REALTIME, time.time() + float(sys.argv[1]))
"""
# Sets the queue of each chosen device. The first queue of packets is taken away before another one
# is set, because options that are not named would stay.
_SET_QUEUES = """
device=$1
shift
[ $# = 0 ] || modprobe sch_netem
for path in /sys/class/net/*-wire /sys/class/net/*-veth; do
    name=${path##*/}
    [ -e "$path" ] && { [ "$device" = all ] || [ "$device" = "${name%-*}" ]; } || continue
    tc qdisc replace dev "$name" root pfifo
    [ $# = 0 ] || tc qdisc replace dev "$name" root netem limit 10000 "$@"
    found=yes
done
[ "$found" ] || { echo "no device $device"; exit 1; }
"""
# The memory is locked, so that the kernel cannot move it to where it fits.
_TAKE_MEMORY = """
import ctypes, mmap, os, sys
with open("/proc/self/oom_score_adj", "w") as file:
    file.write("-1000")
with open("/proc/meminfo") as file:
    fields = dict(line.split(":") for line in file)
available = int(fields["MemAvailable"].split()[0]) * 1024
memory = mmap.mmap(-1, max(available - int(sys.argv[1]), mmap.PAGESIZE))
libc = ctypes.CDLL(None, use_errno=True)
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
if libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(len(memory))):
    raise OSError(ctypes.get_errno(), "mlock")
print(len(memory), flush=True)
sys.stdin.read()
"""


@dataclass(frozen=True)
class NodeState:
    """The state of a node, and the addresses of its devices by "rxe", "rxe6", "siw" and "siw6"."""

    name: str
    state: str  # "off", "booting" or "up"
    addresses: dict[str, str]


def nodes(lab: str | None = None) -> list[NodeState]:
    """Return the nodes of a lab.

    Raises: LabError if no lab runs, or if several run and `lab` names none.
    """
    described = cast(list[dict[str, str]], request("nodes", lab=lab))
    return [NodeState(one.pop("name"), one.pop("state"), one) for one in described]


@dataclass(frozen=True)
class Node:
    """A node of a running lab. Each method raises LabError if the lab cannot do it.

    `lab` is the id of the lab. A process in a node does not need it.
    """

    name: str
    lab: str | None = None

    def start(self, *argv: str) -> RemoteCommand:
        """Start a command on the node, with the variables and the directory of this process."""
        return RemoteCommand(connect(self.lab), self.name, argv)

    def run(self, *argv: str, data: bytes = b"") -> str:
        """Run a command on the node with `data` as its input. Return its output.

        Raises: LabError with its last line of output if its exit code is not 0.
        """
        with self.start(*argv) as command:
            if data:
                command.write(data)
            command.close_stdin()
            code = command.wait()
            output = command.take_output().decode(errors="replace")
        if code:
            last = output.strip().rpartition("\n")[2]
            raise LabError(f"{argv[0]} on {self.name} ended with {code}: {last}")
        return output

    def power_off(self) -> None:
        """Cut the power of the node. Nothing that runs on it notices before it ends."""
        request("power-off", self.name, lab=self.lab)

    def power_on(self) -> None:
        """Boot the node, and wait until it has its devices. It has its files and no processes."""
        request("power-on", self.name, lab=self.lab)

    def pull_cable(self, device: str = "all") -> None:
        """Pull the cable of a device, "rxe" or "siw", or all cables. The card loses its carrier."""
        request("pull", self.name, device, lab=self.lab)

    def plug_cable(self, device: str = "all") -> None:
        """Plug a cable in again."""
        request("plug", self.name, device, lab=self.lab)

    def block(self, target: str) -> None:
        """Drop all frames from this node to the node `target`. No card notices it."""
        request("block", self.name, target, lab=self.lab)

    def unblock(self, target: str) -> None:
        """Forward frames from this node to the node `target` again."""
        request("unblock", self.name, target, lab=self.lab)

    def netem(self, *words: str, device: str = "all") -> None:
        """Lose, delay, duplicate, reorder or corrupt packets that the node sends.

        `words` are those of tc-netem(8), such as "loss", "5%". Without words, packets are sent as
        they are again. `device` is "rxe", "siw" or "all".
        """
        self.run("sh", "-ec", _SET_QUEUES, "netem", device, *words)

    def jump_clock(self, seconds: float) -> None:
        """Set the clock of the node forward, or back if `seconds` is negative."""
        self.run(sys.executable, "-c", _JUMP_CLOCK, str(seconds))

    def take_memory(self, left: int) -> RemoteCommand:
        """Lock all memory of the node but about `left` bytes, until the command is closed."""
        command = self.start(sys.executable, "-c", _TAKE_MEMORY, str(left))
        command.read_line()
        return command

    def limit_descriptors(self, pid: int, limit: int) -> None:
        """Limit the open files of a process on the node, as setrlimit(2) does."""
        self.run("prlimit", f"--pid={pid}", f"--nofile={limit}:{limit}")

    def limit_locked_memory(self, pid: int, limit: int) -> None:
        """Limit the bytes of memory that a process on the node may lock or register."""
        self.run("prlimit", f"--pid={pid}", f"--memlock={limit}:{limit}")
