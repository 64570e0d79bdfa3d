"""`python -m benchmarks.instructions`: count instructions, and compare with the baseline."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.instructions import baseline
from benchmarks.instructions.callgrind import Count, CountError, count_case, find_valgrind
from benchmarks.instructions.cases import CASES
from benchmarks.instructions.device import LIMIT, BuildError, build
from benchmarks.instructions.report import as_json, as_table


def main(arguments: Sequence[str] | None = None) -> int:
    """Count the cases and print the report; return 0, or 1 if they could not be counted."""
    args = _parser().parse_args(arguments)
    try:
        counts = _count(args.cases, args.operations)
    except (CountError, BuildError) as error:
        print(f"aiordma: {error}", file=sys.stderr)
        return 1
    stored = baseline.load()
    print(as_table(counts, stored))
    if args.json is not None:
        report = as_json(counts, stored)
        args.json.write_text(json.dumps(report, indent=4) + "\n")
    if args.save_baseline:
        baseline.save(counts)
    return 0


def _count(names: Sequence[str], operations: int | None) -> dict[str, Count]:
    find_valgrind()
    counts = {}
    with tempfile.TemporaryDirectory(prefix="aiordma-count-") as directory:
        folder = Path(directory)
        library = build(folder)
        for number, case in enumerate(names, 1):
            print(f"counting {number} of {len(names)}: {CASES[case].title}", file=sys.stderr)
            counts[case] = count_case(case, operations or CASES[case].count, library, folder)
    return counts


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.instructions",
        description="Count the instructions of one message, on a device without hardware.",
    )
    parser.add_argument(
        "--cases",
        type=_names,
        default=list(CASES),
        metavar="NAME,...",
        help=f"of {', '.join(CASES)} (default: all)",
    )
    parser.add_argument(
        "--operations",
        type=_operations,
        metavar="N",
        help="compare a run of N operations with one of twice N (default: depends on the case)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write a report to FILE")
    parser.add_argument(
        "--save-baseline", action="store_true", help="compare later counts with these"
    )
    return parser


def _names(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in CASES:
            raise argparse.ArgumentTypeError(f"{name} is not one of {', '.join(CASES)}")
    return names


def _operations(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= LIMIT // 2:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 1 to {LIMIT // 2}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
