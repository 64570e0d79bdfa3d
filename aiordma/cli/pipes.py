"""Commands whose output is read through a pipe, such as `aiordma doctor | head`."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def ended_by_closed_pipe() -> Iterator[None]:
    """End the process silently if the reader closes the pipe in the block, as other programs do."""
    before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        yield
        sys.stdout.flush()
    finally:
        signal.signal(signal.SIGPIPE, before)
