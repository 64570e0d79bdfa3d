"""Sample: what one run of one contender gave; medians, percentiles and ratios."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median

PERCENTILES = {"50": 0.5, "90": 0.9, "99": 0.99, "99.9": 0.999}


@dataclass(frozen=True, slots=True)
class Sample:
    """One run. `value` and `percentiles` are in the unit of its test."""

    value: float
    percentiles: dict[str, float] = field(default_factory=dict)
    """min, 50, 90, 99, 99.9, max, as far as they are known."""
    client_cpu: float | None = None
    """Processor time of the client's process for each operation, in microseconds."""
    server_cpu: float | None = None
    """Likewise of the server's, from when it listened until it had served."""
    details: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> Sample:
        """What to_json() made.

        Raises:
            ValueError: it is something else.
        """
        try:
            return cls(**json.loads(line))
        except TypeError as error:
            raise ValueError(f"no sample: {line}") from error


def percentile(ordered: Sequence[float], part: float) -> float:
    """The smallest of the sorted values that so large a part of them does not exceed."""
    return ordered[max(0, math.ceil(part * len(ordered)) - 1)]


def latency_sample(nanoseconds: Sequence[int], cpu: float | None = None) -> Sample:
    """The sample of round trips that took so long each; `cpu` seconds of processor time in all."""
    ordered = sorted(time / 1e3 for time in nanoseconds)
    percentiles = {name: percentile(ordered, part) for name, part in PERCENTILES.items()}
    each = None if cpu is None else cpu / len(ordered) * 1e6
    return Sample(
        median(ordered), {"min": ordered[0], **percentiles, "max": ordered[-1]}, client_cpu=each
    )


def middle(samples: Mapping[int, Sample]) -> float | None:
    """The median of the values of some rounds; None if there are none."""
    return median(sample.value for sample in samples.values()) if samples else None


def ratio(samples: Mapping[int, Sample], others: Mapping[int, Sample]) -> float | None:
    """The median of the ratios within each round that both took part in; None without any."""
    found = [
        samples[number].value / others[number].value
        for number in samples.keys() & others.keys()
        if others[number].value
    ]
    return median(found) if found else None
