"""`aiordma bench`: the library beside its peers."""

from __future__ import annotations

import argparse
import shlex
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from aiordma.bench.environment import Place
    from aiordma.bench.plan import Plan
    from aiordma.bench.suite import Results

_DESCRIPTION = "Measure aiordma beside perftest, pyverbs, rsockets and TCP, on an RDMA device."
_EPILOG = """\
Exits with 0 when every contender that is installed has finished, with 1 when one has failed or
nothing could be run, with 130 when it was interrupted. What is measured and how is in
docs/benchmarks.md.
"""
_TESTS = ("latency", "rate", "bandwidth", "connections", "idle")
_OPERATIONS = ("send", "write", "read")
_LOOPS = ("asyncio", "uvloop", "trio")
_PEERS = ("tcp", "pyverbs", "perftest", "rstream", "cmtime")


class _Words:
    """A list of words, parsed: `latency,rate`."""

    def __init__(self, known: tuple[str, ...], others: dict[str, tuple[str, ...]]) -> None:
        self._known, self._others = known, others

    def __call__(self, text: str) -> tuple[str, ...]:
        if text in self._others:
            return self._others[text]
        words = tuple(dict.fromkeys(text.split(",")))
        for word in words:
            if word not in self._known:
                raise argparse.ArgumentTypeError(f"{word!r} is none of {', '.join(self._known)}")
        return words


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(_positive(part) for part in text.split(","))


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 10:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds from 0 to 10")
    return value


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare `bench`."""
    bench = subparsers.add_parser(
        "bench", help=_DESCRIPTION, description=_DESCRIPTION, epilog=_EPILOG
    )
    bench.add_argument("host", nargs="?", metavar="HOST", help="default: this machine's device")
    _add_lists(bench)
    _add_numbers(bench)
    bench.add_argument("--quick", action="store_true", help="see whether it works, not how fast")
    bench.add_argument("--list", action="store_true", help="only name the contenders")
    bench.add_argument("--json", metavar="FILE", help="write everything there")
    bench.add_argument("--plot", metavar="DIRECTORY", help="draw diagrams there (needs matplotlib)")
    bench.add_argument(
        "--from",
        dest="reports",
        nargs="+",
        metavar="FILE",
        help="measure nothing: show, and draw, what --json wrote before",
    )
    bench.add_argument(
        "--on-server", metavar="PREFIX", default="", help='for example "ssh -tt node2"'
    )
    bench.set_defaults(handler=_bench)


def _add_lists(bench: argparse.ArgumentParser) -> None:
    for name, known, extra in (
        ("tests", _TESTS, {}),
        ("operations", _OPERATIONS, {}),
        ("loops", _LOOPS, {}),
        ("peers", _PEERS, {"all": _PEERS, "none": ()}),
    ):
        words: dict[str, tuple[str, ...]] = dict(extra)
        named = ", ".join([*known, *words])
        bench.add_argument(
            f"--{name}",
            type=_Words(known, words),
            default=known,
            metavar="NAME,...",
            help=f"of {named} (default: all)",
        )
    bench.add_argument(
        "--sizes", type=_sizes, default=(), metavar="N,...", help="bytes, for latency and bandwidth"
    )


def _add_numbers(bench: argparse.ArgumentParser) -> None:
    for name, default, text in (
        ("rounds", None, "how often each contender runs (default: 5)"),
        ("count", None, "operations of each run (default: by test)"),
        ("depth", 64, "operations at once, for bandwidth"),
        ("concurrency", 32, "connections set up at once"),
        ("idle", 2000, "connections that do nothing"),
    ):
        bench.add_argument(f"--{name}", type=_positive, default=default, metavar="N", help=text)
    bench.add_argument(
        "--busy-poll",
        type=_seconds,
        default=0.001,
        metavar="SECONDS",
        help="ConnectionOptions.busy_poll of the contenders that have it (default: 0.001)",
    )


def _plan(args: argparse.Namespace) -> Plan:
    from aiordma.bench.plan import Plan

    return Plan(
        args.tests,
        args.sizes,
        args.operations,
        args.loops,
        args.peers,
        args.busy_poll,
        args.rounds or (1 if args.quick else 5),
        args.count,
        args.depth,
        args.concurrency,
        args.idle,
        args.quick,
    )


def _list(plan: Plan) -> int:
    """Name the contenders, what each can do, and what to install for those that are missing."""
    from aiordma.bench.implementations import chosen

    tests: dict[str, list[str]] = {}
    missing: dict[str, str] = {}
    for contender in chosen(plan.loops, plan.peers):
        tests.setdefault(contender.name, []).extend(contender.does)
        if not contender.found():
            missing[contender.name] = f"\tnot installed: {contender.install}"
    for name, does in tests.items():
        print(f"{name}\t{', '.join(does)}{missing.get(name, '')}")
    return 0


def _bench(args: argparse.Namespace) -> int:
    from aiordma.bench.errors import BenchError

    plan = _plan(args)
    if args.list:
        return _list(plan)
    try:
        return _show(args) if args.reports else _measure(args, plan)
    except BenchError as error:
        print(f"aiordma bench: {error}", file=sys.stderr)
        return 1


def _show(args: argparse.Namespace) -> int:
    """Show what was measured before. Raises: as _measure()."""
    from pathlib import Path

    from aiordma.bench import report
    from aiordma.bench.table import as_table

    _, directory = report.checked(None, args.plot)
    results = report.read_reports(map(Path, args.reports))
    print(as_table(results))
    if directory is not None:
        report.draw(results, directory)
    return 1 if results.failed else 0


def _measure(args: argparse.Namespace, plan: Plan) -> int:
    """Run it, and report what there is, also after Ctrl-C.

    Raises:
        BenchError: it cannot begin, or the report cannot be written.
    """
    from aiordma.bench import report
    from aiordma.bench.environment import find_place
    from aiordma.bench.implementations import chosen
    from aiordma.bench.progress import Progress
    from aiordma.bench.suite import Results, run_suite

    json_file, directory = report.checked(args.json, args.plot)
    place = find_place(args.host, shlex.split(args.on_server))
    contenders = chosen(plan.loops, plan.peers)
    results, progress = Results(), Progress(sys.stderr)
    interrupted = False
    try:
        run_suite(results, plan.works(), contenders, place, plan.rounds, progress)
    except KeyboardInterrupt:
        interrupted = True
    progress.clear()
    _report(results, plan, place, json_file, directory)
    return 130 if interrupted else 1 if results.failed or not results.cases else 0


def _report(
    results: Results, plan: Plan, place: Place, json_file: Path | None, directory: Path | None
) -> None:
    from aiordma.bench import report
    from aiordma.bench.environment import machine, versions
    from aiordma.bench.table import as_table

    print(as_table(results))
    if json_file is not None:
        whole = report.as_json(results, plan.rounds, machine(place), versions())
        report.write_json(json_file, whole)
    if directory is not None:
        report.draw(results, directory)
