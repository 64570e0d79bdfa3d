"""What anyio's programs expect to be raised, for what aiordma raises."""

from __future__ import annotations

from typing import NoReturn

from anyio import BrokenResourceError, BusyResourceError, ClosedResourceError

from aiordma.errors import BusyError, LocalClosed, RdmaError


def raise_as_anyio(error: RdmaError, action: str, *, is_over: bool) -> NoReturn:
    """Raise what anyio has for `error`, which stays its cause.

    An error that has not ended what is used, such as the lack of memory for one message, is raised
    as it is: `is_over` tells.
    """
    if isinstance(error, BusyError):
        raise BusyResourceError(action) from error
    if isinstance(error, LocalClosed):
        raise ClosedResourceError(str(error)) from error
    if is_over:
        raise BrokenResourceError(str(error)) from error
    raise error
