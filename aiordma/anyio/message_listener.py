"""MessageListener: a listener of anyio's, whose peers are MessageStreams."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import NoReturn

from anyio import create_task_group
from anyio.abc import Listener as AnyioListener
from anyio.abc import TaskGroup

from aiordma.anyio.attributes import Attributes, of_local_address
from aiordma.anyio.checkpoints import owed_checkpoint
from aiordma.anyio.errors import raise_as_anyio
from aiordma.anyio.message_stream import MessageStream
from aiordma.errors import ConnectError, ConnectionClosed, RdmaError, VerbsError
from aiordma.listener import ConnectRequest, Listener

logger = logging.getLogger(__name__)

ACCEPTING = "accepting connections from"

Handler = Callable[[MessageStream], Awaitable[object]]


class MessageListener(AnyioListener[MessageStream]):
    """Accepts peers. From `aiordma.anyio.listen()`.

    Closing it rejects the peers that nobody has taken, and leaves the streams that were accepted
    alone. Every await is a checkpoint.
    """

    def __init__(self, listener: Listener) -> None:
        """Present a listener of this loop's as one of anyio's, which owns it from now on."""
        self._listener = listener
        self._checkpoint = owed_checkpoint()

    async def accept(self, private_data: bytes = b"") -> MessageStream:
        """Wait for a peer that connects, and accept it.

        `private_data` reaches the peer with the answer; see ConnectRequest.accept(). A peer that
        gives up halfway is passed over. Cancelling may lose the one peer that was just being
        accepted.

        Raises:
            ClosedResourceError: the listener was closed, before or while this waited.
            BrokenResourceError: the device it was bound to went away; its `__cause__` says so.
            BusyResourceError: another task is waiting for peers.
            VerbsError: a peer could not be accepted, for want of memory for one; others still can.
        """
        await self._checkpoint()
        try:
            return MessageStream(await self._listener.accept(private_data))
        except RdmaError as error:
            _raise(error)

    async def serve(self, handler: Handler, task_group: TaskGroup | None = None) -> None:
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

    async def _serve(self, handler: Handler, task_group: TaskGroup) -> None:
        while True:
            request = await self._get_request()
            task_group.start_soon(_serve_one, request, handler)

    async def _get_request(self) -> ConnectRequest:
        await self._checkpoint()
        try:
            return await self._listener.get_request()
        except RdmaError as error:
            _raise(error)

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
        return f"<MessageListener of {self._listener!r}>"


async def _serve_one(request: ConnectRequest, handler: Handler) -> None:
    try:
        stream = MessageStream(await request.accept())
    except (ConnectError, ConnectionClosed) as error:
        logger.info("%r went away: %s", request, error)
    except VerbsError as error:
        logger.error("%r could not be accepted: %s", request, error)
    else:
        async with stream:
            await handler(stream)


def _raise(error: RdmaError) -> NoReturn:
    # What failed for one peer only is a VerbsError; all else is the end of the listener.
    raise_as_anyio(error, ACCEPTING, is_over=not isinstance(error, VerbsError))
