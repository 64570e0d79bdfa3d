"""Starting the command: its standard streams, its session, its surroundings."""

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
    """The running command and this side of its streams.

    `outputs` maps a descriptor to read from to the stream (1 or 2) its bytes belong to. `terminal`
    is the pseudo-terminal's master, `stdin` where standard input goes.
    """

    def __init__(self) -> None:
        self.pid = 0
        self.stdin: int | None = None
        self.terminal: int | None = None
        self.outputs: dict[int, int] = {}

    def send_signal(self, number: int) -> None:
        """Signal the foreground process group, as a terminal would."""
        group = self.pid
        if self.terminal is not None:
            group = os.tcgetpgrp(self.terminal) or self.pid
        # If it ended in this moment, its exit code is on the way.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, number)

    def resize(self, rows: int, columns: int) -> None:
        """Tell the terminal its size; the kernel sends SIGWINCH."""
        if self.terminal is not None:
            _set_window(self.terminal, rows, columns)


def start(job: "Job") -> Command:
    """Start the job's command.

    Raises: OSError when it cannot be executed.
    """
    command = Command()
    child_side = _open_streams(job, command)
    failed, failing = os.pipe()
    command.pid = os.fork()
    if command.pid == 0:
        _child(job, child_side, failing)
    os.close(failing)
    for fd in set(child_side.values()):
        os.close(fd)
    _raise_reported(failed)
    return command


def exit_code(status: int) -> int:
    """The shell's rendering of a wait status."""
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _open_streams(job: "Job", command: Command) -> dict[int, int]:
    """Make the streams; returns the child's descriptor for each of 0, 1, 2 that is to be open."""
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


def _child(job: "Job", streams: dict[int, int], failing: int) -> None:
    """What the forked child does; never returns."""
    try:
        os.setsid()
        if job["tty"]:
            fcntl.ioctl(streams[job["tty"][0]], termios.TIOCSCTTY, 0)
        _place(streams)
        _surround(job)
        os.execvpe(job["argv"][0], job["argv"], job["env"])
    except OSError as error:
        os.write(failing, struct.pack("!i", error.errno or 0))
    finally:
        os._exit(NOT_FOUND)


def _place(streams: dict[int, int]) -> None:
    """Move the streams to 0, 1 and 2. The originals are all above 2 (PID 1 keeps 0-2 open)."""
    for fd in (0, 1, 2):
        if fd in streams:
            os.dup2(streams[fd], fd)
        else:
            os.close(fd)


def _surround(job: "Job") -> None:
    os.umask(job["umask"])
    resource.setrlimit(resource.RLIMIT_NOFILE, job["nofile"])
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (-1, -1))
    # Python ignores these two, and an ignored signal stays ignored through exec.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    os.chdir(job["cwd"])


def _raise_reported(failed: int) -> None:
    """Raise the child's error, if exec did not close its end of the pipe first."""
    report = os.read(failed, 4)
    os.close(failed)
    if report:
        number = struct.unpack("!i", report)[0]
        raise OSError(number, os.strerror(number))


def _set_window(fd: int, rows: int, columns: int) -> None:
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
