"""Sample: the result of a run of an implementation; medians, percentiles and ratios."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median

PERCENTILES = {"50": 0.5, "90": 0.9, "99": 0.99, "99.9": 0.999}


@dataclass(frozen=True, slots=True)
class Sample:
    """The result of one run. `value` and `percentiles` are in the unit of its test."""

    value: float
    percentiles: dict[str, float] = field(default_factory=dict)
    """Percentiles by their names: "min", "50", "90", "99", "99.9", "max"; only the known ones."""
    client_cpu: float | None = None
    """Processor time of the client's process for each operation, in microseconds."""
    server_cpu: float | None = None
    """The same of the server's process, from before it listens until it has served the client."""
    details: dict[str, float] = field(default_factory=dict)
    runs: list[float] = field(default_factory=list)
    """The values of all runs of its round, of which this is the best; empty if it is the only one.
    """

    def to_json(self) -> str:
        """Return it as one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> Sample:
        """Return the sample that to_json() made a line of.

        Raises:
            ValueError: the line is something else.
        """
        try:
            return cls(**json.loads(line))
        except TypeError as error:
            raise ValueError(f"not a sample: {line}") from error


def percentile(ordered: Sequence[float], fraction: float) -> float:
    """Return the smallest value that at least `fraction` of the sorted values do not exceed."""
    return ordered[max(0, math.ceil(fraction * len(ordered)) - 1)]


def latency_sample(nanoseconds: Sequence[int], cpu: float | None = None) -> Sample:
    """Return the sample of the round trips that took these times.

    `cpu` is the processor time of all of them together, in seconds.
    """
    ordered = sorted(time / 1e3 for time in nanoseconds)
    percentiles = {name: percentile(ordered, part) for name, part in PERCENTILES.items()}
    each = None if cpu is None else cpu / len(ordered) * 1e6
    return Sample(
        median(ordered), {"min": ordered[0], **percentiles, "max": ordered[-1]}, client_cpu=each
    )


def median_value(samples: Mapping[int, Sample]) -> float | None:
    """Return the median of the values of these rounds; None if there is none."""
    return median(sample.value for sample in samples.values()) if samples else None


def median_ratio(samples: Mapping[int, Sample], others: Mapping[int, Sample]) -> float | None:
    """Return the median of the ratios within each round that has both; None if there is none."""
    found = [
        samples[number].value / others[number].value
        for number in samples.keys() & others.keys()
        if others[number].value
    ]
    return median(found) if found else None
