"""`aiordma ping`: test whether RDMA works between two machines, and how fast it is."""

from __future__ import annotations

import argparse
import asyncio
import socket
import sys
from collections.abc import Callable, Coroutine

from ..ping.options import DEFAULT_PORT, DEFAULT_SIZE, MAX_SIZE, PingOptions
from .arguments import integer, seconds
from .pipes import ended_by_closed_pipe

_DESCRIPTION = (
    "Test whether RDMA works between two machines, with which device, and how fast it is."
)
_EPILOG = """\
Run `aiordma ping --listen` on one machine, and `aiordma ping HOST` on the other. Ctrl-C ends both.
The exit code is 0 if all answers came and were correct. Otherwise it is 1, and a sentence on
standard error gives the reason.
"""
# The addresses to listen at if --listen has no address.
_ALL = {None: None, socket.AF_INET: "0.0.0.0", socket.AF_INET6: "::"}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare `ping`."""
    ping = subparsers.add_parser(
        "ping", help=_DESCRIPTION, description=_DESCRIPTION, epilog=_EPILOG
    )
    _add_roles(ping)
    _add_numbers(ping)
    ping.add_argument("--source", metavar="ADDRESS", help="the address to connect from")
    family = ping.add_mutually_exclusive_group()
    for version, value in (("4", socket.AF_INET), ("6", socket.AF_INET6)):
        family.add_argument(
            f"-{version}",
            dest="family",
            action="store_const",
            const=value,
            help=f"use IPv{version} only",
        )
    ping.set_defaults(handler=_ping)


def _add_roles(ping: argparse.ArgumentParser) -> None:
    role = ping.add_mutually_exclusive_group()
    role.add_argument(
        "host",
        nargs="?",
        metavar="HOST",
        help="a name or an address (default: the first RDMA address of this machine)",
    )
    role.add_argument(
        "--listen",
        nargs="?",
        const="",
        metavar="ADDRESS",
        help="be the server: answer pings to this address (default: to all RDMA addresses)",
    )


def _add_numbers(ping: argparse.ArgumentParser) -> None:
    for flag, metavar, kind, default, text in (
        ("-p", "PORT", integer(0, 65535), DEFAULT_PORT, "default: %(default)s"),
        ("-c", "COUNT", integer(1, 1 << 62), None, "number of messages (default: until Ctrl-C)"),
        ("-i", "SECONDS", seconds(0, 1e6), 1.0, "time between messages (default: 1; 0: no pause)"),
        ("-s", "SIZE", integer(1, MAX_SIZE), DEFAULT_SIZE, "size in bytes (default: %(default)s)"),
        ("-w", "SECONDS", seconds(0.001, 3600), 5.0, "limit for each answer (default: 5)"),
        ("--busy-poll", "SECONDS", seconds(0, 10), 0.0, "busy-poll before sleeping (default: 0)"),
    ):
        ping.add_argument(flag, metavar=metavar, type=kind, default=default, help=text)


def _ping(args: argparse.Namespace) -> int:
    try:
        with ended_by_closed_pipe():
            return _listen(args) if args.listen is not None else _send(args)
    except KeyboardInterrupt:  # before the ping has started
        return 1


def _listen(args: argparse.Namespace) -> int:
    from aiordma.ping.failures import explain_listening
    from aiordma.ping.server import listen

    host = args.listen or _ALL[args.family]
    completed = _run(
        listen(host, args.p, _print_line), lambda error: explain_listening(error, host, args.p)
    )
    return 0 if completed else 1


def _send(args: argparse.Namespace) -> int:
    from aiordma.ping.client import ping, ping_self
    from aiordma.ping.failures import explain
    from aiordma.ping.report import Statistics

    options, statistics = _options(args), Statistics()
    start = ping if options.host else ping_self
    completed = _run(start(options, statistics, _print_line), lambda error: explain(error, options))
    for line in statistics.lines():
        _print_line(line)
    return 0 if completed and statistics.all_correct else 1


def _options(args: argparse.Namespace) -> PingOptions:
    return PingOptions(
        args.host or "",
        args.p,
        count=args.c,
        interval=args.i,
        size=args.s,
        source=args.source,
        busy_poll=args.busy_poll,
        wait=args.w,
        family=args.family,
    )


def _run(main: Coroutine[object, None, None], explain: Callable[[Exception], str]) -> bool:
    """Run `main` in an event loop. Return False, and print the reason, if it failed.

    Ctrl-C is not a failure.
    """
    from aiordma.errors import RdmaError

    try:
        asyncio.run(main)
    except KeyboardInterrupt:
        return True
    except (RdmaError, OSError, ValueError) as error:
        print(f"aiordma ping: {explain(error)}", file=sys.stderr)
        return False
    return True


def _print_line(line: str) -> None:
    print(line, flush=True)
