"""The numbers by which asynchronous events name queues and queue pairs.

An event carries a pointer. After the event was read, its queue pair can be destroyed, and another
one can get the same address before the event is handled. So each queue pair and completion queue
has a number as its context (`qp_context`, `cq_context`), which is never used again.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from aiordma._native import ffi

if TYPE_CHECKING:
    from aiordma._native._lib import VoidPtr

_numbers = itertools.count(1)


def new_context() -> VoidPtr:
    """Return the context of a new queue or queue pair."""
    return ffi.cast("void *", next(_numbers))


def element_of(context: VoidPtr) -> int:
    """Return the number of the queue or queue pair with this context."""
    return int(ffi.cast("uintptr_t", context))
