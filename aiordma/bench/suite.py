"""The suite: each test, round after round, each contender in its turn."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from aiordma.bench.environment import Place
from aiordma.bench.errors import BenchError
from aiordma.bench.implementations import Contender
from aiordma.bench.plan import Work
from aiordma.bench.sample import Sample, middle, ratio


@dataclass(frozen=True)
class Step:
    """What is being run: a contender, in a round."""

    work: Work
    contender: str
    round: int
    """From 1 on."""
    rounds: int


@dataclass
class Case:
    """One piece of work, and what came of it."""

    work: Work
    samples: dict[str, dict[int, Sample]] = field(default_factory=dict)
    """By contender and round."""
    failures: dict[str, str] = field(default_factory=dict)
    """Why a contender did not finish."""

    def value(self, name: str) -> float | None:
        """The median of a contender's values; None if it did not take part."""
        return middle(self.samples.get(name, {}))

    def ratio(self, name: str, other: str) -> float | None:
        """The median of the rounds' ratios of one contender to another; None without both."""
        return ratio(self.samples.get(name, {}), self.samples.get(other, {}))


@dataclass
class Results:
    """All cases so far, and who was left out."""

    cases: list[Case] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    """What to install for contenders that were not found."""

    @property
    def failed(self) -> bool:
        """Whether any contender failed."""
        return any(case.failures for case in self.cases)


def run_suite(
    results: Results,
    works: Iterable[Work],
    contenders: Sequence[Contender],
    place: Place,
    rounds: int,
    progress: Callable[[Step], None],
) -> None:
    """Run everything. `results` is filled as it goes, so that an interrupt leaves what there is.

    A contender that fails is left out of the rest of that case, and named in it.
    """
    present = [contender for contender in contenders if contender.found()]
    for work in works:
        for contender in contenders:
            if contender.takes_part(work) and contender not in present:
                results.missing[contender.name] = contender.install
        taking_part = [contender for contender in present if contender.takes_part(work)]
        if taking_part:
            case = Case(work)
            results.cases.append(case)
            _run_case(case, taking_part, place, rounds, progress)


def _run_case(
    case: Case,
    contenders: Sequence[Contender],
    place: Place,
    rounds: int,
    progress: Callable[[Step], None],
) -> None:
    for number in range(1, rounds + 1):
        for contender in contenders:
            if contender.name in case.failures:
                continue
            progress(Step(case.work, contender.name, number, rounds))
            try:
                sample = contender.run(case.work, place)
            except BenchError as error:
                case.failures[contender.name] = str(error)
            else:
                case.samples.setdefault(contender.name, {})[number] = sample
