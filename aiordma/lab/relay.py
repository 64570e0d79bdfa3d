"""The caller's side of a command in the lab.

The relay writes the command's output to this process's standard streams, and sends the command this
process's standard input and signals.
"""

import contextlib
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator
from types import FrameType

from . import frames, job
from .caller import CallerSocket

__all__ = ["Relay"]

# A second Ctrl-C within this many seconds ends the run, even if the command handles it.
_SECOND_CTRL_C_LIMIT = 2.0
_CTRL_C = b"\x03"


class _Interrupted(Exception):
    """A signal ends the run; `code` is the exit code, 128 plus the signal's number."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.code = 128 + number


class Relay:
    """The exchange of frames for one command on a node, until its exit code arrives."""

    def __init__(self, channel: CallerSocket, node: str, the_job: job.Job) -> None:
        self._channel = channel
        self._node = node
        self._job = the_job
        self._stdin_requested = False
        self._last_ctrl_c = -_SECOND_CTRL_C_LIMIT
        self._exit_code: int | None = None
        self.started = False

    def run(self) -> int:
        """Run the command. Return its exit code, or 128 plus the number of a signal that ended it.

        Raises: LabError if the lab or the node fails.
        """
        with self._signals():
            try:
                self._channel.send(frames.OPEN, job.dump([self._node, job.dump(self._job)]))
                while not self.started:
                    self._receive()
                return self._relay()
            except _Interrupted as end:
                return end.code

    def _relay(self) -> int:
        """Relay until the command has ended. Return its exit code."""
        with _raw_terminal(self._job):
            while self._exit_code is None:
                waiting: list[CallerSocket | int] = [self._channel]
                if self._stdin_requested:
                    waiting.append(0)
                ready = select.select(waiting, [], [])[0]
                if self._channel in ready:
                    self._receive()
                if 0 in ready:
                    self._read_stdin()
        return self._exit_code

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Handle signals during the block: send them to the command, or end the run.

        SIGINT and SIGQUIT go to the command, and SIGWINCH changes the size of its terminal. SIGTERM
        and SIGHUP end the run, as does SIGINT before the start or twice in a short time.
        """
        handlers = {
            signal.SIGINT: self._on_interrupt,
            signal.SIGQUIT: self._on_interrupt,
            signal.SIGTERM: self._on_end,
            signal.SIGHUP: self._on_end,
            signal.SIGWINCH: self._on_resize,
        }
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        self._count_ctrl_c()
        if not self.started:
            raise _Interrupted(number)
        self._channel.send(frames.SIGNAL, bytes([number]))

    def _on_end(self, number: int, frame: FrameType | None) -> None:
        raise _Interrupted(number)

    def _on_resize(self, number: int, frame: FrameType | None) -> None:
        if self.started and self._job["tty"]:
            rows, columns = job.window_size()
            self._channel.send(frames.WINDOW, rows.to_bytes(2, "big") + columns.to_bytes(2, "big"))

    def _count_ctrl_c(self) -> None:
        now = time.monotonic()
        if now - self._last_ctrl_c < _SECOND_CTRL_C_LIMIT:
            raise _Interrupted(signal.SIGINT)
        self._last_ctrl_c = now

    def _receive(self) -> None:
        for kind, body in self._channel.receive():
            self._on_frame(kind, body)

    def _on_frame(self, kind: int, body: bytes) -> None:
        if kind == frames.OUTPUT:
            self._write(body[0], body[1:])
            self._channel.send(frames.OUTPUT_TAKEN, frames.COUNT.pack(len(body) - 1))
        elif kind == frames.STDIN_REQUEST:
            self._stdin_requested = True
        elif kind == frames.STARTED:
            self.started = True
        elif kind == frames.EXIT:
            self._exit_code = body[0]

    def _write(self, stream: int, data: bytes) -> None:
        """Write all data. If the stream has no reader, have the agent close it too."""
        view = memoryview(data)
        try:
            while view:
                view = view[_write_some(stream, view) :]
        except OSError:
            self._channel.send(frames.CLOSE, bytes([stream]))

    def _read_stdin(self) -> None:
        data = os.read(0, frames.CHUNK)
        if 0 in self._job["tty"] and _CTRL_C in data:
            self._count_ctrl_c()
        self._stdin_requested = False
        self._channel.send(frames.STDIN, data)


def _write_some(fd: int, data: memoryview) -> int:
    """Write once and return the number of bytes; wait first if `fd` is non-blocking and full."""
    try:
        return os.write(fd, data)
    except BlockingIOError:
        select.select([], [fd], [])
        return 0


@contextlib.contextmanager
def _raw_terminal(the_job: job.Job) -> Iterator[None]:
    """Put this process's terminal into raw mode: the guest's terminal interprets the bytes."""
    if 0 not in the_job["tty"]:
        yield
        return
    before = termios.tcgetattr(0)
    tty.setraw(0)
    try:
        yield
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, before)
        sys.stdout.flush()
