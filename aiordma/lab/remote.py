"""A command on a node, for programs: like subprocess.Popen, without a process of its own here."""

import signal
import time
from collections.abc import Callable

from . import frames, job
from .caller import CallerSocket
from .errors import LabError

__all__ = ["RemoteCommand"]


class RemoteCommand:
    """A command that was started on a node. Its standard error is part of its output.

    The methods block. The command is killed when the connection is closed, as at the end of a
    `with` block.
    """

    def __init__(self, channel: CallerSocket, node: str, argv: tuple[str, ...]) -> None:
        """Start the command. Raises LabError if the node is off."""
        self.argv = argv
        self.node = node
        self.exit_code: int | None = None
        self._channel = channel
        self._output = bytearray()
        self._stdin_requested = False
        self._failure: LabError | None = None
        self.pid = 0
        """The process id of the command on its node; 0 if it cannot be executed."""
        self._is_started = False
        content = job.dump(job.with_pipes(argv, merged=True))
        try:
            channel.send(frames.OPEN, job.dump([node, content]))
            self._receive_until(lambda: self._is_started, None)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "RemoteCommand":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection. The command is killed if it still runs."""
        self._channel.close()

    def write(self, data: bytes) -> None:
        """Write to the command's standard input. Waits until the node takes it.

        Raises: LabError if the node fails.
        """
        for begin in range(0, len(data), frames.CHUNK):
            self._write_chunk(data[begin : begin + frames.CHUNK])

    def close_stdin(self) -> None:
        """End the command's standard input."""
        self._write_chunk(b"")

    def send_signal(self, number: int) -> None:
        """Send a signal to the command's process group."""
        self._channel.send(frames.SIGNAL, bytes([number]))

    def kill(self) -> None:
        """Kill the command, and wait for its end."""
        self.send_signal(signal.SIGKILL)
        self.wait()

    def read_line(self, timeout: float | None = None) -> str:
        """Return the next line of output, without its end; the rest if the command has ended.

        Raises: TimeoutError; LabError if the node fails, or if there is no more output.
        """
        self._receive_until(lambda: b"\n" in self._output or self.exit_code is not None, timeout)
        line, newline, rest = self._output.partition(b"\n")
        if not line and not newline:
            raise LabError(f"{self.argv[0]} on {self.node} ended with {self.exit_code}")
        self._output = rest
        return line.decode(errors="replace")

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the command's end. Return its exit code. Its output can still be read.

        Raises: TimeoutError; LabError if the node fails.
        """
        self._receive_until(lambda: self.exit_code is not None, timeout)
        assert self.exit_code is not None
        return self.exit_code

    def take_output(self) -> bytes:
        """Return the output that has been received and not been read, and forget it."""
        output, self._output = bytes(self._output), bytearray()
        return output

    def _write_chunk(self, chunk: bytes) -> None:
        self._receive_until(
            lambda: self._stdin_requested or self.exit_code is not None, timeout=None
        )
        self._stdin_requested = False
        if self.exit_code is None:
            self._channel.send(frames.STDIN, chunk)

    def _receive_until(self, is_over: Callable[[], bool], timeout: float | None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while not is_over():
            if self._failure is not None:
                raise self._failure
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not self._channel.is_ready(left):
                raise TimeoutError(f"{self.argv[0]} on {self.node} took longer than {timeout:g} s")
            self._receive()

    def _receive(self) -> None:
        """Process what has arrived. A failure is raised later, by a call that needs more."""
        try:
            for kind, body in self._channel.receive():
                self._on_frame(kind, body)
        except LabError as error:
            self._failure = error

    def _on_frame(self, kind: int, body: bytes) -> None:
        if kind == frames.STARTED:
            self._is_started = True
            self.pid = frames.COUNT.unpack(body)[0]
        elif kind == frames.OUTPUT:
            self._output += body[1:]
            self._channel.send(frames.OUTPUT_TAKEN, frames.COUNT.pack(len(body) - 1))
        elif kind == frames.STDIN_REQUEST:
            self._stdin_requested = True
        elif kind == frames.EXIT:
            self.exit_code = body[0]
