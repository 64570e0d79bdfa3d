"""The performance goals of aiordma: ratios to other implementations in the same run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median

from aiordma.bench.plan import MANY, Work
from aiordma.bench.suite import Case, Results

BUSY_POLLING = ("aiordma asyncio busy_poll", "aiordma uvloop busy_poll", "aiordma trio busy_poll")
DEFAULT = ("aiordma asyncio", "aiordma uvloop", "aiordma trio")
ANY = (*BUSY_POLLING, *DEFAULT)
STREAM = ("aiordma ByteStream",)
OBJECTS = ("aiordma MessageStream", "aiordma MessageStream busy_poll")
WRITER = ("aiordma reader, writer",)


@dataclass(frozen=True)
class Goal:
    """A goal and the value that was reached."""

    title: str
    """The title of the case."""
    implementation: str
    """The implementation with the best value: a goal is met if it is on one event loop."""
    reached: float
    limit: float
    unit: str
    at_most: bool
    """True if the limit is an upper bound, False if it is a lower bound."""
    strictly: bool = False
    """True if a value equal to the limit does not meet the goal."""

    @property
    def met(self) -> bool:
        """True if the goal was met."""
        if self.strictly:
            return self.reached < self.limit
        return self.reached <= self.limit if self.at_most else self.reached >= self.limit

    @property
    def sign(self) -> str:
        """The relation of `reached` to `limit` that meets the goal."""
        return "<" if self.strictly else "<=" if self.at_most else ">="


@dataclass(frozen=True)
class _Rule:
    """A bound on the ratio of an implementation of aiordma to another, in one case."""

    key: str
    ours: tuple[str, ...]
    other: str
    limit: float
    at_most: bool = False
    strictly: bool = False


_RULES = (
    _Rule("latency/64", BUSY_POLLING, "ib_send_lat", 2.0, at_most=True),
    _Rule("latency/64", BUSY_POLLING, "TCP uvloop", 0.5, at_most=True, strictly=True),
    _Rule("latency/64", DEFAULT, "pyverbs", 1.0, at_most=True, strictly=True),
    _Rule("latency/64", ("aiordma asyncio",), "TCP asyncio", 1.0, at_most=True, strictly=True),
    _Rule("latency/64", DEFAULT, "ib_send_lat -e", 2.5, at_most=True),
    _Rule("latency/64", ("aiordma asyncio parked",), "pyverbs", 1.25, at_most=True),
    _Rule("latency/64", ("aiordma uvloop parked",), "pyverbs", 1.0, at_most=True, strictly=True),
    _Rule("latency/64", STREAM, "rstream", 4.0, at_most=True),
    _Rule("latency/64", STREAM, "TCP uvloop", 0.25, at_most=True),
    _Rule("latency/64", WRITER, "TCP uvloop", 0.5, at_most=True),
    _Rule("latency/64", ("aiordma trio stream",), "TCP trio", 1.0, at_most=True, strictly=True),
    _Rule("rate/64", ANY, "ib_send_bw", 0.5),
    *(
        _Rule(f"bandwidth/{operation}/{size}", ANY, f"ib_{operation}_bw", limit)
        for operation, limit in (("send", 0.9), ("write", 0.95), ("read", 0.95))
        for size in (65536, 1048576)
    ),
    *(
        _Rule(f"bandwidth/send/{size}", ours, other, limit)
        for size in (65536, 1048576)
        for ours in (STREAM, WRITER)
        for other, limit in (("rstream", 0.9), ("ib_send_bw", 0.85))
    ),
    _Rule("latency/64", ("aiordma MessageStream",), "aiordma asyncio", 1.3, at_most=True),
    *(_Rule(f"objects/{size}", OBJECTS, "ib_read_bw", 0.9) for size in (1 << 20, 1 << 26)),
    *(_Rule(f"http/{count}", ("aiordma aiohttp",), "TCP aiohttp", 2.0) for count in (1, 50)),
    _Rule("connections", DEFAULT, "cmtime", 0.5),
)

_KIB_EACH = {"idle": 40.0, "idle/streams": 64.0}
"""The limit of the memory of a connection, and of a stream, in KiB."""
_RATIO_TO_ALONE = 1.2
_RECONNECT_RATIO = 1.5
"""The limit of the time until all are served again: x the time that `connections` needs."""


_MOST = {
    **{f"http/{count}": "aiohttp in memory" for count in (1, 50)},
    **{f"bandwidth/read/{size}": "ib_read_bw -e" for size in (65536, 1048576)},
}
"""By the key of a work: the implementation that shows how much can be reached at most."""


def is_compared(work: Work, name: str) -> bool:
    """Return True if a goal of this work needs the implementation of this name.

    Those that show what can be reached at most are needed, too.
    """
    return (
        work.test in MANY
        or name == _MOST.get(work.key)
        or any(rule.key == work.key and name in (*rule.ours, rule.other) for rule in _RULES)
    )


def goals(results: Results) -> list[Goal]:
    """Return the goals for which the results have both implementations."""
    cases = {case.work.key: case for case in results.cases}
    found = [
        goal
        for rule in _RULES
        if rule.key in cases
        if (goal := _ratio_goal(rule, cases[rule.key])) is not None
    ]
    return [*found, *_memory_goals(cases), *_latency_goals(cases), *_reconnect_goals(cases)]


def _ratio_goal(rule: _Rule, case: Case) -> Goal | None:
    ratios = {name: case.ratio(name, rule.other) for name in rule.ours}
    known = {name: value for name, value in ratios.items() if value is not None}
    if not known:
        return None
    best = (min if rule.at_most else max)(known, key=lambda name: known[name])
    return Goal(
        case.work.title,
        best,
        known[best],
        rule.limit,
        f"x {rule.other}",
        rule.at_most,
        rule.strictly,
    )


def _memory_goals(cases: Mapping[str, Case]) -> Iterator[Goal]:
    for key, limit in _KIB_EACH.items():
        if key in cases:
            case = cases[key]
            for name in case.samples:
                yield Goal(case.work.title, name, case.value(name) or 0.0, limit, "KiB each", True)


def _latency_goals(cases: Mapping[str, Case]) -> Iterator[Goal]:
    for key in (*_KIB_EACH, "answering"):
        if key in cases:
            case = cases[key]
            for name, samples in case.samples.items():
                slower = median(sample.details["latency_ratio"] for sample in samples.values())
                limit = _RATIO_TO_ALONE
                yield Goal(case.work.title, name, slower, limit, "x latency alone", True)


def _reconnect_goals(cases: Mapping[str, Case]) -> Iterator[Goal]:
    """The time is compared with that of the same number of connections of `connections`.

    All runs of `connections` count, as there is one run of `reconnect` in each round.
    """
    if "reconnect" in cases and "connections" in cases:
        case, ordinary = cases["reconnect"], cases["connections"]
        for name in case.samples.keys() & ordinary.samples.keys():
            samples = ordinary.samples[name].values()
            rate = median(run for sample in samples for run in sample.runs or [sample.value])
            reached = rate / (case.value(name) or 1.0)
            yield Goal(
                case.work.title, name, reached, _RECONNECT_RATIO, "x time of connections", True
            )
