"""Tally: what came of the messages of a ping, and the lines that say so."""

from __future__ import annotations

import math
import statistics
from collections import deque

# The median is that of the last so many round trips: a ping may run for days.
_REMEMBERED = 100_000


class Tally:
    """Counts of messages, and their round-trip times in seconds.

    A message that Ctrl-C has cut short counts for nothing: it is neither answered nor lost.
    """

    def __init__(self) -> None:
        self.peer = ""
        """Whom the messages went to, for whoever reads the lines."""
        self.received = 0
        self.lost = 0
        self.wrong = 0
        """So many of those received were not what had been sent."""
        self._recent: deque[float] = deque(maxlen=_REMEMBERED)
        self._least = math.inf
        self._most = 0.0
        self._sum = 0.0
        self._sum_of_squares = 0.0

    @property
    def sent(self) -> int:
        """How many messages were sent."""
        return self.received + self.lost

    @property
    def good(self) -> bool:
        """Whether answers came, and every one was right."""
        return self.received > 0 and not self.lost and not self.wrong

    def add(self, seconds: float) -> None:
        """Count an answer that took so long."""
        self.received += 1
        self._recent.append(seconds)
        self._least = min(self._least, seconds)
        self._most = max(self._most, seconds)
        self._sum += seconds
        self._sum_of_squares += seconds * seconds

    def lines(self) -> list[str]:
        """The statistics, as ping(8) has them; nothing if nothing was sent."""
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
        # As ping(8): the standard deviation. What rounding leaves below zero is none.
        deviation = math.sqrt(max(self._sum_of_squares / self.received - mean * mean, 0.0))
        values = (self._least, mean, statistics.median(self._recent), self._most, deviation)
        text = "/".join(f"{value * 1e3:.3f}" for value in values)
        return [f"round trip min/avg/median/max/mdev = {text} ms"]
