"""The suite: run each test, round by round, with every implementation in each round."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from aiordma.bench.environment import Environment
from aiordma.bench.errors import BenchError
from aiordma.bench.implementations import Implementation
from aiordma.bench.plan import TESTS, Work
from aiordma.bench.sample import Sample, median_ratio, median_value
from aiordma.bench.worker_pairs import WorkerPairs

_LOOP_ITERATIONS = 30_000
_LOOP_REPETITIONS = 3


@dataclass(frozen=True)
class Step:
    """The run that is in progress: an implementation in a round."""

    work: Work
    implementation: str
    round: int
    """Counted from 1."""
    rounds: int


@dataclass
class Case:
    """Some work, and the results of the implementations that did it."""

    work: Work
    samples: dict[str, dict[int, Sample]] = field(default_factory=dict)
    """By implementation and round: the best sample of the round's runs."""
    failures: dict[str, str] = field(default_factory=dict)
    """The error message of each implementation that failed."""
    loop_times: list[float] = field(default_factory=list)
    """Seconds that the same loop of Python took before each run: how steady the machine was."""

    def add(self, name: str, number: int, sample: Sample) -> None:
        """Add the sample of a run in round `number`. Of several, the best one is kept."""
        samples = self.samples.setdefault(name, {})
        before = samples.get(number)
        if before is not None:
            lower = TESTS[self.work.test].lower_is_better
            best = (min if lower else max)(before, sample, key=lambda one: one.value)
            sample = replace(best, runs=[*(before.runs or [before.value]), sample.value])
        samples[number] = sample

    def value(self, name: str) -> float | None:
        """Return the median of an implementation's values; None if it has none."""
        return median_value(self.samples.get(name, {}))

    def ratio(self, name: str, other: str) -> float | None:
        """Return the median of the rounds' ratios of `name` to `other`; None if one is missing."""
        return median_ratio(self.samples.get(name, {}), self.samples.get(other, {}))

    @property
    def slowdown(self) -> float:
        """The longest of the loop's times in multiples of the shortest one; 1.0 if unknown."""
        return max(self.loop_times) / min(self.loop_times) if self.loop_times else 1.0


@dataclass
class Results:
    """The cases that have begun, and the implementations that are not installed."""

    cases: list[Case] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    """The package to install, by implementation."""

    @property
    def failed(self) -> bool:
        """True if an implementation failed."""
        return any(case.failures for case in self.cases)


def any_implementation(work: Work, name: str) -> bool:
    """Return True: all implementations of a work are wanted."""
    return True


def run_suite(
    results: Results,
    works: Iterable[Work],
    implementations: Sequence[Implementation],
    environment: Environment,
    rounds: int,
    progress: Callable[[Step], None],
    finished: Callable[[Case], None],
    is_wanted: Callable[[Work, str], bool] = any_implementation,
) -> None:
    """Run each work with all implementations that support it and whose names are wanted for it.

    `results` is filled step by step: an interrupt leaves those so far. An implementation that
    fails is left out of the later rounds of that case, and its error is noted in the case.
    `finished` is called for each case at its end, and for the one that was interrupted.
    """
    installed = [one for one in implementations if one.is_installed()]
    for work in works:
        suitable = [one for one in implementations if one.supports(work)]
        wanted = [one for one in suitable if is_wanted(work, one.name)]
        results.missing.update((one.name, one.install) for one in wanted if one not in installed)
        found = [one for one in wanted if one in installed]
        if found:
            case = Case(work)
            results.cases.append(case)
            try:
                _run_case(case, _spread(found), environment, rounds, progress)
            finally:
                case.samples = {
                    one.name: case.samples[one.name] for one in found if one.name in case.samples
                }
                finished(case)


def _spread(implementations: Sequence[Implementation]) -> list[Implementation]:
    """Return an order in which the other programs are spread evenly among those of aiordma.

    So the two values of a ratio are measured soon after each other.
    """
    ours = [one for one in implementations if one.family == "aiordma"]
    others = [one for one in implementations if one.family != "aiordma"]
    places = [
        ((number + 0.5) / len(group), one)
        for group in (ours, others)
        for number, one in enumerate(group)
    ]
    return [one for _, one in sorted(places, key=lambda place: place[0])]


def _run_case(
    case: Case,
    implementations: Sequence[Implementation],
    environment: Environment,
    rounds: int,
    progress: Callable[[Step], None],
) -> None:
    """Run a case: in each round, every implementation takes `Work.runs` turns.

    Every second turn has the opposite order, so a machine that becomes slower or faster meanwhile
    favors no implementation. The processes of implementations in Python are started in the first
    turn, and do the work of all.
    """
    turns = [number for number in range(1, rounds + 1) for _ in range(case.work.runs)]
    with contextlib.closing(WorkerPairs()) as workers:
        for turn, number in enumerate(turns):
            for implementation in reversed(implementations) if turn % 2 else implementations:
                if implementation.name in case.failures:
                    continue
                progress(Step(case.work, implementation.name, number, rounds))
                case.loop_times.append(_loop_time())
                try:
                    sample = implementation.run(case.work, environment, workers)
                except BenchError as error:
                    case.failures[implementation.name] = str(error)
                else:
                    case.add(implementation.name, number, sample)


def _loop_time() -> float:
    """Return the seconds that a loop takes whose work is always the same: the best of some runs.

    The best one, because processes of the run before can still be ending.
    """
    times = []
    for _ in range(_LOOP_REPETITIONS):
        begin = time.perf_counter()
        for _ in range(_LOOP_ITERATIONS):
            pass
        times.append(time.perf_counter() - begin)
    return min(times)
