"""The callers' way to a running lab: from this machine, or from a process in one of its nodes."""

import marshal
import os
import socket

from . import frames, is_inside, job
from .caller import CallerSocket
from .errors import LabError
from .guest.callers import CONTROL_PATH
from .relay import Relay
from .sockets import SOCKET_PREFIX, peer_user

__all__ = ["connect", "execute", "labs", "request"]


def labs() -> list[str]:
    """Return the ids of the labs that run on this machine."""
    prefix = f"@{SOCKET_PREFIX[1:]}"
    with open("/proc/net/unix") as file:
        names = {line.split()[-1] for line in file if prefix in line}
    return sorted(name.removeprefix(prefix) for name in names if name.startswith(prefix))


def connect(lab: str | None) -> CallerSocket:
    """Return a connection to a lab: in a node to its own lab, else to the lab with this id.

    Raises: LabError if there is none, or if it is not clear which lab is meant.
    """
    connection = socket.socket(socket.AF_UNIX)
    try:
        if is_inside():
            connection.connect(CONTROL_PATH)
        else:
            connection.connect(f"{SOCKET_PREFIX}{lab or _only_lab()}")
            _check_owner(connection)
    except OSError:
        connection.close()
        name = f"no lab {lab} runs on this machine" if lab else "the lab has ended"
        raise LabError(name) from None
    except BaseException:
        connection.close()
        raise
    return CallerSocket(connection)


def request(action: str, *arguments: str, lab: str | None = None) -> object:
    """Have the lab perform an action. Return its result. `lab` is the id of the lab.

    Raises: LabError if the lab cannot perform it, or if it is not clear which lab is meant.
    """
    with connect(lab) as channel:
        channel.send(frames.REQUEST, job.dump([action, *arguments]))
        while True:
            for _, body in channel.receive():
                result: object = marshal.loads(body)
                return result


def execute(node: str, argv: list[str], lab: str | None = None) -> int:
    """Run a command on a node of a running lab. Return its exit code.

    Raises: LabError if the lab or the node fails, or if it is not clear which lab is meant.
    """
    closed = job.open_closed_streams()
    with connect(lab) as channel:
        return Relay(channel, node, job.describe(argv, closed)).run()


def _only_lab() -> str:
    running = labs()
    if not running:
        raise LabError("no lab runs on this machine: start one with `aiordma lab run`")
    if len(running) > 1:
        ids = "|".join(running)
        raise LabError(f"several labs run on this machine: choose one with --lab {ids}")
    return running[0]


def _check_owner(connection: socket.socket) -> None:
    """Check that the lab belongs to this user or to root: the caller sends it its environment."""
    if peer_user(connection) not in (0, os.getuid()):
        raise LabError("the lab belongs to another user")
