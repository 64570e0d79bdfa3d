"""The base classes of listeners and of connection requests, for every kind of connection."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Generic, TypeVar

from aiordma.cm import AsyncCmId
from aiordma.errors import (
    BusyError,
    ConnectError,
    ConnectionClosed,
    DeviceRemoved,
    LocalClosed,
    ProtocolError,
    RdmaError,
    WorkRequestError,
)
from aiordma.loop import WaitQueue, checkpoint, task_group
from aiordma.loop.context_managers import (
    AsyncContextManagerMixin,
    AwaitableContextManager,
    Closable,
)
from aiordma.options import PrivateDataLimits, check_private_data

logger = logging.getLogger(__name__)

C = TypeVar("C", bound=Closable)

# Errors that the peer causes, not the handler.
_PEER_ERRORS = (ConnectError, ConnectionClosed, ProtocolError, WorkRequestError)


class BaseRequest:
    """A connection request of a peer, for messages or for a byte stream. Answer it once."""

    def __init__(self, cm: AsyncCmId) -> None:
        """Wrap an id in state REQUESTED."""
        self._cm = cm
        self._local_address = cm.local_address
        self._peer_address = cm.peer_address

    @property
    def local_address(self) -> tuple[str, int]:
        """`(host, port)` to which the peer connects."""
        return self._local_address

    @property
    def peer_address(self) -> tuple[str, int]:
        """`(host, port)` of the peer."""
        return self._peer_address

    async def _reject(self, private_data: bytes = b"") -> None:
        try:
            self._cm.check_unanswered()
        except ConnectError as error:
            logger.debug("no peer to reject: %s", error)
            await checkpoint()
            return
        check_private_data(private_data, PrivateDataLimits.of(self._cm.device()).reject)
        self._cm.reject(private_data)
        await self._cm.aclose()

    def _abort(self) -> None:
        """Reject the peer if the request was not answered, and close its id. Idempotent."""
        self._cm.abort()

    def __repr__(self) -> str:
        host, port = self._peer_address
        return f"<{type(self).__name__} from {host} port {port}>"


R = TypeVar("R", bound=BaseRequest)


class BaseListener(AsyncContextManagerMixin, Generic[R, C]):
    """A listener for connections with messages (`listen()`) or byte streams (`listen_stream()`)."""

    def __init__(self, cms: list[AsyncCmId], request: Callable[[AsyncCmId], R]) -> None:
        """Wrap ids that all listen on the same port. `request` wraps the id of a request."""
        self._cms = cms
        self._request = request
        self._local_address = cms[0].local_address
        self._loop = cms[0].loop
        self._arrived = WaitQueue(self._loop)
        for cm in cms:
            cm.on_change = self._arrived.wake_all

    @property
    def local_address(self) -> tuple[str, int]:
        """`(host, port)` where peers can connect. It has the actual port, even if 0 was given."""
        return self._local_address

    async def get_request(self) -> R:
        """Wait for the next request.

        Cancelling loses no request.

        Raises:
            LocalClosed: the listener is closed, or was closed during the wait.
            DeviceRemoved: its device was removed.
            BusyError: another task is waiting for requests.
        """
        self._check_idle()
        await checkpoint()
        self._check_idle()
        while True:
            for cm in self._cms:
                request = cm.take_request()
                if request is not None:
                    return self._request(request)
            await self._arrived.wait()

    def _check_idle(self) -> None:
        if len(self._arrived):
            raise BusyError("another task is waiting for requests on this listener")

    async def _accept_next(self, accept: Callable[[R], AwaitableContextManager[C]]) -> C:
        while True:
            request = await self.get_request()
            try:
                return await accept(request)
            except (ConnectError, DeviceRemoved, ProtocolError) as error:
                # Of several devices, one can be removed.
                logger.info("the connection of %r ended: %s", request, error)
            except BaseException:
                request._abort()  # only this method can answer it
                raise

    async def _serve(
        self,
        accept: Callable[[R], AwaitableContextManager[C]],
        handler: Callable[[C], Awaitable[object]],
    ) -> None:
        self._check_idle()
        failure: RdmaError | None = None
        async with task_group(self._loop) as tasks:
            try:
                async for request in self:
                    tasks.create_task(self._serve_one(request, accept, handler))
            except (
                RdmaError
            ) as error:  # raised below: raised here, an exception group would wrap it
                failure = error
            finally:
                self.abort()
        if failure is not None:
            raise failure

    async def _serve_one(
        self,
        request: R,
        accept: Callable[[R], AwaitableContextManager[C]],
        handler: Callable[[C], Awaitable[object]],
    ) -> None:
        try:
            async with accept(request) as accepted:
                await handler(accepted)
        except _PEER_ERRORS as error:
            logger.info("the connection of %r ended: %s", request, error)
        except Exception:
            logger.exception("serving %r failed", request)
        finally:
            request._abort()

    def __aiter__(self) -> AsyncIterator[R]:
        """Iterate over requests until the listener is closed."""
        return self

    async def __anext__(self) -> R:
        try:
            return await self.get_request()
        except LocalClosed:
            raise StopAsyncIteration from None

    async def aclose(self) -> None:
        """Stop listening, and wait until the ids are destroyed. Idempotent. See rdma_destroy_id(3).

        Cancelling stops the waiting only.
        """
        self.abort()
        for cm in self._cms:
            await cm.aclose()

    def abort(self) -> None:
        """Stop listening, without waiting. Idempotent."""
        for cm in self._cms:
            cm.abort()

    def __repr__(self) -> str:
        host, port = self._local_address
        return f"<{type(self).__name__} at {host} port {port}>"
