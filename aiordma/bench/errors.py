"""The exception of aiordma.bench."""

from __future__ import annotations


class BenchError(Exception):
    """The reason why a benchmark cannot run, or why one of its processes failed.

    The message is one sentence. For a process that failed, the last lines of its output follow.
    """
