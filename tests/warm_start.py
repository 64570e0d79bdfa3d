"""A pytest plugin that starts Python programs quickly: by a fork of warm_python.py.

In an emulated lab, a new interpreter needs five seconds to import aiordma and its adapters, and the
tests start some 200. The plugin is for `make test`: `-p warm_start`. Without it, each program is
started as usual, as in `make test-all`. A program that warm_python.py cannot start is started as
usual, too.
"""

from __future__ import annotations

import array
import ctypes
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

_PR_SET_CHILD_SUBREAPER = 36
_PROGRAM = Path(__file__).with_name("warm_python.py")


class WarmStart:
    """The process that forks, and the change of subprocess.Popen that uses it."""

    def __init__(self) -> None:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel = ours
        self._process = subprocess.Popen(
            [sys.executable, str(_PROGRAM), str(theirs.fileno())], pass_fds=[theirs.fileno()]
        )
        theirs.close()
        self._cold = subprocess.Popen._execute_child  # type: ignore[attr-defined]
        setattr(subprocess.Popen, "_execute_child", self._make_method())  # noqa: B010

    def close(self) -> None:
        """Start programs as usual again, and end the forking process."""
        setattr(subprocess.Popen, "_execute_child", self._cold)  # noqa: B010
        self._channel.close()
        self._process.wait()

    def _make_method(self) -> Any:
        warm = self

        def execute_child(popen: Any, args: Any, executable: Any, *rest: Any) -> None:
            if not warm._try(popen, args, executable, *rest):
                warm._cold(popen, args, executable, *rest)

        return execute_child

    def _try(self, popen: Any, args: Any, executable: Any, *rest: Any) -> bool:
        """Start a program by a fork. Return False if that is not possible."""
        preexec_fn, close_fds, pass_fds, cwd, env, _, _, shell = rest[:8]
        child_in, parent_in, parent_out, child_out, parent_err, child_err = rest[8:14]
        if isinstance(args, str) or args[0] != sys.executable or executable or shell:
            return False
        if preexec_fn is not None or pass_fds or not close_fds:
            return False
        if any(part is not None and part is not False and part != -1 for part in rest[15:]):
            return False  # another user, umask, session or process group
        if args[1] not in ("-c", "-m", "-W") and args[1].startswith("-"):
            return False
        environment = {os.fsdecode(k): os.fsdecode(v) for k, v in (env or os.environ).items()}
        request = {
            "args": [os.fsdecode(arg) for arg in args[1:]],
            "cwd": os.fsdecode(cwd or os.getcwd()),
            "env": environment,
        }
        streams = [
            given if given != -1 else own
            for given, own in ((child_in, 0), (child_out, 1), (child_err, 2))
        ]
        with os.fdopen(os.memfd_create("request"), "w+") as file:  # longer than a message can be
            json.dump(request, file)
            file.flush()
            files = array.array("i", [*streams, file.fileno()])
            self._channel.sendmsg([b"fork"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)])
        popen.pid = int.from_bytes(self._channel.recv(4), "big")
        popen._child_created = True
        popen._close_pipe_fds(child_in, parent_in, parent_out, child_out, parent_err, child_err)
        return True


_started = pytest.StashKey[WarmStart]()


def pytest_sessionstart(session: pytest.Session) -> None:
    """Start the forking process, unless other processes run the tests."""
    if session.config.getoption("dist", "no") == "no" or hasattr(session.config, "workerinput"):
        session.stash[_started] = WarmStart()


def pytest_sessionfinish(session: pytest.Session) -> None:
    if _started in session.stash:
        session.stash[_started].close()
