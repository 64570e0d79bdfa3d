"""A node: one virtual machine of a lab. Its power can be cut, and it can boot again."""

import contextlib
import selectors
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from . import frames, job, packages, qemu
from .devices import Device, addresses
from .files import MemoryFile
from .monitor import Monitor
from .sockets import FrameSocket
from .wire import Wire

__all__ = ["Done", "Node", "NodeOptions"]

# The guest's clock may be this many times as fast as the host's.
_CLOCK_TOLERANCE = 1.25
_BOOTS = 5
"""The number of boots until the guest's clock must be right."""

Done = Callable[[str | None], None]
"""A function that is called with the reason of a failure, or with None."""


@dataclass(frozen=True)
class NodeOptions:
    """The settings of a node. `machine` lacks the files and the cards, which each boot makes."""

    name: str
    title: str  # for messages
    hostname: str
    program: str  # the path of QEMU
    machine: qemu.Machine
    initramfs: bytes
    devices: tuple[Device, ...]
    variables: Mapping[str, str]  # commands on the node get these, and the devices' addresses
    boot_timeout: float


class Node:
    """A virtual machine, the channel to the agent in it, and its monitor.

    `on_frame` is called with each frame of a session, and `on_off` with the reason when the machine
    has ended. A reason is a sentence and, in a second line, the path of a log if there is one.
    """

    def __init__(
        self,
        options: NodeOptions,
        selector: selectors.BaseSelector,
        wires: Mapping[str, Wire],
        on_frame: Callable[["Node", int, int, bytes], None],
        on_off: Callable[["Node", str], None],
    ) -> None:
        self.name = options.name
        self.devices = options.devices
        self._options = options
        self._selector = selector
        self._wires = wires
        self._on_frame = on_frame
        self._on_off = on_off
        self._run: _Run | None = None
        self._boots = 0
        self._waiting: list[Done] = []
        self._last_session = 0

    @property
    def state(self) -> str:
        """The state: "off", "booting" or "up"."""
        if self._run is None:
            return "off"
        return "up" if self._run.is_up else "booting"

    @property
    def deadline(self) -> float:
        """The time (of time.monotonic()) by which the node must be up; infinite if it need not."""
        if self._run is None or self._run.is_up:
            return float("inf")
        return self._run.begin + self._options.boot_timeout

    def power_on(self, done: Done) -> None:
        """Boot the machine if it is off. `done` is called when it is up, or has failed."""
        if self.state == "up":
            done(None)
            return
        self._waiting.append(done)
        if self._run is None:
            self._boots = 0
            self._boot()

    def power_off(self, reason: str) -> None:
        """End the machine at once, as if its power were cut."""
        if self._run is not None:
            self._end(reason)

    def check_deadline(self) -> None:
        """End the machine if it has not booted in time."""
        if time.monotonic() > self.deadline:
            limit = self._options.boot_timeout
            self._end_with_log(f"{self._options.title} did not boot within {limit:g} s")

    def start(self, content: bytes) -> int:
        """Start a command. Return the number of its session. `content` is an encoded job."""
        self._last_session += 2
        self.send(frames.JOB, content, self._last_session)
        return self._last_session

    def send(self, kind: int, data: bytes, session: int) -> None:
        """Send a frame to the agent. It is lost if the node is off."""
        if self._run is not None:
            self._run.channel.send(kind, data, session)

    def set_cable(self, device: Device, plugged: bool, done: Done) -> None:
        """Plug the cable of a device in, or pull it. `done` is called afterwards."""
        if self._run is None:
            done(f"{self.name} is off")
        else:
            self._run.monitor.set_link(device.netdev, plugged, done)

    def _boot(self) -> None:
        self._boots += 1
        self._run = _Run(self._options, self._selector, self._wires, self._on_channel, self._on_end)

    def _on_channel(self, channel: FrameSocket, kind: int, session: int, data: bytes) -> None:
        assert self._run is not None
        if kind == frames.READY:
            self._on_ready(self._run, frames.CLOCK.unpack(data)[0] / 1000)
        elif kind == frames.UP:
            self._run.is_up = True
            self._finish_waiting(None)
        elif kind == frames.FAILED and session == 0:
            self._end_with_log(data.decode(errors="replace"))
        else:
            self._on_frame(self, kind, session, data)

    def _on_ready(self, run: "_Run", uptime: float) -> None:
        """Send the settings, or boot again if the guest's clock is too fast.

        `uptime` is the time since the guest's kernel started, in the guest's seconds. A guest of an
        emulated processor measures the speed of its time stamp counter when it boots. On a busy
        host the result can be wrong by a factor of seven.
        """
        if uptime <= _CLOCK_TOLERANCE * (time.monotonic() - run.begin):
            env = {**self._options.variables, **addresses(self.devices)}
            settings = job.NodeSettings(hostname=self._options.hostname, now=time.time(), env=env)
            run.channel.send(frames.SETTINGS, job.dump(settings))
        elif self._boots < _BOOTS:
            run.end()
            self._boot()
        else:
            self._end_with_log(
                f"{self._options.title}'s clock was wrong at {_BOOTS} boots: is this machine busy?"
            )

    def _on_end(self, channel: FrameSocket) -> None:
        """Process the end of the machine, which its own kernel or QEMU has caused."""
        assert self._run is not None
        self._run.process.wait()
        self._end_with_log(f"{self._options.title} ended{self._run.end_reason()}")

    def _end_with_log(self, sentence: str) -> None:
        assert self._run is not None
        fd, name = tempfile.mkstemp(prefix="aiordma-lab-", suffix=".log")
        with open(fd, "w") as file:
            file.write(self._run.errors.text() + self._run.console.text())
        self._end(f"{sentence}\n{name}")

    def _end(self, reason: str) -> None:
        assert self._run is not None
        self._run.end()
        self._run = None
        self._finish_waiting(reason)
        self._on_off(self, reason)

    def _finish_waiting(self, reason: str | None) -> None:
        waiting, self._waiting = self._waiting, []
        for done in waiting:
            done(reason)


class _Run:
    """One run of the machine, from its boot to its end."""

    def __init__(
        self,
        options: NodeOptions,
        selector: selectors.BaseSelector,
        wires: Mapping[str, Wire],
        on_frame: Callable[[FrameSocket, int, int, bytes], None],
        on_end: Callable[[FrameSocket], None],
    ) -> None:
        self.is_up = False
        self.begin = time.monotonic()
        self.console = MemoryFile("console")
        self.errors = MemoryFile("qemu")
        self._name = options.name
        self._wires = [wires[device.driver] for device in options.devices if device.mac]
        self._image = MemoryFile("initramfs", options.initramfs)
        with contextlib.ExitStack() as theirs:
            channel, channel_fd = _pair(theirs)
            monitor, monitor_fd = _pair(theirs)
            cards = []
            for device in options.devices:
                if device.mac:
                    card, card_fd = _pair(theirs)
                    wires[device.driver].connect(options.name, device.mac, card)
                    cards.append(qemu.Card(device.netdev, device.mac, card_fd))
            machine = replace(
                options.machine,
                initramfs=self._image.path,
                console=self.console.path,
                cards=tuple(cards),
            )
            self.process = self._start(
                machine.argv_with_channels(options.program, channel_fd, monitor_fd),
                [channel_fd, monitor_fd, *(card.fd for card in cards)],
            )
        self.channel = FrameSocket(selector, channel, on_frame, on_end)
        self.monitor = Monitor(selector, monitor)

    def _start(self, argv: list[str], channels: list[int]) -> "subprocess.Popen[bytes]":
        """Start QEMU. The kernel kills it when this process ends, even by SIGKILL."""
        setpriv = packages.program("setpriv") or "setpriv"
        return subprocess.Popen(
            [setpriv, "--pdeathsig", "KILL", *argv],
            stdin=subprocess.DEVNULL,
            stdout=self.errors.fd,
            stderr=self.errors.fd,
            pass_fds=[*channels, self._image.fd, self.console.fd],
            start_new_session=True,  # a terminal sends Ctrl-C to this process only
        )

    def end(self) -> None:
        """Kill QEMU, which holds no data that would be lost, and close everything."""
        self.process.kill()
        self.process.wait()
        for wire in self._wires:
            wire.disconnect(self._name)
        self.channel.close()
        self.monitor.close()
        for file in (self._image, self.console, self.errors):
            file.close()

    def end_reason(self) -> str:
        """Return why the machine has ended by itself, to be appended to a sentence."""
        for line in self.console.text().splitlines():
            if "Kernel panic" in line:
                return f": {line.split('] ')[-1]}"
        lines = self.errors.text().splitlines()
        complaints = (line for line in lines if line.startswith("qemu"))
        return f" unexpectedly: {next(complaints, 'QEMU printed no error')}"


def _pair(theirs: contextlib.ExitStack) -> tuple[socket.socket, int]:
    """Return a socket, and the descriptor of its peer, which is closed with `theirs`."""
    one, other = socket.socketpair()
    return one, theirs.enter_context(other).fileno()
