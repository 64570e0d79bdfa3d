"""Calls of which each one must be made, whatever happens in another."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TypeVar

logger = logging.getLogger(__name__)

A = TypeVar("A")


def call_each(function: Callable[[A], object], arguments: Iterable[A], failed: str) -> None:
    """Call `function` with each argument, even if a call before raises or is interrupted.

    Errors are logged with the message `failed` and the argument.

    Raises: KeyboardInterrupt, after the last call.
    """
    interrupt: BaseException | None = None
    for argument in arguments:
        try:
            function(argument)
        except Exception:
            logger.exception("%s: %s", failed, argument)
        except BaseException as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt
