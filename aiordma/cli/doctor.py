"""`aiordma doctor`: examine whether RDMA works on this machine, and say how to mend it."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import traceback
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import TYPE_CHECKING

from .arguments import seconds
from .pipes import ended_by_closed_pipe

if TYPE_CHECKING:
    from aiordma.doctor.finding import Finding

_DESCRIPTION = "Examine whether RDMA works on this machine, and say how to mend what does not."
_EPILOG = """\
Each line begins with ok, warning or problem. The last lines are self-tests: each device connects to
itself. The exit code is 0 if there is no problem, otherwise 1.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare `doctor`."""
    doctor = subparsers.add_parser(
        "doctor", help=_DESCRIPTION, description=_DESCRIPTION, epilog=_EPILOG
    )
    doctor.add_argument("--json", action="store_true", help="print the results as JSON")
    doctor.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=seconds(0.001, 3600),
        default=30.0,
        help="limit for the self-test of each device (default: 30)",
    )
    doctor.set_defaults(handler=_doctor)


def _doctor(args: argparse.Namespace) -> int:
    try:
        with ended_by_closed_pipe():
            return asyncio.run(_report(args.timeout, as_json=args.json))
    except KeyboardInterrupt:
        return 130


async def _report(timeout: float, *, as_json: bool) -> int:
    from aiordma.doctor.finding import Status

    found = []
    async for finding in _examine(timeout):
        found.append(finding)
        if not as_json:
            print(finding, flush=True)
    if as_json:
        json.dump([asdict(finding) for finding in found], sys.stdout, indent=2)
        print()
    return int(any(finding.status is Status.PROBLEM for finding in found))


async def _examine(timeout: float) -> AsyncIterator[Finding]:
    """Yield the findings. If a check raises, the last one says so, and the others are not lost."""
    from aiordma.doctor.examine import examine
    from aiordma.doctor.finding import problem

    try:
        async for finding in examine(timeout):
            yield finding
    except Exception as error:
        traceback.print_exc()
        text = f"a check failed, and those after it were not made: {error!r}"
        yield problem("doctor", text, "report this, with the traceback on standard error")
