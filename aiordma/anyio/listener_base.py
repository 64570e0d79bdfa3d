"""Serving: what the listeners of anyio's have in common, whatever their peers exchange."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Generic, NoReturn, Protocol, TypeVar

from anyio import create_task_group
from anyio.abc import AsyncResource, TaskGroup
from anyio.abc import Listener as AnyioListener

from aiordma.anyio.attributes import Attributes, of_local_address
from aiordma.anyio.rules import adapter_checkpoint, raise_as_anyio
from aiordma.errors import ConnectError, ConnectionClosed, ProtocolError, RdmaError, VerbsError
from aiordma.loop.context_managers import AwaitableContextManager, Closable

logger = logging.getLogger(__name__)

ACCEPTING = "accepting connections from"

C = TypeVar("C", bound=Closable)
S = TypeVar("S", bound=AsyncResource)


class CoreRequest(Protocol[C]):
    """A peer that wants to connect."""

    def accept(self) -> AwaitableContextManager[C]:
        """Let it."""


class CoreListener(Protocol[C]):
    """A listener of the core's."""

    @property
    def local_address(self) -> tuple[str, int]:
        """Where."""

    async def get_request(self) -> CoreRequest[C]:
        """Wait for a peer."""

    async def aclose(self) -> None:
        """Stop listening."""

    def abort(self) -> None:
        """Stop listening, without waiting."""


class BaseListener(AnyioListener[S], Generic[C, S]):
    """A listener of anyio's, of one of the core's."""

    def __init__(self, listener: CoreListener[C], present: Callable[[C], S]) -> None:
        """Own `listener` from now on; `present` makes a stream of anyio's of what it accepts."""
        self._listener = listener
        self._present = present
        self._checkpoint = adapter_checkpoint()

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

        Without a task group it makes one of its own. The stream is closed when its handler returns
        or raises: what is to outlive the handler is accepted with accept(). What a handler raises
        ends the task group, as it does with all of anyio's listeners. A peer that gives up halfway,
        or cannot be accepted, is logged; accepting one does not hold up the others.

        It ends when the listener is closed, which raises, or when it is cancelled, which does not
        close the listener. A task group of its own then cancels the handlers that still run.

        Raises:
            ClosedResourceError, BrokenResourceError, BusyResourceError: as accept(); out of a task
                group of its own they come in an ExceptionGroup, with what handlers have raised.
        """
        if task_group is not None:
            await self._serve(handler, task_group)
            return
        async with create_task_group() as own:
            await self._serve(handler, own)

    async def _serve(
        self, handler: Callable[[S], Awaitable[object]], task_group: TaskGroup
    ) -> None:
        while True:
            request = await self._get_request()
            task_group.start_soon(self._serve_one, request, handler)

    async def _get_request(self) -> CoreRequest[C]:
        await self._checkpoint()
        try:
            return await self._listener.get_request()
        except RdmaError as error:
            _raise(error)

    async def _serve_one(
        self, request: CoreRequest[C], handler: Callable[[S], Awaitable[object]]
    ) -> None:
        try:
            stream = self._present(await request.accept())
        except (ConnectError, ConnectionClosed, ProtocolError) as error:
            logger.info("%r went away: %s", request, error)
        except VerbsError as error:
            logger.error("%r could not be accepted: %s", request, error)
        else:
            async with stream:
                await handler(stream)

    async def aclose(self) -> None:
        """Stop listening, and wait until that is done. Idempotent.

        Tasks that accept get ClosedResourceError. Cancelling stops the waiting only.
        """
        await self._listener.aclose()
        await self._checkpoint()

    def abort(self) -> None:
        """Stop listening, without waiting. Idempotent."""
        self._listener.abort()

    @property
    def extra_attributes(self) -> Attributes:
        """Of SocketAttribute's family, local_address and local_port; RdmaAttribute.local_address.

        One that listens on all addresses, IPv4 and IPv6, tells of one of the two.
        """
        return of_local_address(self._listener.local_address)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._listener!r}>"


def _raise(error: RdmaError) -> NoReturn:
    # What failed for one peer only is a VerbsError; all else is the end of the listener.
    raise_as_anyio(error, ACCEPTING, is_over=not isinstance(error, VerbsError))
