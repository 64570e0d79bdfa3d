"""BenchError: what a benchmark could not do."""

from __future__ import annotations


class BenchError(Exception):
    """One sentence of why; for a process that failed, with the last lines that it wrote."""
