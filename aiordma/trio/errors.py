"""The exceptions that trio programs expect, for the exceptions of aiordma."""

from __future__ import annotations

from typing import NoReturn

from trio import BrokenResourceError, BusyResourceError, ClosedResourceError

from aiordma.errors import BusyError, LocalClosed, RdmaError


def raise_as_trio(error: RdmaError) -> NoReturn:
    """Raise the trio exception for `error`, with `error` as its cause."""
    if isinstance(error, BusyError):
        raise BusyResourceError(str(error)) from error
    if isinstance(error, LocalClosed):
        raise ClosedResourceError(str(error)) from error
    raise BrokenResourceError(str(error)) from error
