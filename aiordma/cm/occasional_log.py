"""OccasionalLog: log messages that a peer can cause, without letting it fill the log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

LOG_SECONDS = 10.0


class OccasionalLog:
    """Logs the first message, and then at most one message in LOG_SECONDS.

    A message that is logged later says how many were left out before it. Those are logged at level
    DEBUG.
    """

    __slots__ = ("_clock", "_left_out", "_logger", "_next_at")

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._clock = clock
        self._next_at = float("-inf")
        self._left_out = 0

    def log(self, level: int, text: str, *arguments: object) -> None:
        """Log `text % arguments`, at level DEBUG if one was logged in the last LOG_SECONDS."""
        now = self._clock()
        if now < self._next_at:
            self._left_out += 1
            self._logger.debug(text, *arguments)
            return
        if self._left_out:
            text += " (%d such messages were left out)"
            arguments += (self._left_out,)
        self._next_at, self._left_out = now + LOG_SECONDS, 0
        self._logger.log(level, text, *arguments)
