"""`aiordma doctor`: examine whether RDMA works on this machine, and say how to mend it."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from dataclasses import asdict

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
    doctor.set_defaults(handler=_doctor)


def _doctor(args: argparse.Namespace) -> int:
    try:
        return asyncio.run(_report(as_json=args.json))
    except KeyboardInterrupt:
        return 130


async def _report(*, as_json: bool) -> int:
    from aiordma.doctor.examine import examine
    from aiordma.doctor.finding import Status

    found = []
    async for finding in examine():
        found.append(finding)
        if not as_json:
            print(finding, flush=True)
    if as_json:
        json.dump([asdict(finding) for finding in found], sys.stdout, indent=2)
        print()
    return int(any(finding.status is Status.PROBLEM for finding in found))
