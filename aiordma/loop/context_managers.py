"""What is closed by the end of a `with` or an `async with` block."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol, TypeVar


class _Closable(Protocol):
    def close(self) -> None: ...


class _AsyncClosable(Protocol):
    async def aclose(self) -> None: ...


class _Abortable(_AsyncClosable, Protocol):
    def abort(self) -> None: ...


T = TypeVar("T")


class Block:
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


class AsyncBlock:
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


class AbortableBlock:
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
