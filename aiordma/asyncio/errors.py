"""The OSErrors that asyncio programs expect, for the exceptions of aiordma."""

from __future__ import annotations

import errno

from aiordma.errors import PeerClosed, PeerTimeout, RdmaError


def as_os_error(error: RdmaError) -> OSError:
    """Return an OSError for `error`, with `error` as its cause.

    If `error` is an OSError already, return it. Otherwise return a ConnectionResetError for
    PeerClosed, a TimeoutError for PeerTimeout, and a ConnectionAbortedError for any other error.
    """
    if isinstance(error, OSError):
        return error
    if isinstance(error, PeerClosed):
        os_error: OSError = ConnectionResetError(errno.ECONNRESET, str(error))
    elif isinstance(error, PeerTimeout):
        os_error = TimeoutError(errno.ETIMEDOUT, str(error))
    else:
        os_error = ConnectionAbortedError(errno.ECONNABORTED, str(error))
    os_error.__cause__ = error
    return os_error
