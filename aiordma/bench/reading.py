"""Earlier reports, read again: to draw them elsewhere, or several in one."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

from aiordma.bench.errors import BenchError
from aiordma.bench.report import SCHEMA
from aiordma.bench.sample import Sample
from aiordma.bench.suite import Case, Results
from aiordma.bench.work import Work

_SAMPLE = {field.name for field in fields(Sample)}


def read_reports(paths: Iterable[Path]) -> Results:
    """What `--json` wrote, case after case. Of a case that several have, the last counts.

    Raises:
        BenchError: one cannot be read, or is no report of this version.
    """
    cases: dict[str, Case] = {}
    results = Results()
    for path in paths:
        try:
            whole = json.loads(path.read_text())
            if whole["schema"] != SCHEMA:
                raise BenchError(f"{path} has schema {whole['schema']}, not {SCHEMA}")
            cases.update((found["key"], _case(found)) for found in whole["cases"])
            results.missing.update(whole["missing"])
        except OSError as error:
            raise BenchError(f"{path} cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BenchError(f"{path} is no report of aiordma bench: {error!r}") from error
    results.cases.extend(cases.values())
    return results


def _case(found: dict[str, Any]) -> Case:
    case = Case(Work(**found["work"]))
    case.failures.update(found["failures"])
    for contender in found["contenders"]:
        case.samples[contender["name"]] = {
            sample["round"]: Sample(**{name: sample[name] for name in _SAMPLE})
            for sample in contender["samples"]
        }
    return case
