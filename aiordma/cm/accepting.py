"""The base classes of listeners and of connection requests, for every kind of connection."""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Generic, TypeVar

from aiordma.cm import AsyncCmId, close_after
from aiordma.cm.handshakes import PEER_ERRORS, Failure, Handshakes, ListenerStats
from aiordma.cm.occasional_log import OccasionalLog
from aiordma.errors import BusyError, ConnectError, LocalClosed, RdmaError
from aiordma.loop import Deadline, WaitQueue, checkpoint, task_group, yield_of
from aiordma.loop.context_managers import AsyncContextManagerMixin, Closable
from aiordma.options import ListenerLimits
from aiordma.rdmacm.address import format_address

logger = logging.getLogger(__name__)

C = TypeVar("C", bound=Closable)


def peer_error(error: Exception) -> Exception | None:
    """Return the error of the peer or the network that `error` is, or None if it is another one.

    An exception group is such an error if all its members are. The first member is returned.
    """
    while isinstance(error, ExceptionGroup):
        if error.split(PEER_ERRORS)[1] is not None:
            return None
        error = error.exceptions[0]
    return error if isinstance(error, PEER_ERRORS) else None


class BaseRequest:
    """A connection request of a peer, for messages or for a byte stream. Answer it once."""

    def __init__(self, cm: AsyncCmId, handshake_timeout: float) -> None:
        """Wrap an id in state REQUESTED."""
        self._cm = cm
        self._handshake_timeout = handshake_timeout
        self._is_accepted = False
        self._addresses = cm.addresses

    @property
    def local_address(self) -> tuple[str, int]:
        """`(host, port)` to which the peer connects."""
        return self._addresses.local

    @property
    def peer_address(self) -> tuple[str, int]:
        """`(host, port)` of the peer."""
        return self._addresses.peer

    @property
    def on_replied(self) -> Callable[[], None] | None:
        """Called on the loop when the reply to the peer is sent."""
        return self._cm.on_replied

    @on_replied.setter
    def on_replied(self, call: Callable[[], None] | None) -> None:
        self._cm.on_replied = call

    async def _reject(self, private_data: bytes = b"") -> None:
        try:
            self._cm.check_unanswered()
        except ConnectError as error:
            logger.debug("no peer to reject: %s", error)
            await checkpoint()
            return
        self._cm.reject(private_data)
        await self._cm.aclose()

    def _handshake(self) -> Handshake:
        """Return a context manager in whose block the request is accepted.

        The id is closed if that fails, or takes too long.

        Raises:
            ConnectError: the peer did not confirm in time.
        """
        return Handshake(self, self._cm, self._handshake_timeout)

    def confirmed(self) -> None:
        """Note that the handshake is over: abort() does nothing any more."""
        self._is_accepted = True

    def abort(self) -> None:
        """Reject the peer without waiting; end accept() if it is under way. Idempotent.

        It does nothing after accept() has returned.
        """
        if not self._is_accepted:
            self._cm.abort()

    def __repr__(self) -> str:
        host, port = self.peer_address
        return f"<{type(self).__name__} from {host} port {port}>"


class Handshake:
    """The context manager of a request's handshake. It limits its time, and closes a failed id."""

    def __init__(self, request: BaseRequest, cm: AsyncCmId, seconds: float) -> None:
        self._request = request
        self._cm = cm
        self._seconds = seconds
        self._deadline = Deadline(cm.loop, seconds, cm.abort)

    async def __aenter__(self) -> None:
        pass

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._deadline.cancel()
        if exc is None:
            self._request.confirmed()
            return
        if self._cm.id_state.is_closed and not self._deadline.expired:
            return  # abort() was called, which does not wait
        await close_after(self._cm, exc)
        if isinstance(exc, LocalClosed) and self._deadline.expired:
            peer = format_address(self._request.peer_address)
            raise ConnectError(f"{peer} did not confirm within {self._seconds:g} s") from exc


R = TypeVar("R", bound=BaseRequest)


class BaseListener(AsyncContextManagerMixin, Generic[R, C]):
    """A listener for connections with messages (`listen()`) or byte streams (`listen_stream()`)."""

    def __init__(
        self,
        cms: list[AsyncCmId],
        limits: ListenerLimits,
        request: Callable[[AsyncCmId], R],
        accept: Callable[[R], Awaitable[C]],
    ) -> None:
        """Wrap ids that all listen on the same port.

        `request` wraps the id of a request. `accept` accepts a request.
        """
        self._cms = cms
        self._accept = accept
        self._in_turn = deque(cms)
        self._request = request
        self._local_address = cms[0].local_address
        self._loop = cms[0].loop
        self._arrived = WaitQueue(self._loop)
        self._yield = yield_of(self._loop)
        self._log = OccasionalLog(logger)
        self._peer_log = OccasionalLog(logger)
        self._handshakes: Handshakes[R, C] = Handshakes(self._loop, limits, self._arrived.wake_all)
        for cm in cms:
            cm.on_change = self._arrived.wake_all
            if limits.max_connections is not None:
                cm.limit_requests(self._room(limits.max_connections))

    def _room(self, max_connections: int) -> Callable[[], int]:
        # The function must not refer to this object, which the ids would then keep alive.
        stats, cms = self._handshakes.stats, [weakref.ref(cm) for cm in self._cms]

        def room() -> int:
            waiting = sum(cm.requests_waiting for ref in cms if (cm := ref()) is not None)
            return max_connections - stats.connections - waiting

        return room

    @property
    def local_address(self) -> tuple[str, int]:
        """`(host, port)` where peers can connect. It has the actual port, even if 0 was given."""
        return self._local_address

    @property
    def stats(self) -> ListenerStats:
        """A snapshot of the listener's counters, and of the numbers of its peers."""
        return replace(
            self._handshakes.stats,
            handshakes=len(self._handshakes),
            rejected=sum(cm.requests_rejected for cm in self._cms),
            requests_waiting=sum(cm.requests_waiting for cm in self._cms),
        )

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
        while (request := self._take_request()) is None:
            await self._arrived.wait()
        return request

    def _take_request(self) -> R | None:
        """Return a request that has arrived, or None. The ids take turns.

        Raises: as get_request().
        """
        for _ in self._cms:
            cm = self._in_turn[0]
            self._in_turn.rotate(-1)
            taken = cm.take_request()
            if taken is not None:
                stats = self._handshakes.stats
                stats.connections += 1
                taken.handle.add_released_callback(stats.connection_ended)
                return self._request(taken)
        return None

    def _check_idle(self) -> None:
        if len(self._arrived):
            raise BusyError("another task is waiting for requests on this listener")

    async def _accept_next(self, accept: Callable[[R], Awaitable[C]]) -> C:
        """Wait for the next connection, and return it. `accept` accepts a request.

        Raises:
            Exception: `accept` could not accept a peer, for a reason on this side.
            Others: as get_request().
        """
        outcome = await self._next_outcome(partial(self._handshakes.start, accept=accept))
        if isinstance(outcome, Failure):
            raise outcome.error
        return outcome

    async def _next_outcome(self, start: Callable[[R], None]) -> C | Failure:
        """Wait for the next connection, or for a peer that could not be accepted.

        `start` begins to accept a request. It is called as requests arrive, so that a peer that
        does not confirm delays no other. The connections that are established meanwhile are for the
        next calls.
        """
        self._check_idle()
        await checkpoint()
        self._check_idle()
        while (outcome := self._handshakes.take()) is None:
            request = self._take_request() if self._handshakes.may_start else None
            if request is not None:
                start(request)
                # Before the next handshake, read the requests that have arrived, so that the one of
                # another host does not wait behind a flood.
                if any(cm.requests_waiting for cm in self._cms):
                    await self._yield()
            else:
                await self._arrived.wait()
        return outcome

    async def _serve(self, handler: Callable[[C], Awaitable[object]]) -> None:
        self._check_idle()
        failure: RdmaError | None = None

        def start(request: R) -> None:
            self._handshakes.begin(request)
            tasks.create_task(self._accept_and_serve(request, handler))

        async with task_group(self._loop) as tasks:
            try:
                while True:
                    outcome = await self._next_outcome(start)  # of an accept() before
                    if isinstance(outcome, Failure):
                        self._log_unaccepted(outcome)
                    else:
                        tasks.create_task(self._serve_one(outcome, handler))
                    del outcome  # the next one can take long
            except LocalClosed:
                pass
            except RdmaError as error:  # raised here, an exception group would wrap it
                failure = error
            finally:
                self.abort()
        if failure is not None:
            raise failure

    async def _accept_and_serve(
        self, request: R, handler: Callable[[C], Awaitable[object]]
    ) -> None:
        try:
            outcome = await self._handshakes.finish(request, self._accept)
        except Exception:  # the other peers must be served
            logger.exception("the handshake with %r could not be ended", request)
            return
        del request  # not needed while the handler runs
        if isinstance(outcome, Failure):
            self._log_unaccepted(outcome)
        elif outcome is not None:
            await self._serve_one(outcome, handler)

    async def _serve_one(self, connection: C, handler: Callable[[C], Awaitable[object]]) -> None:
        try:
            try:
                # Often the first message arrives meanwhile. Waiting for it would cost far more.
                await self._yield()
                await handler(connection)
            except BaseException as error:
                if not isinstance(error, Exception):
                    connection.abort()
                raise
            finally:
                await connection.aclose()
        except Exception as error:
            self._log_failure(connection, error)

    def _log_failure(self, connection: C, error: Exception) -> None:
        # A variable of the handler's caller would be a reference cycle, which keeps the connection.
        cause = peer_error(error)
        if cause is None:
            logger.error("serving %r failed", connection, exc_info=error)
        else:
            self._peer_log.log(logging.INFO, "%r ended: %s", connection, cause)

    def _log_unaccepted(self, failure: Failure) -> None:
        # A peer can cause it again and again, for example when memory is short.
        text = "a peer of %r could not be accepted: %s"
        self._log.log(logging.ERROR, text, self, failure.error)

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
        self._handshakes.close()

    def __repr__(self) -> str:
        host, port = self._local_address
        return f"<{type(self).__name__} at {host} port {port}>"


async def accept_or_log(listener: BaseListener[R, C]) -> C:
    """Wait for the listener's next connection. Log it if a peer could not be accepted, and go on.

    Raises: as BaseListener.get_request().
    """
    start = partial(listener._handshakes.start, accept=listener._accept)
    while isinstance(outcome := await listener._next_outcome(start), Failure):
        listener._log_unaccepted(outcome)
    return outcome
