"""`python -m benchmarks.instructions`: count, and compare with what was kept."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.instructions import kept
from benchmarks.instructions.callgrind import Count, CountError, count_case, find_valgrind
from benchmarks.instructions.cases import CASES
from benchmarks.instructions.device import LIMIT, BuildError, build
from benchmarks.instructions.report import as_json, as_table


def main(arguments: Sequence[str] | None = None) -> int:
    """Count what is asked for, and print it: 0, or 1 if that could not be done."""
    asked = _parser().parse_args(arguments)
    try:
        counts = _count(asked.cases, asked.operations)
    except (CountError, BuildError) as error:
        print(f"aiordma: {error}", file=sys.stderr)
        return 1
    before = kept.load()
    print(as_table(counts, before))
    if asked.json is not None:
        report = as_json(counts, before)
        asked.json.write_text(json.dumps(report, indent=4) + "\n")
    if asked.keep:
        kept.save(counts)
    return 0


def _count(names: Sequence[str], times: int | None) -> dict[str, Count]:
    find_valgrind()
    counts = {}
    with tempfile.TemporaryDirectory(prefix="aiordma-count-") as name:
        folder = Path(name)
        library = build(folder)
        for number, case in enumerate(names, 1):
            print(f"counting {number} of {len(names)}: {CASES[case].title}", file=sys.stderr)
            counts[case] = count_case(case, times or CASES[case].times, library, folder)
    return counts


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.instructions",
        description="Count the instructions of a message, on a device without hardware.",
    )
    parser.add_argument(
        "--cases", type=_names, default=list(CASES), help=f"of {','.join(CASES)}; default: all"
    )
    parser.add_argument(
        "--operations",
        type=_operations,
        metavar="N",
        help="count N against twice as many; default: as many as the case needs",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there, too")
    parser.add_argument("--keep", action="store_true", help="compare with these from now on")
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
