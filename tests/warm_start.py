"""A pytest plugin that starts Python programs quickly: by a fork of warm_python.py.

In an emulated lab, a new interpreter needs five seconds to import aiordma and its adapters, and the
tests start some 200. The plugin is for `make test`: `-p warm_start`. Without it, each program is
started as usual, as in `make test-all`. A program that warm_python.py cannot start is started as
usual, too.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest
from warm_python import WarmStart

_PROGRAM = Path(__file__).with_name("warm_python.py")


_started = pytest.StashKey[tuple[WarmStart, "subprocess.Popen[bytes]"]]()


def pytest_sessionstart(session: pytest.Session) -> None:
    """Start the forking process, unless other processes run the tests."""
    if session.config.getoption("dist", "no") == "no" or hasattr(session.config, "workerinput"):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, str(_PROGRAM), str(theirs.fileno())]
            process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        session.stash[_started] = WarmStart(ours), process


def pytest_sessionfinish(session: pytest.Session) -> None:
    if _started in session.stash:
        warm, process = session.stash[_started]
        warm.close()
        process.wait()
