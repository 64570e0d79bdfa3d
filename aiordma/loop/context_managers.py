"""Context managers: mixins that close an object on exit, and awaitable context managers."""

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
    """A base class for objects with close(): the end of a `with` block closes them."""

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
    """A base class for objects with aclose(): the end of an `async with` block closes them."""

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
    """A base class for objects with aclose() and abort().

    The end of an `async with` block closes the object. If the block is cancelled, it aborts the
    object first, because closing gracefully could take long.
    """

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
    """An object that can be closed gracefully or at once."""

    async def aclose(self) -> None:
        """Close the object gracefully, and wait until it is closed."""

    def abort(self) -> None:
        """Close the object at once."""


C = TypeVar("C", bound=Closable)


class AwaitableContextManager(Coroutine[object, None, C]):
    """The result of a function that opens an object: use it with `await` or with `async with`.

    `x = await function()` only opens the object. `async with function() as x` also closes it at the
    end of the block. If the block is cancelled, it aborts the object first, because closing
    gracefully could take long.
    """

    def __init__(self, coroutine: Coroutine[object, None, C]) -> None:
        self._coroutine = coroutine
        self._opened: C | None = None

    def send(self, value: None, /) -> object:
        """Resume the coroutine. With this method, create_task() accepts the object."""
        return self._coroutine.send(value)

    def throw(self, *exception: Any) -> object:
        """Raise an exception in the coroutine."""
        return self._coroutine.throw(*exception)

    def close(self) -> None:
        """Close the coroutine."""
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
