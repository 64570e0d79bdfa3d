"""The agent, PID 1 of the guest.

It receives the job from the host, runs the command, relays its streams, and sends its exit code.
"""

import contextlib
import errno
import marshal
import os
import select
import signal
import socket
import time

from .. import frames
from . import command as commands
from .channel import Channel, GuestError, find_port

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..job import Job

__all__ = ["main"]

_FAILURE_FILE = "/run/lab/failed"


def main() -> None:
    """Run one job and report its exit code, or the error, to the host. Never returns."""
    port = os.open(find_port(), os.O_RDWR | os.O_NONBLOCK)
    channel = Channel(port)
    try:
        code = Agent(channel).run()
        os.sync()
        channel.send(frames.EXIT, bytes([code]))
    except Exception as error:
        channel.send(frames.FAILED, _sentence(error).encode())
    channel.flush()
    # The host ends the virtual machine when it has read the last frame.
    while True:
        time.sleep(60)


def _sentence(error: Exception) -> str:
    if isinstance(error, GuestError):
        return str(error)
    return f"the lab's agent failed in the guest: {error!r}"


class Agent:
    """The agent for one job, from READY to the exit code."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._command = commands.Command()
        self._exit_code: int | None = None
        self._stdin = bytearray()
        self._stdin_ended = False

    def run(self) -> int:
        """Run the job. Return its exit code."""
        self._channel.send(frames.READY, frames.CLOCK.pack(time.monotonic_ns() // 1_000_000))
        job: Job = marshal.loads(self._channel.wait_for(frames.JOB))
        _set_clock_and_hostname(job)
        _wait_for_devices()
        wakeup = _child_wakeup_fd()
        try:
            self._command = commands.start(job)
        except OSError as error:
            return self._not_started(job, error)
        self._channel.send(frames.STARTED)
        self._relay(wakeup)
        assert self._exit_code is not None
        return self._exit_code

    def _not_started(self, job: "Job", error: OSError) -> int:
        self._channel.send(frames.STARTED)
        message = f"aiordma lab: {job['argv'][0]}: {error.strerror}\n"
        self._channel.send(frames.OUTPUT, b"\2" + message.encode(errors="surrogateescape"))
        return commands.NOT_FOUND if error.errno == errno.ENOENT else commands.NOT_RUNNABLE

    def _relay(self, wakeup: int) -> None:
        """Relay bytes and signals until the command has ended and all its output is sent."""
        if self._command.stdin is not None:
            os.set_blocking(self._command.stdin, False)
            self._channel.send(frames.STDIN_REQUEST)
        while self._exit_code is None:
            ready = dict(self._wait(wakeup))
            if self._channel.port in ready:
                self._on_channel(ready[self._channel.port])
            if wakeup in ready:
                self._reap(wakeup)
            if self._command.stdin in ready:
                self._write_stdin()
            for fd in [fd for fd in self._command.outputs if fd in ready]:
                self._read_output(fd)
        self._drain()

    def _wait(self, wakeup: int) -> list[tuple[int, int]]:
        interest = {self._channel.port: select.POLLIN, wakeup: select.POLLIN}
        if self._channel.pending:
            interest[self._channel.port] |= select.POLLOUT
        if not self._channel.full:
            interest |= dict.fromkeys(self._command.outputs, select.POLLIN)
        if self._stdin and self._command.stdin is not None:
            stdin = self._command.stdin
            interest[stdin] = interest.get(stdin, 0) | select.POLLOUT
        poll = select.poll()
        for fd, events in interest.items():
            poll.register(fd, events)
        return poll.poll()

    def _on_channel(self, events: int) -> None:
        if events & select.POLLHUP:
            raise SystemExit  # the host has closed the channel; the kernel panics when PID 1 ends
        if events & select.POLLOUT:
            self._channel.write()
        if not events & select.POLLIN:
            return
        for kind, data in self._channel.receive():
            self._on_frame(kind, data)

    def _on_frame(self, kind: int, data: bytes) -> None:
        if kind == frames.STDIN:
            self._stdin += data
            self._stdin_ended = not data
            self._write_stdin()
        elif kind == frames.SIGNAL:
            self._command.send_signal(data[0])
        elif kind == frames.WINDOW:
            self._command.resize(data[0] << 8 | data[1], data[2] << 8 | data[3])
        elif kind == frames.CLOSE:
            self._close_output(data[0])

    def _write_stdin(self) -> None:
        """Write as much as the command's input takes. Once all is written, request more."""
        fd = self._command.stdin
        if fd is None:
            return
        try:
            while self._stdin:
                del self._stdin[: os.write(fd, self._stdin)]
        except BlockingIOError:
            return
        except OSError:  # the command closed its input: the rest has no reader
            self._stdin.clear()
            self._stdin_ended = True
        if not self._stdin_ended:
            self._channel.send(frames.STDIN_REQUEST)
        else:
            self._end_stdin(fd)

    def _end_stdin(self, fd: int) -> None:
        self._command.stdin = None
        if fd != self._command.terminal:
            os.close(fd)

    def _read_output(self, fd: int) -> bool:
        """Read one piece of output and send it. Return False if there is no more."""
        try:
            data = os.read(fd, frames.CHUNK - 1)
        except OSError:  # a terminal that no process has open any more
            data = b""
        if not data:
            del self._command.outputs[fd]
            if fd != self._command.terminal:
                os.close(fd)
            return False
        self._channel.send(frames.OUTPUT, bytes([self._command.outputs[fd]]) + data)
        return True

    def _close_output(self, stream: int) -> None:
        """Close the stream, which has no reader on the host: the command then gets SIGPIPE."""
        for fd, output_stream in list(self._command.outputs.items()):
            if output_stream == stream and fd != self._command.terminal:
                del self._command.outputs[fd]
                os.close(fd)

    def _reap(self, wakeup: int) -> None:
        """Wait for every process that has ended: PID 1 inherits orphans, too."""
        os.read(wakeup, 64)
        for pid, status in _ended():
            if pid == self._command.pid:
                self._exit_code = commands.exit_code(status)

    def _drain(self) -> None:
        """Send the output that the command left in its pipes.

        First kill the processes that it left running: they could hold the pipes open or write for
        ever.
        """
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        for fd in list(self._command.outputs):
            os.set_blocking(fd, False)
            while self._read_output(fd):
                self._channel.flush()


def _set_clock_and_hostname(job: "Job") -> None:
    """Set the clock and the hostname as on the host."""
    time.clock_settime(time.CLOCK_REALTIME, job["now"])
    socket.sethostname(job["hostname"])


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
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended.append((pid, status))
