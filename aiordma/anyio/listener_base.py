"""BaseListener: the common base of the anyio listeners for messages and for byte streams."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Generic, NoReturn, TypeVar

from anyio import create_task_group
from anyio.abc import AsyncResource, TaskGroup
from anyio.abc import Listener as AnyioListener

from aiordma.anyio.attributes import Attributes, address_attributes
from aiordma.anyio.rules import adapter_checkpoint, raise_as_anyio
from aiordma.cm.accepting import BaseListener as CoreListener
from aiordma.cm.accepting import accept_or_log
from aiordma.cm.handshakes import ListenerStats
from aiordma.errors import RdmaError, VerbsError
from aiordma.loop.context_managers import Closable

ACCEPTING = "accepting connections from"

C = TypeVar("C", bound=Closable)
S = TypeVar("S", bound=AsyncResource)


class BaseListener(AnyioListener[S], Generic[C, S]):
    """An anyio listener, which wraps a listener of aiordma itself."""

    def __init__(self, listener: CoreListener[Any, C], present: Callable[[C], S]) -> None:
        """Own `listener` from now on.

        `present` makes an anyio stream of each connection that the listener accepts.
        """
        self._listener = listener
        self._present = present
        self._checkpoint = adapter_checkpoint()

    @property
    def stats(self) -> ListenerStats:
        """A snapshot of the listener's counters, and of the numbers of its peers."""
        return self._listener.stats

    async def _accept(self, accept: Callable[[], Awaitable[C]]) -> S:
        await self._checkpoint()
        try:
            return self._present(await accept())
        except RdmaError as error:
            _raise(error)

    async def serve(
        self, handler: Callable[[S], Awaitable[object]], task_group: TaskGroup | None = None
    ) -> None:
        """Accept every peer, and run `handler(stream)` for each in a task of the task group.

        Without `task_group`, serve() makes a task group. The stream is closed when its handler
        returns or raises. For a stream that outlives its handler, use accept(). An exception of a
        handler ends the task group, as in all anyio listeners. A peer that gives up halfway, or
        cannot be accepted, is logged. A slow peer does not delay the others.

        serve() ends when the listener is closed, which raises an exception. It also ends when it is
        cancelled, which does not close the listener. If serve() made the task group, the handlers
        that still run are cancelled then.

        Raises:
            ClosedResourceError, BrokenResourceError, BusyResourceError: as accept(). If serve()
                made the task group, they are in an ExceptionGroup, with the exceptions of the
                handlers.
        """
        if task_group is not None:
            await self._serve(handler, task_group)
            return
        async with create_task_group() as new_group:
            await self._serve(handler, new_group)

    async def _serve(
        self, handler: Callable[[S], Awaitable[object]], task_group: TaskGroup
    ) -> None:
        while True:
            stream = await self._accept(partial(accept_or_log, self._listener))
            task_group.start_soon(self._serve_one, stream, handler)

    async def _serve_one(self, stream: S, handler: Callable[[S], Awaitable[object]]) -> None:
        async with stream:
            await handler(stream)

    async def aclose(self) -> None:
        """Stop listening, and wait until the listener is closed. Idempotent.

        Tasks that accept get ClosedResourceError. Cancelling stops only the wait.
        """
        await self._listener.aclose()
        await self._checkpoint()

    def abort(self) -> None:
        """Stop listening, without waiting. Idempotent."""
        self._listener.abort()

    @property
    def extra_attributes(self) -> Attributes:
        """The attributes for `extra()`.

        They are `family`, `local_address` and `local_port` of SocketAttribute, and `local_address`
        of RdmaAttribute. A listener on all addresses, IPv4 and IPv6, has those of one of the two.
        """
        return address_attributes(self._listener.local_address)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._listener!r}>"


def _raise(error: RdmaError) -> NoReturn:
    # A VerbsError concerns one peer only. All other errors end the listener.
    raise_as_anyio(error, ACCEPTING, is_over=not isinstance(error, VerbsError))
