"""Forked children: they share the parent's RDMA objects, and must not use or destroy them."""

from __future__ import annotations

import os

from aiordma._native import fast_path
from aiordma.errors import RdmaError

_used = False

is_forked_child = fast_path.is_forked_child
"""Return True if this process was forked, without exec, from one that had used aiordma.

Such a process shares the parent's RDMA objects through its file descriptors. If it destroyed an
object, the object would be destroyed in the parent too.
"""


def refuse_forked_child() -> None:
    """Raise an error if this process is a forked child. See is_forked_child().

    Raises:
        RdmaError: this process is a forked child.
    """
    if is_forked_child():
        raise RdmaError(
            "RDMA cannot be used in a forked child: start the child with the spawn or forkserver "
            "method of multiprocessing, or as a subprocess"
        )


def note_use() -> None:
    """Record that this process uses aiordma, so that children forked from now on are refused."""
    global _used
    _used = True


def _note_fork() -> None:
    if _used:
        fast_path.note_fork()


os.register_at_fork(after_in_child=_note_fork)
