"""The agent, PID 1 of the guest.

It runs the commands that the lab sends, and relays the streams of each one. Processes in the guest
can run commands on other nodes through it: it passes on what they send to its control socket.
"""

import contextlib
import marshal
import os
import select
import signal
import socket
import time

from .. import frames
from .callers import CONTROL_PATH, Caller, Listener
from .channel import Channel, GuestError, find_port
from .session import Session

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..job import NodeSettings

__all__ = ["main"]

_FAILURE_FILE = "/run/lab/failed"


def main() -> None:
    """Serve the lab until the host ends the machine. Never returns."""
    channel = Channel(os.open(find_port(), os.O_RDWR | os.O_NONBLOCK))
    try:
        Agent(channel).run()
    except Exception as error:
        channel.send(frames.FAILED, _sentence(error).encode())
        channel.flush()
    while True:
        time.sleep(60)


def _sentence(error: Exception) -> str:
    if isinstance(error, GuestError):
        return str(error)
    return f"the lab's agent failed in the guest: {error!r}"


class Agent:
    """The sessions of this node: its commands, and the callers in it of commands elsewhere."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._env: dict[str, str] = {}
        self._commands: dict[int, Session] = {}
        self._callers: dict[int, Caller] = {}
        self._last_caller = -1

    def run(self) -> None:
        """Set up the node, then serve. Returns only by an error."""
        self._channel.send(frames.READY, frames.CLOCK.pack(time.monotonic_ns() // 1_000_000))
        settings: NodeSettings = marshal.loads(self._channel.wait_for(frames.SETTINGS))
        time.clock_settime(time.CLOCK_REALTIME, settings["now"])
        socket.sethostname(settings["hostname"])
        self._env = settings["env"]
        _wait_for_devices()
        listener = Listener(CONTROL_PATH)
        wakeup = _child_wakeup_fd()
        self._channel.send(frames.UP)
        while True:
            ready = self._wait(listener.fd, wakeup)
            if self._channel.port in ready:
                self._on_channel(ready[self._channel.port])
            if wakeup in ready:
                self._reap(wakeup)
            if listener.fd in ready:
                self._last_caller += 2
                self._callers[self._last_caller] = listener.accept()
            for command in self._commands.values():
                command.on_ready(ready)
            for number, caller in list(self._callers.items()):
                self._serve_caller(number, caller, ready)

    def _wait(self, listener: int, wakeup: int) -> dict[int, int]:
        """Wait until a descriptor is ready. Return the events of those that are."""
        interest = {self._channel.port: select.POLLIN, wakeup: select.POLLIN}
        interest[listener] = select.POLLIN
        if self._channel.pending:
            interest[self._channel.port] |= select.POLLOUT
        for command in self._commands.values():
            command.add_interest(interest)
        for caller in self._callers.values():
            caller.add_interest(interest, can_read=not self._channel.full)
        poll = select.poll()
        for fd, events in interest.items():
            poll.register(fd, events)
        return dict(poll.poll())

    def _on_channel(self, events: int) -> None:
        if events & select.POLLHUP:
            raise SystemExit  # the host has closed the channel; the kernel panics when PID 1 ends
        if events & select.POLLOUT:
            self._channel.write()
        if not events & select.POLLIN:
            return
        for kind, session, data in self._channel.receive():
            if kind == frames.JOB:
                self._start(session, data)
            elif session in self._commands:
                self._commands[session].on_frame(kind, data)
            elif session in self._callers:
                self._callers[session].send(kind, data)

    def _start(self, number: int, data: bytes) -> None:
        command = Session(self._channel, number)
        if command.start(marshal.loads(data), self._env):
            self._commands[number] = command

    def _serve_caller(self, number: int, caller: Caller, ready: dict[int, int]) -> None:
        """Pass on what a caller sent, and notice when it is gone."""
        for kind, data in caller.on_ready(ready):
            self._channel.send(kind, data, number)
        if caller.is_gone:
            del self._callers[number]
            self._channel.send(frames.HANGUP, session=number)

    def _reap(self, wakeup: int) -> None:
        """Wait for every process that has ended: PID 1 inherits orphans, too."""
        os.read(wakeup, 64)
        for pid, status in _ended():
            for number, command in list(self._commands.items()):
                if command.pid == pid:
                    del self._commands[number]
                    command.end(status)


def _wait_for_devices() -> None:
    """Wait for the script that creates the devices, which lab/start has started.

    Raises: GuestError if it failed.
    """
    pid = int(os.environ["AIORDMA_LAB_DEVICES"])
    if os.waitpid(pid, 0)[1] == 0:
        return
    try:
        with open(_FAILURE_FILE) as file:
            raise GuestError(file.read().strip())
    except FileNotFoundError:
        raise GuestError("the guest could not set up its RDMA devices") from None


def _child_wakeup_fd() -> int:
    """Return a descriptor that becomes readable when a child process ends."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    return reading


def _ended() -> list[tuple[int, int]]:
    """Return process id and wait status of the children that have ended."""
    ended: list[tuple[int, int]] = []
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            ended.append((pid, status))
    return ended
