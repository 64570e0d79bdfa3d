"""Opening: the result of connect(), listen() and accept(), to await or to enter."""

from __future__ import annotations

from collections.abc import Coroutine, Generator
from types import TracebackType
from typing import Any, Protocol, TypeVar


class Closable(Protocol):
    """Something to be closed, gracefully or at once."""

    async def aclose(self) -> None:
        """Close it, and wait until that is done."""

    def abort(self) -> None:
        """Close it at once."""


T = TypeVar("T", bound=Closable)


class Opening(Coroutine[object, None, T]):
    """`x = await opening`, or `async with opening as x`, which closes x at the end of the block.

    A block that is cancelled aborts what it opened instead: nobody has time for a farewell then.
    """

    def __init__(self, coroutine: Coroutine[object, None, T]) -> None:
        self._coroutine = coroutine
        self._opened: T | None = None

    def send(self, value: None, /) -> object:
        """As a coroutine's: an Opening can be given to create_task()."""
        return self._coroutine.send(value)

    def throw(self, *exception: Any) -> object:
        """As a coroutine's."""
        return self._coroutine.throw(*exception)

    def close(self) -> None:
        """As a coroutine's."""
        self._coroutine.close()

    def __await__(self) -> Generator[object, None, T]:
        return self._coroutine.__await__()

    async def __aenter__(self) -> T:
        self._opened = await self._coroutine
        return self._opened

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._opened is not None
        if exc is not None and not isinstance(exc, Exception):
            self._opened.abort()
        await self._opened.aclose()
