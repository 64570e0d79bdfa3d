"""Forked children: they share the parent's RDMA objects, and must leave them alone."""

from __future__ import annotations

import os

from aiordma._native import fast_path
from aiordma.errors import RdmaError

_used = False
_forked = False


def is_forked_child() -> bool:
    """Whether this process was forked from one that had used aiordma, without an exec since.

    It shares the parent's RDMA objects through its descriptors: destroying one here would destroy
    it there.
    """
    return _forked


def refuse_forked_child() -> None:
    """Make sure that this process is no forked child.

    Raises:
        RdmaError: it is.
    """
    if _forked:
        raise RdmaError(
            "RDMA cannot be used in a forked child: start it with multiprocessing's spawn or "
            "forkserver method, or as a subprocess"
        )


def note_use() -> None:
    """This process uses aiordma: children that it forks from now on may not."""
    global _used
    _used = True


def _note_fork() -> None:
    global _forked
    _forked = _used
    if _forked:
        fast_path.note_fork()


os.register_at_fork(after_in_child=_note_fork)
