"""A session: one command of the node, with its streams and its exit code."""

import contextlib
import errno
import os
import select
import signal

from .. import frames
from . import command as commands
from .channel import Channel

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..job import Job

__all__ = ["Session"]

_DRAIN_LIMIT = 1024 * 1024


class Session:
    """One command, from its start until its exit code is sent."""

    def __init__(self, channel: Channel, number: int) -> None:
        self._channel = channel
        self._number = number
        self._command = commands.Command()
        self._untaken = 0  # bytes of output that the caller has not written yet
        self._stdin = bytearray()
        self._stdin_ended = False

    @property
    def pid(self) -> int:
        """The process id of the command."""
        return self._command.pid

    def start(self, job: "Job", env: dict[str, str]) -> bool:
        """Start the command, with the variables `env` of the node added to its own.

        Return False if it cannot be executed. Its exit code is sent then.
        """
        job["env"].update(env)
        try:
            self._command = commands.start(job)
        except OSError as error:
            self._send(frames.STARTED, frames.COUNT.pack(0))
            message = f"aiordma lab: {job['argv'][0]}: {error.strerror}\n"
            self._send(frames.OUTPUT, b"\2" + message.encode(errors="surrogateescape"))
            code = commands.NOT_FOUND if error.errno == errno.ENOENT else commands.NOT_RUNNABLE
            self._send(frames.EXIT, bytes([code]))
            return False
        self._send(frames.STARTED, frames.COUNT.pack(self.pid))
        if self._command.stdin is not None:
            os.set_blocking(self._command.stdin, False)
            self._send(frames.STDIN_REQUEST)
        return True

    def add_interest(self, interest: dict[int, int]) -> None:
        """Add the descriptors to wait for, with their events."""
        if self._untaken < frames.OUTPUT_WINDOW and not self._channel.full:
            interest |= dict.fromkeys(self._command.outputs, select.POLLIN)
        stdin = self._command.stdin
        if self._stdin and stdin is not None:
            interest[stdin] = interest.get(stdin, 0) | select.POLLOUT

    def on_ready(self, ready: dict[int, int]) -> None:
        """Relay bytes of the descriptors that are ready."""
        if self._command.stdin in ready and self._stdin:
            self._write_stdin()
        for fd in [fd for fd in self._command.outputs if fd in ready]:
            self._read_output(fd)

    def on_frame(self, kind: int, data: bytes) -> None:
        """Process a frame of the caller."""
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
        elif kind == frames.OUTPUT_TAKEN:
            self._untaken -= frames.COUNT.unpack(data)[0]
        elif kind == frames.HANGUP:
            self._kill()

    def end(self, status: int) -> None:
        """Send the rest of the output and the exit code. `status` is the wait status."""
        self._kill()
        for fd in list(self._command.outputs):
            os.set_blocking(fd, False)
            self._drain(fd)
        if self._command.stdin is not None:
            self._end_stdin(self._command.stdin)
        if self._command.terminal is not None:
            os.close(self._command.terminal)
        os.sync()
        self._send(frames.EXIT, bytes([commands.exit_code(status)]))

    def _kill(self) -> None:
        """Kill the command's processes: those of its session.

        They could hold the pipes open, or write for ever.
        """
        for pid in _processes_of(self._command.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _drain(self, fd: int) -> None:
        """Send the output that the command left in a pipe.

        A process that has left the session might write for ever, so there is a limit.
        """
        sent = 0
        while fd in self._command.outputs and sent < _DRAIN_LIMIT:
            size = self._read_output(fd)
            if size is None:
                break
            sent += size
            self._channel.flush()
        self._forget_output(fd)

    def _read_output(self, fd: int) -> int | None:
        """Read one piece of output and send it. Return its size; None if there is none now."""
        try:
            data = os.read(fd, frames.CHUNK - 1)
        except BlockingIOError:
            return None
        except OSError:  # a terminal that no process has open any more
            data = b""
        if not data:
            self._forget_output(fd)
            return 0
        self._untaken += len(data)
        self._send(frames.OUTPUT, bytes([self._command.outputs[fd]]) + data)
        return len(data)

    def _forget_output(self, fd: int) -> None:
        if self._command.outputs.pop(fd, None) is not None and fd != self._command.terminal:
            os.close(fd)

    def _close_output(self, stream: int) -> None:
        """Close the stream, which the caller cannot write: the command then gets SIGPIPE."""
        self._untaken = 0
        for fd, output_stream in list(self._command.outputs.items()):
            if output_stream == stream and fd != self._command.terminal:
                self._forget_output(fd)

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
            self._send(frames.STDIN_REQUEST)
        else:
            self._end_stdin(fd)

    def _end_stdin(self, fd: int) -> None:
        self._command.stdin = None
        if fd != self._command.terminal:
            os.close(fd)

    def _send(self, kind: int, data: bytes = b"") -> None:
        self._channel.send(kind, data, self._number)


def _processes_of(session: int) -> list[int]:
    """Return the process ids of a session, in the sense of setsid(2)."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat") as file:
                    fields = file.read().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(fields[3]) == session:
                found.append(int(name))
    return found
