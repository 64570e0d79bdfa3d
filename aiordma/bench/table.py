"""The report as tables of text: one for each case, one of the goals."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from statistics import median

from aiordma.bench.goals import goals
from aiordma.bench.implementations import reference
from aiordma.bench.plan import TESTS
from aiordma.bench.sample import Sample
from aiordma.bench.suite import Case, Results

_COLUMNS = ("90", "99", "99.9")
_STEADY_SLOWDOWN = 1.2
"""Up to this value of Case.slowdown, the machine is called steady."""


def as_table(results: Results) -> str:
    """Return all tables, and a line for each package that is not installed."""
    return "\n\n".join([*map(case_table, results.cases), *summary(results)])


def summary(results: Results) -> list[str]:
    """Return what stands below the tables of the cases: the goals, the packages to install."""
    return ["\n".join(block) for block in (_goals(results), _missing(results)) if block]


def case_table(case: Case) -> str:
    """Return the table of a case, with its title and notes."""
    unit = TESTS[case.work.test].unit
    head = ["", unit, *(["p90", "p99", "p99.9"] if case.work.test == "latency" else [])]
    other = reference(case.work)
    if other in case.samples:
        head.append(f"x {other}")
    head += ["client us", "server us"]
    rows = [head, *(_row(case, name, other in case.samples) for name in case.samples)]
    table = aligned(rows) if case.samples else []
    failures = [f"  {name}: failed: {_indented(error)}" for name, error in case.failures.items()]
    notes = [*_detail_lines(case), *_steadiness(case), *failures]
    return "\n".join([case.work.title, *table, *notes])


def _row(case: Case, name: str, with_ratio: bool) -> list[str]:
    samples = list(case.samples[name].values())
    row = [name, figure(case.value(name))]
    if case.work.test == "latency":
        row += [figure(_percentile(samples, column)) for column in _COLUMNS]
    if with_ratio:
        row.append(figure(case.ratio(name, reference(case.work)), 2))
    row.append(figure(_known_median([sample.client_cpu for sample in samples])))
    row.append(figure(_known_median([sample.server_cpu for sample in samples])))
    return row


def _detail_lines(case: Case) -> Iterator[str]:
    """Yield the latency of the active connection, alone and with the others, or the failures."""
    for name, samples in case.samples.items():
        known = partial(_detail, list(samples.values()))
        if case.work.test in ("idle", "answering"):
            yield (
                f"  {name}: a round trip takes {known('latency_alone'):.1f} us alone, "
                f"{known('latency_among'):.1f} us with the others: x {known('latency_ratio'):.2f}"
            )
        elif case.work.test == "reconnect":
            yield (
                f"  {name}: served again after {known('first'):.1f} s (the first), "
                f"{known('median'):.1f} s (the median), {known('seconds'):.1f} s (the last); "
                f"{known('failures'):.0f} attempts failed before"
            )


def _steadiness(case: Case) -> Iterator[str]:
    """Yield a line if the machine was not steady."""
    if case.slowdown > _STEADY_SLOWDOWN:
        times = f"1 to {case.slowdown:.2f} times as long"
        yield f"  the machine's speed changed: the same loop took {times}"


def _detail(samples: list[Sample], key: str) -> float:
    return median(sample.details[key] for sample in samples)


def _goals(results: Results) -> list[str]:
    found = goals(results)
    if not found:
        return []
    rows = [["", "by", "reached", "goal", "", "met"]]
    rows += [
        [
            goal.title,
            goal.implementation,
            f"{goal.reached:.2f}",
            f"{goal.sign} {goal.limit:g}",
            goal.unit,
            "yes" if goal.met else "no",
        ]
        for goal in found
    ]
    return ["goals", *aligned(rows, left=(0, 1, 4))]


def _missing(results: Results) -> list[str]:
    """Return a line for each package to install, with the implementations that need it."""
    names: dict[str, list[str]] = {}
    for name, package in results.missing.items():
        names.setdefault(package, []).append(name)
    return [
        f"not installed: {', '.join(found)}; install {package}" for package, found in names.items()
    ]


def aligned(rows: list[list[str]], left: tuple[int, ...] = (0,)) -> list[str]:
    """Return the rows as lines, with columns as wide as their widest fields.

    `left` numbers the columns that are aligned to the left; the others are to the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  "
        + "  ".join(
            field.ljust(width) if number in left else field.rjust(width)
            for number, (field, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def figure(value: float | None, digits: int = 1) -> str:
    """Return a number as text for a table; "-" for None."""
    return "-" if value is None else f"{value:,.{0 if abs(value) >= 1e4 else digits}f}"


def _percentile(samples: list[Sample], name: str) -> float | None:
    return _known_median([sample.percentiles.get(name) for sample in samples])


def _known_median(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _indented(text: str) -> str:
    return text.replace("\n", "\n    ")
