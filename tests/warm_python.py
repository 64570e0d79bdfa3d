"""A process that has imported aiordma, and forks for each program that a test starts.

The program is a process of its own, a child of the test process, with the streams, the environment,
the directory and the arguments that it was given. It ends as an interpreter ends. The forking
process has never used RDMA, so the programs share nothing of aiordma but its code.

warm_start.py starts this process and sends the requests.
"""

from __future__ import annotations

import array
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import types
import warnings
from typing import Any


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


def become(request: dict[str, Any]) -> None:
    """Become the program of a request: its directory, environment, arguments and signals."""
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


def main() -> None:
    """Import the modules that the programs of the tests import, and serve."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in ("argparse", "hashlib", "trio", "aiordma.anyio", "aiordma.asyncio", "aiordma.trio"):
        importlib.import_module(name)
    for name in ("aiordma.cli.ping", "aiordma.ping.client", "aiordma.ping.server"):
        importlib.import_module(name)
    become(serve(int(sys.argv[1])))


if __name__ == "__main__":
    main()
