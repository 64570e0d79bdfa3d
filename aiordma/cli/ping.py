"""`aiordma ping`: does RDMA work between here and there, through which device, and how fast."""

from __future__ import annotations

import argparse
import asyncio
import math
import signal
import socket
import sys
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING

from ..ping.options import DEFAULT_PORT, DEFAULT_SIZE, MAX_SIZE

if TYPE_CHECKING:
    from aiordma.ping.options import Plan

_DESCRIPTION = "See whether RDMA works between two machines, through which device, and how fast."
_EPILOG = """\
Run `aiordma ping --listen` there, and `aiordma ping HOST` here. Ctrl-C ends both. Exits with 0 if
answers came and all were right, else with 1 and a sentence that says what is wrong.
"""
# What to listen at if no address is given.
_ALL = {None: None, socket.AF_INET: "0.0.0.0", socket.AF_INET6: "::"}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare `ping`."""
    ping = subparsers.add_parser(
        "ping", help=_DESCRIPTION, description=_DESCRIPTION, epilog=_EPILOG
    )
    _add_sides(ping)
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


def _add_sides(ping: argparse.ArgumentParser) -> None:
    side = ping.add_mutually_exclusive_group()
    side.add_argument(
        "host",
        nargs="?",
        metavar="HOST",
        help="a name or address (default: this machine's first RDMA address, answered by itself)",
    )
    side.add_argument(
        "--listen",
        nargs="?",
        const="",
        metavar="ADDRESS",
        help="be the other side: answer whoever pings this address (default: all RDMA addresses)",
    )


def _add_numbers(ping: argparse.ArgumentParser) -> None:
    for flag, metavar, kind, default, text in (
        ("-p", "PORT", _integer(0, 65535), DEFAULT_PORT, f"default: {DEFAULT_PORT}"),
        ("-c", "COUNT", _integer(1, 1 << 62), None, "so many messages (default: until Ctrl-C)"),
        ("-i", "SECONDS", _seconds(0, 1e6), 1.0, "between messages (default: 1; 0: at once)"),
        ("-s", "SIZE", _integer(1, MAX_SIZE), DEFAULT_SIZE, f"bytes (default: {DEFAULT_SIZE})"),
        ("-w", "SECONDS", _seconds(0.001, 3600), 5.0, "to wait for each answer (default: 5)"),
        ("--busy-poll", "SECONDS", _seconds(0, 10), 0.0, "to spin before sleeping (default: 0)"),
    ):
        ping.add_argument(flag, metavar=metavar, type=kind, default=default, help=text)


def _integer(low: int, high: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not (text.isdecimal() and low <= int(text) <= high):
            raise argparse.ArgumentTypeError(f"{text} is not a number from {low} to {high}")
        return int(text)

    return number


def _seconds(low: float, high: float) -> Callable[[str], float]:
    def number(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text} is not from {low:g} to {high:g} seconds")
        return value

    return number


def _ping(args: argparse.Namespace) -> int:
    # As other programs, to end quietly when nobody reads any more what is printed.
    before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        return _listen(args) if args.listen is not None else _send(args)
    except KeyboardInterrupt:  # before there was anything to end
        return 1
    finally:
        signal.signal(signal.SIGPIPE, before)


def _listen(args: argparse.Namespace) -> int:
    from aiordma.ping.failures import explain_listening
    from aiordma.ping.server import listen

    host = args.listen or _ALL[args.family]
    done = _run(listen(host, args.p, _say), lambda error: explain_listening(error, host, args.p))
    return 0 if done else 1


def _send(args: argparse.Namespace) -> int:
    from aiordma.ping.client import ping, ping_own
    from aiordma.ping.failures import explain
    from aiordma.ping.report import Tally

    plan, tally = _plan(args), Tally()
    begin = ping if plan.host else ping_own
    done = _run(begin(plan, tally, _say), lambda error: explain(error, plan))
    for line in tally.lines():
        _say(line)
    return 0 if done and tally.good else 1


def _plan(args: argparse.Namespace) -> Plan:
    from aiordma.ping.options import Plan

    return Plan(
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
    """Whether it ended as it should, by itself or by Ctrl-C; else the reason is printed."""
    from aiordma.errors import RdmaError

    try:
        asyncio.run(main)
    except KeyboardInterrupt:
        return True
    except (RdmaError, OSError, ValueError) as error:
        print(f"aiordma ping: {explain(error)}", file=sys.stderr)
        return False
    return True


def _say(line: str) -> None:
    print(line, flush=True)
