"""What trio's programs expect to be raised, for what aiordma raises."""

from __future__ import annotations

from typing import NoReturn

from trio import BrokenResourceError, BusyResourceError, ClosedResourceError

from aiordma.errors import BusyError, LocalClosed, RdmaError


def raise_as_trio(error: RdmaError) -> NoReturn:
    """Raise what trio has for `error`, which stays its cause."""
    if isinstance(error, BusyError):
        raise BusyResourceError(str(error)) from error
    if isinstance(error, LocalClosed):
        raise ClosedResourceError(str(error)) from error
    raise BrokenResourceError(str(error)) from error
