"""What asyncio's programs expect to be raised, for what aiordma raises."""

from __future__ import annotations

import errno

from aiordma.errors import PeerClosed, RdmaError


def as_os_error(error: RdmaError) -> OSError:
    """An OSError for `error`, which is its cause: a ConnectionError where the peer went away."""
    if isinstance(error, OSError):
        return error
    if isinstance(error, PeerClosed):
        known: OSError = ConnectionResetError(errno.ECONNRESET, str(error))
    else:
        known = ConnectionAbortedError(errno.ECONNABORTED, str(error))
    known.__cause__ = error
    return known
