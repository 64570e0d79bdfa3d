"""`aiordma bench`: compare aiordma with other RDMA programs and TCP."""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiordma.bench.plan import Plan

_DESCRIPTION = "Compare aiordma with perftest, pyverbs, rsockets and TCP, on an RDMA device."
_EPILOG = """\
Exits with 0 if every implementation that is installed has finished, with 1 if one has failed or
nothing could be run, with 130 if it was interrupted. docs/benchmarks.md describes what is measured,
and how.
"""
_TESTS = (
    "latency",
    "rate",
    "bandwidth",
    "objects",
    "http",
    "connections",
    "idle",
    "answering",
    "reconnect",
)
_OPERATIONS = ("send", "write", "read")
_LOOPS = ("asyncio", "uvloop", "trio")
_PEERS = ("tcp", "pyverbs", "perftest", "rstream", "cmtime")


class _Names:
    """A parser of names with commas: `latency,rate`."""

    def __init__(self, known: tuple[str, ...], aliases: dict[str, tuple[str, ...]]) -> None:
        self._known, self._aliases = known, aliases

    def __call__(self, text: str) -> tuple[str, ...]:
        if text in self._aliases:
            return self._aliases[text]
        names = tuple(dict.fromkeys(text.split(",")))
        for name in names:
            if name not in self._known:
                raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(self._known)}")
        return names


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
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0 to 10")
    return value


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare `bench`."""
    bench = subparsers.add_parser(
        "bench", help=_DESCRIPTION, description=_DESCRIPTION, epilog=_EPILOG
    )
    bench.add_argument(
        "host",
        nargs="?",
        metavar="HOST",
        help="the server's address; default: an address of this machine's RDMA device",
    )
    _add_lists(bench)
    _add_numbers(bench)
    bench.add_argument(
        "--quick", action="store_true", help="run little work, only to see that everything works"
    )
    bench.add_argument(
        "--goals",
        action="store_true",
        help="run only the implementations that a goal compares, with the sizes of the goals",
    )
    bench.add_argument(
        "--list", action="store_true", help="only list the implementations and their tests"
    )
    bench.add_argument("--json", metavar="FILE", help="write a report with all samples to FILE")
    bench.add_argument(
        "--plot", metavar="DIRECTORY", help="draw diagrams in DIRECTORY; needs matplotlib"
    )
    bench.add_argument(
        "--from",
        dest="reports",
        nargs="+",
        metavar="FILE",
        help="measure nothing: show reports that --json wrote, and draw them with --plot",
    )
    bench.add_argument(
        "--on-server",
        metavar="PREFIX",
        default="",
        help='a prefix for the commands of the servers, for example "ssh -tt node2"',
    )
    bench.set_defaults(handler=_bench)


def _add_lists(bench: argparse.ArgumentParser) -> None:
    for name, known, aliases, text in (
        ("tests", _TESTS, {}, "tests to run"),
        ("operations", _OPERATIONS, {}, "operations for bandwidth"),
        ("loops", _LOOPS, {}, "event loops of Python implementations"),
        ("peers", _PEERS, {"all": _PEERS, "none": ()}, "programs to compare aiordma with"),
    ):
        names: dict[str, tuple[str, ...]] = dict(aliases)
        listed = ", ".join([*known, *names])
        bench.add_argument(
            f"--{name}",
            type=_Names(known, names),
            default=known,
            metavar="NAME,...",
            help=f"{text}, of {listed} (default: all)",
        )
    bench.add_argument(
        "--sizes", type=_sizes, default=(), metavar="N,...", help="bytes, for latency and bandwidth"
    )


def _add_numbers(bench: argparse.ArgumentParser) -> None:
    for name, default, text in (
        ("rounds", None, "runs of each implementation (default: 5)"),
        ("count", None, "operations of each run (default: depends on the test)"),
        ("depth", 32, "operations in flight, for bandwidth (default: 32)"),
        ("concurrency", 32, "connections that are set up concurrently (default: 32)"),
        ("idle", 2000, "connections of idle, answering and reconnect (default: 2000)"),
    ):
        bench.add_argument(f"--{name}", type=_positive, default=default, metavar="N", help=text)
    bench.add_argument(
        "--busy-poll",
        type=_seconds,
        default=0.001,
        metavar="SECONDS",
        help="ConnectionOptions.busy_poll of the busy_poll implementations (default: 0.001)",
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
        args.goals,
    )


def _list(plan: Plan) -> int:
    """Print the implementations, their tests, and the packages of those that are missing."""
    from aiordma.bench.implementations import select

    tests: dict[str, list[str]] = {}
    missing: dict[str, str] = {}
    for implementation in select(plan.loops, plan.peers):
        tests.setdefault(implementation.name, []).extend(implementation.tests)
        if not implementation.is_installed():
            missing[implementation.name] = f"\tnot installed: {implementation.install}"
    for name, supported in tests.items():
        print(f"{name}\t{', '.join(supported)}{missing.get(name, '')}")
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
    """Show earlier reports; return the exit code.

    Raises:
        BenchError: a report cannot be read, or a diagram cannot be written.
    """
    from pathlib import Path

    from aiordma.bench import report
    from aiordma.bench.table import as_table

    _, directory = report.check_outputs(None, args.plot)
    results = report.read_reports(map(Path, args.reports))
    print(as_table(results))
    if directory is not None:
        report.draw(results, directory)
    return 1 if results.failed else 0


@contextmanager
def _interrupted_by_signals() -> Iterator[None]:
    """Have SIGTERM and SIGHUP do what Ctrl-C does in the block, so that no process is left."""
    ends = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(end, signal.default_int_handler) for end in ends]
    try:
        yield
    finally:
        for end, handler in zip(ends, before, strict=True):
            signal.signal(end, handler)


def _measure(args: argparse.Namespace, plan: Plan) -> int:
    """Run the plan and show each result as soon as it is there; return the exit code.

    The report has the results before Ctrl-C, too.

    Raises:
        BenchError: it cannot begin, or the report cannot be written.
    """
    from aiordma.bench import report
    from aiordma.bench.environment import find_environment, machine, versions
    from aiordma.bench.goals import is_compared
    from aiordma.bench.implementations import select
    from aiordma.bench.progress import Progress
    from aiordma.bench.suite import Case, Results, any_implementation, run_suite
    from aiordma.bench.table import case_table, summary

    json_file, directory = report.check_outputs(args.json, args.plot)
    environment = find_environment(args.host, shlex.split(args.on_server))
    implementations = select(plan.loops, plan.peers)
    results, progress = Results(), Progress(sys.stderr)
    described = machine(environment), versions()
    interrupted = False

    def write() -> None:
        if json_file is not None:
            report.write_json(json_file, report.as_json(results, plan.rounds, *described))

    def finished(case: Case) -> None:
        progress.clear()
        print(case_table(case), end="\n\n", flush=True)
        write()

    try:
        with _interrupted_by_signals():
            run_suite(
                results,
                plan.works(),
                implementations,
                environment,
                plan.rounds,
                progress,
                finished,
                is_compared if plan.goals else any_implementation,
            )
    except KeyboardInterrupt:
        interrupted = True
    write()
    print("\n\n".join(summary(results)))
    if directory is not None:
        report.draw(results, directory)
    return 130 if interrupted else 1 if results.failed or not results.cases else 0
