"""Progress: show on standard error which run is in progress."""

from __future__ import annotations

import shutil
import time
from typing import TextIO

from aiordma.bench.suite import Step


class Progress:
    """A line that is rewritten on a terminal; elsewhere one line for each case and round."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._is_terminal = out.isatty()
        self._begin = time.monotonic()
        self._last = ""

    def __call__(self, step: Step) -> None:
        """Show this step."""
        elapsed = int(time.monotonic() - self._begin)
        clock = f"{elapsed // 60}:{elapsed % 60:02}"
        stage = f"{step.work.title}, round {step.round} of {step.rounds}"
        if self._is_terminal:
            width = shutil.get_terminal_size().columns - 1
            line = f"{clock}  {stage}: {step.implementation}"[:width]
            self._out.write(f"\r\x1b[K{line}")
        elif stage != self._last:
            self._out.write(f"{clock}  {stage}\n")
        self._last = stage
        self._out.flush()

    def clear(self) -> None:
        """Remove the line from a terminal."""
        if self._is_terminal:
            self._out.write("\r\x1b[K")
            self._out.flush()
