"""The statistics of a ping, and the lines that report them."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable

PrintLine = Callable[[str], None]
"""A function that prints one line of output."""

# The median covers the latest round trips only: a ping can run for days.
_MAX_RECENT = 100_000


class Statistics:
    """Counts of messages, and their round-trip times in seconds.

    A message that Ctrl-C interrupts counts neither as answered nor as lost.
    """

    def __init__(self) -> None:
        self.peer = ""
        """The address and port of the peer, for the report."""
        self.received = 0
        """The number of answers, correct or wrong."""
        self.lost = 0
        """The number of messages without an answer."""
        self.wrong = 0
        """The number of answers that differ from the message sent."""
        self._recent: deque[float] = deque(maxlen=_MAX_RECENT)
        self._least = math.inf
        self._most = 0.0
        self._sum = 0.0
        self._sum_of_squares = 0.0

    @property
    def sent(self) -> int:
        """The number of messages sent."""
        return self.received + self.lost

    @property
    def all_correct(self) -> bool:
        """True if at least one answer came, none was lost and none was wrong."""
        return self.received > 0 and not self.lost and not self.wrong

    def add(self, seconds: float) -> None:
        """Count an answer, and its round-trip time."""
        self.received += 1
        self._recent.append(seconds)
        self._least = min(self._least, seconds)
        self._most = max(self._most, seconds)
        self._sum += seconds
        self._sum_of_squares += seconds * seconds

    def lines(self) -> list[str]:
        """Return the statistics in the format of ping(8); an empty list if nothing was sent."""
        if not self.sent:
            return []
        counts = f"{self.sent} sent, {self.received} received, {self.lost} lost"
        if self.wrong:
            counts += f", {self.wrong} wrong"
        return ["", f"--- {self.peer} ping statistics ---", counts, *self._times()]

    def _times(self) -> list[str]:
        if not self.received:
            return []
        mean = self._sum / self.received
        # The standard deviation, as ping(8) prints it. Rounding can make the variance negative.
        deviation = math.sqrt(max(self._sum_of_squares / self.received - mean * mean, 0.0))
        values = (self._least, mean, statistics.median(self._recent), self._most, deviation)
        text = "/".join(f"{value * 1e3:.3f}" for value in values)
        return [f"round trip min/avg/median/max/mdev = {text} ms"]
