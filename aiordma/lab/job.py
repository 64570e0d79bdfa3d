"""The job: the command, and all settings of this process that the command gets in the guest."""

import fcntl
import marshal
import os
import resource
import socket
import time
from collections.abc import Mapping
from typing import TypedDict

__all__ = ["Job", "closed_streams", "describe", "dump", "environment", "window_size"]

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
    """A command and its settings, sent from the host to the guest."""

    argv: list[str]
    cwd: str
    env: dict[str, str]
    tty: list[int]  # those of the streams 0, 1, 2 that are terminals
    closed: list[int]  # those of the streams 0, 1, 2 that were closed
    merged: bool  # 1 and 2 are the same file: the order of all output is preserved
    window: tuple[int, int]  # rows and columns of the terminal
    umask: int
    nofile: tuple[int, int]
    hostname: str
    now: float  # the host's clock, in seconds since the epoch


def describe(argv: list[str], env: dict[str, str], closed: list[int]) -> Job:
    """Return a job that runs `argv` with the settings of this process."""
    return Job(
        argv=argv,
        cwd=os.getcwd(),
        env=env,
        tty=[fd for fd in (0, 1, 2) if fd not in closed and os.isatty(fd)],
        closed=closed,
        merged=not {1, 2} & set(closed) and _same_file(1, 2),
        window=window_size(),
        umask=_umask(),
        nofile=resource.getrlimit(resource.RLIMIT_NOFILE),
        hostname=socket.gethostname(),
        now=time.time(),
    )


def environment(own: Mapping[str, str], addresses: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the command in the lab, made from the caller's environment."""
    passed = {
        k: v for k, v in own.items() if k not in _NOT_PASSED and not k.startswith("AIORDMA_LAB")
    }
    return (
        passed | _sudo_variables(os.getuid(), os.getgid()) | {"AIORDMA_LAB": "1"} | dict(addresses)
    )


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


def dump(job: Job) -> bytes:
    """Encode a job for the channel.

    marshal is built in, so the guest imports nothing to decode it; both run the same interpreter.
    """
    return marshal.dumps(dict(job))


def closed_streams() -> list[int]:
    """Return the standard streams (0, 1, 2) that were closed when this process was started."""
    return [fd for fd in (0, 1, 2) if not _is_open(fd)]


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
