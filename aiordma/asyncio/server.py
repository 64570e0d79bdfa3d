"""StreamServer: a listener as an asyncio server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from socket import AddressFamily
from ssl import SSLContext

from aiordma.asyncio.tls import start_tls
from aiordma.asyncio.transport import StreamTransport, create_transport
from aiordma.cm.accepting import accept_or_log
from aiordma.cm.handshakes import ListenerStats
from aiordma.cm.occasional_log import OccasionalLog
from aiordma.errors import DeviceRemoved, LocalClosed, RdmaError
from aiordma.streams.listener import StreamCoreListener
from aiordma.streams.stream_core import StreamCore

logger = logging.getLogger(__name__)


class ListeningAddress:
    """An item of `server.sockets`: the methods of a socket that return its address."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address

    @property
    def family(self) -> AddressFamily:
        """AF_INET or AF_INET6."""
        return AddressFamily.AF_INET6 if ":" in self._address[0] else AddressFamily.AF_INET

    def getsockname(self) -> tuple[str, int]:
        """`(host, port)`."""
        return self._address

    def __repr__(self) -> str:
        return f"<ListeningAddress {self._address}>"


class StreamServer(asyncio.AbstractServer):
    """A server like asyncio.Server, over RDMA. It is made by start_server() or create_server()."""

    def __init__(
        self,
        listener: StreamCoreListener,
        protocol_factory: Callable[[], asyncio.BaseProtocol],
        ssl: SSLContext | None,
    ) -> None:
        """Called by create_server(); not for users."""
        self._listener = listener
        self._factory = protocol_factory
        self._ssl = ssl
        self._log = OccasionalLog(logger)
        self._loop = asyncio.get_running_loop()
        self._transports: set[StreamTransport] = set()
        self._beginning: set[asyncio.Task[None]] = set()
        self._task: asyncio.Task[None] | None = None
        self._closed = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def sockets(self) -> tuple[ListeningAddress, ...]:
        """The address that the server listens on: `server.sockets[0].getsockname()`.

        Empty when the server is closed.
        """
        return () if self._closed.is_set() else (ListeningAddress(self._listener.local_address),)

    @property
    def stats(self) -> ListenerStats:
        """A snapshot of the listener's counters, and of the numbers of its peers."""
        return self._listener.stats

    def get_loop(self) -> asyncio.AbstractEventLoop:
        """Return the event loop of the server."""
        return self._loop

    def is_serving(self) -> bool:
        """Return True if the server accepts connections."""
        return self._task is not None and not self._task.done()

    async def start_serving(self) -> None:
        """Start to accept connections. Idempotent.

        Raises:
            RuntimeError: the server is closed.
        """
        if self._closed.is_set():
            raise RuntimeError(f"server {self!r} is closed")
        if self._task is None:
            self._task = self._loop.create_task(self._serve())

    async def serve_forever(self) -> None:
        """Accept connections until this is cancelled, which closes the server and its connections.

        Raises:
            DeviceRemoved: the device that it listens on was removed.
        """
        await self.start_serving()
        assert self._task is not None
        try:
            await asyncio.shield(self._task)
            raise asyncio.CancelledError  # close() was called
        except asyncio.CancelledError:
            if not self._closed.is_set():  # cancelled: an idle client must not keep it waiting
                self.close()
                self.close_clients()
            await self.wait_closed()
            raise

    async def _serve(self) -> None:
        try:
            while True:
                core = await accept_or_log(self._listener)
                task = self._loop.create_task(self._begin(core))
                self._beginning.add(task)
                task.add_done_callback(partial(self._has_begun, core))
        except LocalClosed:
            pass
        except RdmaError:
            logger.exception("%r has stopped listening", self)
            raise

    def _has_begun(self, core: StreamCore, task: asyncio.Task[None]) -> None:
        self._beginning.discard(task)
        if task.cancelled():  # perhaps before it has begun
            core.abort()

    async def _begin(self, core: StreamCore) -> None:
        """Make the transport and the protocol of a connection. With TLS, do its handshake first."""
        try:
            transport, protocol = create_transport(
                core, self._loop, self._factory, self._connection_lost
            )
            self._transports.add(transport)
            self._idle.clear()
            if self._ssl is None:
                transport.begin()
            else:
                await start_tls(transport, protocol, self._ssl, None)
        except (DeviceRemoved, OSError) as error:  # caused by the peer or the network
            text = "the connection of %r could not begin: %s"
            self._log.log(logging.INFO, text, core, error)
        except Exception:
            logger.exception("the connection of %r could not begin", core)

    def _connection_lost(self, transport: StreamTransport) -> None:
        self._transports.discard(transport)
        if not self._transports:
            self._idle.set()

    def close(self) -> None:
        """Stop listening. The accepted connections stay open. Idempotent."""
        self._closed.set()
        self._listener.abort()

    def close_clients(self) -> None:
        """Call close() on the transports of all connections."""
        for transport in list(self._transports):
            transport.close()

    def abort_clients(self) -> None:
        """Call abort() on the transports of all connections."""
        for transport in list(self._transports):
            transport.abort()

    async def wait_closed(self) -> None:
        """Wait until close() has been called and all connections of the server have ended.

        Cancelling stops the wait only.
        """
        await self._closed.wait()
        await self._listener.aclose()
        if self._task is not None:
            await asyncio.wait([self._task])
        while self._beginning:
            await asyncio.wait(self._beginning)
        await self._idle.wait()

    def __repr__(self) -> str:
        return f"<StreamServer at {self._listener.local_address}>"
