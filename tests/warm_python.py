"""A process that has imported aiordma, and forks for each program that a test starts.

The program is a process of its own, a child of the test process, with the streams, the environment,
the directory and the arguments that it was given. It ends as an interpreter ends. The forking
process has never used RDMA, so the programs share nothing of aiordma but its code.

The plugin warm_start.py starts this process. WarmStart sends the requests. A program that starts
Python programs itself has a forking process of its own, so that those are its children.
"""

from __future__ import annotations

import array
import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import types
import warnings
from typing import Any

_PR_SET_CHILD_SUBREAPER = 36


def serve(fd: int) -> dict[str, Any]:
    """Fork for each request from the socket `fd`. Return a request in the process that runs it.

    The process that was asked to fork ends when the socket is closed.
    """
    channel = socket.socket(fileno=fd)
    while True:
        message, ancillary, _, _ = channel.recvmsg(16, socket.CMSG_SPACE(4 * 4))
        if not message:
            os._exit(0)
        files = array.array("i", ancillary[0][2])
        reading, writing = os.pipe()
        between = os.fork()
        if between:
            os.close(writing)
            for file in files:
                os.close(file)
            child = os.read(reading, 4)
            os.close(reading)
            # The child of a process that has ended becomes a child of the test process.
            os.waitpid(between, 0)
            channel.send(child)
            continue
        program = os.fork()
        if program:
            os.write(writing, program.to_bytes(4, "big"))
            os._exit(0)
        with open(files[3], closefd=False) as description:
            description.seek(0)
            request: dict[str, Any] = json.load(description)
        for target, file in enumerate(files[:3]):
            os.dup2(file, target)
        channel.close()
        os.closerange(3, 4096)
        return request


def starts_programs(request: dict[str, Any]) -> bool:
    """Return True if a program starts other Python programs: the demo, and `aiordma bench`."""
    arguments: list[str] = request["args"]
    return arguments[0].endswith("demo.py") or arguments[:3] == ["-m", "aiordma", "bench"]


def become(request: dict[str, Any]) -> None:
    """Become the program of a request: its directory, environment, arguments and signals."""
    if request["new_session"]:
        os.setsid()
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = open(number, "w" if number else "r", closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    arguments = list(request["args"])
    while arguments[0] == "-W":
        warnings.simplefilter(arguments[1])
        del arguments[:2]
    if arguments[0] == "-c":
        sys.argv, sys.path[0] = ["-c", *arguments[2:]], ""
        module = types.ModuleType("__main__")
        sys.modules["__main__"] = module
        exec(compile(arguments[1], "<string>", "exec"), vars(module))
    elif arguments[0] == "-m":
        sys.argv, sys.path[0] = arguments[1:], os.getcwd()
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = arguments, os.path.dirname(arguments[0])
        runpy.run_path(arguments[0], run_name="__main__")


class WarmStart:
    """A change of subprocess.Popen: a process forks for each Python program that is started."""

    def __init__(self, channel: socket.socket) -> None:
        """Use the forking process at the other end of `channel`."""
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._channel = channel
        self._cold = subprocess.Popen._execute_child  # type: ignore[attr-defined]
        setattr(subprocess.Popen, "_execute_child", self._make_method())  # noqa: B010

    def close(self) -> None:
        """Start programs as usual again, and end the forking process."""
        setattr(subprocess.Popen, "_execute_child", self._cold)  # noqa: B010
        self._channel.close()

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
        if any(part is not None and part != -1 for part in [*rest[15:19], *rest[20:]]):
            return False  # another user, umask or process group
        if args[1] not in ("-c", "-m", "-W") and args[1].startswith("-"):
            return False
        environment = {os.fsdecode(k): os.fsdecode(v) for k, v in (env or os.environ).items()}
        request = {
            "args": [os.fsdecode(arg) for arg in args[1:]],
            "cwd": os.fsdecode(cwd or os.getcwd()),
            "env": environment,
            "new_session": rest[19],
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


def main() -> None:
    """Import the modules that the programs of the tests import, and serve."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in ("argparse", "hashlib", "trio", "aiordma.anyio", "aiordma.asyncio", "aiordma.trio"):
        importlib.import_module(name)
    for name in ("aiordma.cli.ping", "aiordma.ping.client", "aiordma.ping.server"):
        importlib.import_module(name)
    gc.freeze()  # so that collecting garbage at the end of a program does not examine all modules
    request = serve(int(sys.argv[1]))
    if starts_programs(request):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork():
            theirs.close()
            WarmStart(ours)
        else:
            ours.close()
            request = serve(theirs.detach())
    become(request)


if __name__ == "__main__":
    main()
