"""The job: a command, and all settings of its caller's process that it gets in the guest."""

import fcntl
import marshal
import os
import resource
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

__all__ = [
    "Job",
    "NodeSettings",
    "describe",
    "dump",
    "environment",
    "open_closed_streams",
    "window_size",
    "with_pipes",
]

# These variables name things of this machine or session that the guest cannot reach: sockets of the
# desktop and of agents, descriptors of a job server or of socket activation.
_NOT_PASSED = frozenset(
    {
        "DBUS_SESSION_BUS_ADDRESS",
        "DISPLAY",
        "INVOCATION_ID",
        "JOURNAL_STREAM",
        "LISTEN_FDNAMES",
        "LISTEN_FDS",
        "LISTEN_PID",
        "MAKEFLAGS",
        "MFLAGS",
        "NOTIFY_SOCKET",
        "SSH_AGENT_PID",
        "SSH_AUTH_SOCK",
        "WAYLAND_DISPLAY",
        "XDG_RUNTIME_DIR",
    }
)


class Job(TypedDict):
    """A command and its settings, sent from its caller to the agent of a node."""

    argv: list[str]
    cwd: str
    env: dict[str, str]
    tty: list[int]  # those of the streams 0, 1, 2 that are terminals
    closed: list[int]  # those of the streams 0, 1, 2 that were closed
    merged: bool  # 1 and 2 are the same file: the order of all output is preserved
    window: tuple[int, int]  # rows and columns of the terminal
    umask: int
    nofile: tuple[int, int]


class NodeSettings(TypedDict):
    """The settings of a machine of the lab, sent when it has booted."""

    hostname: str
    now: float  # the host's clock, in seconds since the epoch
    env: dict[str, str]  # variables that all commands get


def describe(argv: Sequence[str], closed: list[int]) -> Job:
    """Return a job that runs `argv` with the settings and the streams of this process."""
    the_job = with_pipes(argv, merged=not {1, 2} & set(closed) and _same_file(1, 2))
    the_job["tty"] = [fd for fd in (0, 1, 2) if fd not in closed and os.isatty(fd)]
    the_job["closed"] = closed
    the_job["window"] = window_size()
    return the_job


def with_pipes(argv: Sequence[str], *, merged: bool = False) -> Job:
    """Return a job that runs `argv` with the settings of this process, but without its streams.

    `merged`: the standard error of the command is its standard output.
    """
    return Job(
        argv=list(argv),
        cwd=os.getcwd(),
        env=environment(os.environ),
        tty=[],
        closed=[],
        merged=merged,
        window=(24, 80),
        umask=_umask(),
        nofile=resource.getrlimit(resource.RLIMIT_NOFILE),
    )


def environment(own: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the command in the lab, made from the caller's environment.

    The agent adds the variables of its node.
    """
    passed = {
        k: v for k, v in own.items() if k not in _NOT_PASSED and not k.startswith("AIORDMA_LAB")
    }
    return passed | _sudo_variables(os.getuid(), os.getgid())


def _sudo_variables(uid: int, gid: int) -> dict[str, str]:
    """Return the variables in which sudo stores its caller's ids; none if the caller is root.

    In the guest every process is root. Without these variables git there would not trust a
    repository that belongs to the user.
    """
    return {"SUDO_UID": str(uid), "SUDO_GID": str(gid)} if uid else {}


def window_size() -> tuple[int, int]:
    """Return rows and columns of the first standard stream that is a terminal.

    Without a terminal: 24 rows, 80 columns.
    """
    for fd in (0, 1, 2):
        try:
            size = os.get_terminal_size(fd)
        except OSError:
            continue
        return size.lines, size.columns
    return 24, 80


def dump(content: Any) -> bytes:
    """Encode the content of a frame.

    marshal is built in, so the guest imports nothing to decode it; both run the same interpreter.
    """
    return marshal.dumps(content)


def _closed_streams() -> list[int]:
    """Return the standard streams (0, 1, 2) that were closed when this process was started."""
    return [fd for fd in (0, 1, 2) if not _is_open(fd)]


def open_closed_streams() -> list[int]:
    """Open /dev/null for closed standard streams. Return the streams that were closed.

    Otherwise a file that the lab opens could become a standard stream.
    """
    closed = _closed_streams()
    for fd in closed:
        null = os.open(os.devnull, os.O_RDWR)
        if null != fd:
            os.dup2(null, fd)
            os.close(null)
    return closed


def _is_open(fd: int) -> bool:
    try:
        fcntl.fcntl(fd, fcntl.F_GETFD)
    except OSError:
        return False
    return True


def _same_file(one: int, other: int) -> bool:
    return os.path.samestat(os.fstat(one), os.fstat(other))


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
