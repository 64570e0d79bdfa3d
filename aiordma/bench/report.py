"""The report in JSON: make, write and read it. Its schema is in docs/benchmarks.md."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from aiordma.bench.errors import BenchError
from aiordma.bench.goals import goals
from aiordma.bench.implementations import reference
from aiordma.bench.plan import TESTS, Work
from aiordma.bench.sample import Sample
from aiordma.bench.suite import Case, Results

SCHEMA = 1
_SAMPLE_FIELDS = {field.name for field in fields(Sample)}
_WORK_FIELDS = {field.name for field in fields(Work)}


def as_json(
    results: Results,
    rounds: int,
    machine: dict[str, object],
    versions: dict[str, str],
) -> dict[str, object]:
    """Return the report, with the samples of every round."""
    return {
        "schema": SCHEMA,
        "rounds": rounds,
        "machine": machine,
        "versions": versions,
        "cases": [_case_json(case) for case in results.cases],
        "goals": [{**asdict(goal), "sign": goal.sign, "met": goal.met} for goal in goals(results)],
        "missing": results.missing,
    }


def _case_json(case: Case) -> dict[str, object]:
    test = TESTS[case.work.test]
    return {
        "key": case.work.key,
        "work": asdict(case.work),
        "unit": test.unit,
        "lower_is_better": test.lower_is_better,
        "reference": reference(case.work),
        "implementations": [_implementation_json(case, name) for name in case.samples],
        "failures": case.failures,
        "loop_times": case.loop_times,
    }


def _implementation_json(case: Case, name: str) -> dict[str, object]:
    ratios = {other: case.ratio(name, other) for other in case.samples if other != name}
    return {
        "name": name,
        "median": case.value(name),
        "ratios": {other: value for other, value in ratios.items() if value is not None},
        "samples": [
            {"round": number, **asdict(sample)} for number, sample in case.samples[name].items()
        ],
    }


def read_reports(paths: Iterable[Path]) -> Results:
    """Return the cases of files that `--json` wrote. The last file that has a case is used for it.

    Raises:
        BenchError: a file cannot be read, or is not a report of this version.
    """
    cases: dict[str, Case] = {}
    results = Results()
    for path in paths:
        try:
            whole = json.loads(path.read_text())
            if whole["schema"] != SCHEMA:
                raise BenchError(f"{path} has schema {whole['schema']}, not {SCHEMA}")
            cases.update((found["key"], _case_from_json(found)) for found in whole["cases"])
            results.missing.update(whole["missing"])
        except OSError as error:
            raise BenchError(f"{path} cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BenchError(f"{path} is not a report of aiordma bench: {error!r}") from error
    results.cases.extend(cases.values())
    return results


def _case_from_json(found: dict[str, Any]) -> Case:
    case = Case(Work(**_known(found["work"], _WORK_FIELDS)))
    case.failures.update(found["failures"])
    case.loop_times.extend(found.get("loop_times", []))
    for implementation in found["implementations"]:
        samples = case.samples.setdefault(implementation["name"], {})
        for sample in implementation["samples"]:
            samples[sample["round"]] = Sample(**_known(sample, _SAMPLE_FIELDS))
    return case


def _known(values: dict[str, Any], names: set[str]) -> dict[str, Any]:
    """Return the values of these names. Older reports have others."""
    return {name: values[name] for name in names & values.keys()}


def check_outputs(json_file: str | None, directory: str | None) -> tuple[Path | None, Path | None]:
    """Create the file and the directory for the outputs if they do not exist; return their paths.

    Called before anything is measured, so that a wrong path costs no time.

    Raises:
        BenchError: one cannot be written to, or the directory for diagrams is given and
            matplotlib is not installed.
    """
    if directory is not None and not has_matplotlib():
        raise BenchError("--plot needs matplotlib: pip install 'aiordma[bench]'")
    try:
        if json_file is not None:
            with Path(json_file).open("a"):
                pass
        if directory is not None:
            Path(directory).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BenchError(f"{error.filename} cannot be written: {error.strerror}") from error
    if directory is not None and not os.access(directory, os.W_OK):
        raise BenchError(f"{directory} cannot be written to")
    return Path(json_file) if json_file else None, Path(directory) if directory else None


def has_matplotlib() -> bool:
    """Return True if matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def write_json(path: Path, whole: dict[str, object]) -> None:
    """Write the report, in place of the one before.

    It is written to another file, which is then renamed: a process or a machine that is killed
    meanwhile leaves one of the two. A device or a pipe is written to.

    Raises:
        BenchError: the file cannot be written.
    """
    text = json.dumps(whole, indent=2) + "\n"
    target = path.resolve()  # a link stays one
    new = target.with_name(f"{target.name}.new")
    try:
        if target.exists() and not target.is_file():
            target.write_text(text)
            return
        with new.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        new.replace(target)
    except OSError as error:
        raise BenchError(f"{path} cannot be written: {error.strerror}") from error


def draw(results: Results, directory: Path) -> None:
    """Draw the diagrams.

    Raises:
        BenchError: a file cannot be written.
    """
    from aiordma.bench.plot import draw_all

    try:
        draw_all(results.cases, directory)
    except OSError as error:
        raise BenchError(f"{directory} cannot be written to: {error.strerror}") from error
