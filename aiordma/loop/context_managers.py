"""Context managers: mixins that close on exit, and results to await or to enter."""

from __future__ import annotations

from collections.abc import Coroutine, Generator
from types import TracebackType
from typing import Any, Protocol, TypeVar


class _Closable(Protocol):
    def close(self) -> None: ...


class _AsyncClosable(Protocol):
    async def aclose(self) -> None: ...


class _Abortable(_AsyncClosable, Protocol):
    def abort(self) -> None: ...


T = TypeVar("T")


class ContextManagerMixin:
    """A base for what has close(): `with` closes it."""

    __slots__ = ()

    def __enter__(self: T) -> T:
        return self

    def __exit__(
        self: _Closable,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class AsyncContextManagerMixin:
    """A base for what has aclose(): `async with` closes it."""

    __slots__ = ()

    async def __aenter__(self: T) -> T:
        return self

    async def __aexit__(
        self: _AsyncClosable,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()


class AbortingContextManagerMixin:
    """Likewise; a block that is cancelled aborts it: nobody has time for a farewell then."""

    __slots__ = ()

    async def __aenter__(self: T) -> T:
        return self

    async def __aexit__(
        self: _Abortable,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if exc is not None and not isinstance(exc, Exception):
            self.abort()
        await self.aclose()


class Closable(Protocol):
    """Something to be closed, gracefully or at once."""

    async def aclose(self) -> None:
        """Close it, and wait until that is done."""

    def abort(self) -> None:
        """Close it at once."""


C = TypeVar("C", bound=Closable)


class AwaitableContextManager(Coroutine[object, None, C]):
    """`x = await opening`, or `async with opening as x`, which closes x at the end of the block.

    A block that is cancelled aborts what it opened instead: nobody has time for a farewell then.
    """

    def __init__(self, coroutine: Coroutine[object, None, C]) -> None:
        self._coroutine = coroutine
        self._opened: C | None = None

    def send(self, value: None, /) -> object:
        """As a coroutine's: an Opening can be given to create_task()."""
        return self._coroutine.send(value)

    def throw(self, *exception: Any) -> object:
        """As a coroutine's."""
        return self._coroutine.throw(*exception)

    def close(self) -> None:
        """As a coroutine's."""
        self._coroutine.close()

    def __await__(self) -> Generator[object, None, C]:
        return self._coroutine.__await__()

    async def __aenter__(self) -> C:
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
