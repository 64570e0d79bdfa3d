"""The command and everything that makes it run "as if here"."""

import fcntl
import marshal
import os
import resource
import socket
import time
from collections.abc import Mapping
from typing import TypedDict

__all__ = ["Job", "closed_streams", "describe", "dump", "environment", "window_size"]

# What names a thing of this machine or this session that the guest cannot reach: sockets of the
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
    """What the host tells the guest to run."""

    argv: list[str]
    cwd: str
    env: dict[str, str]
    tty: list[int]  # which of 0, 1, 2 are terminals
    closed: list[int]  # which of 0, 1, 2 were closed
    merged: bool  # 1 and 2 are the same file: keep their order, too
    window: tuple[int, int]  # rows and columns of the terminal
    umask: int
    nofile: tuple[int, int]
    hostname: str
    now: float  # the time of day


def describe(argv: list[str], env: dict[str, str], closed: list[int]) -> Job:
    """The job to run `argv` in the surroundings of this process."""
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
    """The caller's environment as the command in the lab shall see it."""
    kept = {
        k: v for k, v in own.items() if k not in _NOT_PASSED and not k.startswith("AIORDMA_LAB")
    }
    return kept | _on_behalf_of(os.getuid(), os.getgid()) | {"AIORDMA_LAB": "1"} | dict(addresses)


def _on_behalf_of(uid: int, gid: int) -> dict[str, str]:
    """What sudo says about its caller. Without it, git in the guest (where everybody is root) would
    not trust a repository that belongs to the user.
    """
    return {"SUDO_UID": str(uid), "SUDO_GID": str(gid)} if uid else {}


def window_size() -> tuple[int, int]:
    """Rows and columns of the first standard stream that is a terminal."""
    for fd in (0, 1, 2):
        try:
            size = os.get_terminal_size(fd)
        except OSError:
            continue
        return size.lines, size.columns
    return 24, 80


def dump(job: Job) -> bytes:
    """For the wire. The same interpreter reads it, and marshal costs no import there."""
    return marshal.dumps(dict(job))


def closed_streams() -> list[int]:
    """Which standard streams this process was started without."""
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
