"""The command: its standard streams, its session and its process settings."""

import contextlib
import fcntl
import os
import resource
import signal
import struct
import termios

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..job import Job

__all__ = ["Command", "start"]

NOT_RUNNABLE = 126
NOT_FOUND = 127


class Command:
    """The running command, and the agent's ends of its streams.

    `outputs` maps each descriptor to read from to its stream, 1 or 2. `stdin` is the descriptor to
    write standard input to. `terminal` is the master of the pseudo-terminal. Both can be None.
    """

    def __init__(self) -> None:
        self.pid = 0
        self.stdin: int | None = None
        self.terminal: int | None = None
        self.outputs: dict[int, int] = {}

    def send_signal(self, number: int) -> None:
        """Send a signal to the foreground process group, as a terminal does."""
        group = self.pid
        if self.terminal is not None:
            group = os.tcgetpgrp(self.terminal) or self.pid
        # The group can have ended just now; the agent then reports its exit code.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, number)

    def resize(self, rows: int, columns: int) -> None:
        """Set the terminal's size. The kernel then sends SIGWINCH to the command."""
        if self.terminal is not None:
            _set_window(self.terminal, rows, columns)


def start(job: "Job") -> Command:
    """Start the job's command.

    Raises: OSError if it cannot be executed.
    """
    command = Command()
    child_side = _open_streams(job, command)
    error_reader, error_writer = os.pipe()
    command.pid = os.fork()
    if command.pid == 0:
        _child(job, child_side, error_writer)
    os.close(error_writer)
    for fd in set(child_side.values()):
        os.close(fd)
    _raise_child_error(error_reader)
    return command


def exit_code(status: int) -> int:
    """Return the exit code that a shell reports for a wait status."""
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _open_streams(job: "Job", command: Command) -> dict[int, int]:
    """Open the streams. Return the child's descriptors, by stream; closed streams are left out."""
    child_side = {}
    if job["tty"]:
        command.terminal, slave = os.openpty()
        _set_window(command.terminal, *job["window"])
        child_side = dict.fromkeys(job["tty"], slave)
        command.outputs[command.terminal] = max(job["tty"]) if 1 not in job["tty"] else 1
        if 0 in job["tty"]:
            command.stdin = command.terminal
    for fd in {0, 1, 2} - set(job["tty"]) - set(job["closed"]):
        if fd == 2 and job["merged"]:
            child_side[2] = child_side[1]
        elif fd == 0:
            child_side[0], command.stdin = os.pipe()
        else:
            ours, child_side[fd] = os.pipe()
            command.outputs[ours] = fd
    return child_side


def _child(job: "Job", streams: dict[int, int], error_writer: int) -> None:
    """Execute the command in the forked child. Never returns."""
    try:
        os.setsid()
        if job["tty"]:
            fcntl.ioctl(streams[job["tty"][0]], termios.TIOCSCTTY, 0)
        _move_streams(streams)
        _apply_settings(job)
        os.execvpe(job["argv"][0], job["argv"], job["env"])
    except OSError as error:
        os.write(error_writer, struct.pack("!i", error.errno or 0))
    finally:
        os._exit(NOT_FOUND)


def _move_streams(streams: dict[int, int]) -> None:
    """Move the streams to 0, 1 and 2. The originals are above 2, since PID 1 has 0 to 2 open."""
    for fd in (0, 1, 2):
        if fd in streams:
            os.dup2(streams[fd], fd)
        else:
            os.close(fd)


def _apply_settings(job: "Job") -> None:
    """Set umask, limits, signals and working directory of the command."""
    os.umask(job["umask"])
    resource.setrlimit(resource.RLIMIT_NOFILE, job["nofile"])
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (-1, -1))
    # Python ignores these two, and an ignored signal stays ignored through exec.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    os.chdir(job["cwd"])


def _raise_child_error(error_reader: int) -> None:
    """Raise the error that the child reported. If its exec succeeded, the pipe is empty."""
    report = os.read(error_reader, 4)
    os.close(error_reader)
    if report:
        number = struct.unpack("!i", report)[0]
        raise OSError(number, os.strerror(number))


def _set_window(fd: int, rows: int, columns: int) -> None:
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
