"""StreamServer: a listener as a server of asyncio's."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from socket import AddressFamily
from ssl import SSLContext

from aiordma.asyncio.tls import start_tls
from aiordma.asyncio.transport import StreamTransport, create_transport
from aiordma.errors import DeviceRemoved, LocalClosed, RdmaError, VerbsError
from aiordma.streams.listener import StreamListener, StreamRequest, accept_stream_core

logger = logging.getLogger(__name__)


class ListeningAddress:
    """What `server.sockets` shows: as much of a socket as programs ask for its address."""

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
    """What asyncio.Server does, over RDMA: from start_server() or create_server()."""

    def __init__(
        self,
        listener: StreamListener,
        protocol_factory: Callable[[], asyncio.BaseProtocol],
        ssl: SSLContext | None,
    ) -> None:
        """For create_server(); not to be called by others."""
        self._listener = listener
        self._factory = protocol_factory
        self._ssl = ssl
        self._loop = asyncio.get_running_loop()
        self._transports: set[StreamTransport] = set()
        self._accepting: set[asyncio.Task[None]] = set()
        self._task: asyncio.Task[None] | None = None
        self._closed = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def sockets(self) -> tuple[ListeningAddress, ...]:
        """Where it listens: `server.sockets[0].getsockname()`."""
        return () if self._closed.is_set() else (ListeningAddress(self._listener.local_address),)

    def get_loop(self) -> asyncio.AbstractEventLoop:
        """The loop that it runs on."""
        return self._loop

    def is_serving(self) -> bool:
        """Whether it accepts connections."""
        return self._task is not None and not self._task.done()

    async def start_serving(self) -> None:
        """Accept connections. Idempotent."""
        if self._closed.is_set():
            raise RuntimeError(f"server {self!r} is closed")
        if self._task is None:
            self._task = self._loop.create_task(self._serve())

    async def serve_forever(self) -> None:
        """Accept connections until it is cancelled, which closes the server.

        Raises:
            DeviceRemoved: the device that it listens on went away.
        """
        await self.start_serving()
        assert self._task is not None
        try:
            await asyncio.shield(self._task)
            raise asyncio.CancelledError  # close() was called
        except asyncio.CancelledError:
            self.close()
            await self.wait_closed()
            raise

    async def _serve(self) -> None:
        try:
            async for request in self._listener:
                task = self._loop.create_task(self._accept(request))
                self._accepting.add(task)
                task.add_done_callback(self._accepting.discard)
        except LocalClosed:
            pass
        except RdmaError:
            logger.exception("%r listens no more", self)
            raise

    async def _accept(self, request: StreamRequest) -> None:
        try:
            core = await accept_stream_core(request)
            transport, protocol = create_transport(
                core, self._loop, self._factory, self._connection_lost
            )
            self._transports.add(transport)
            self._idle.clear()
            if self._ssl is None:
                transport.begin()
            else:
                await start_tls(transport, protocol, self._ssl, None)
        except VerbsError as error:
            logger.error("%r could not be accepted: %s", request, error)
        except (DeviceRemoved, OSError) as error:  # the peer's doing, or the network's
            logger.info("%r went away: %s", request, error)
        except Exception:
            logger.exception("accepting %r failed", request)

    def _connection_lost(self, transport: StreamTransport) -> None:
        self._transports.discard(transport)
        if not self._transports:
            self._idle.set()

    def close(self) -> None:
        """Accept nobody any more. Connections that were accepted are left alone. Idempotent."""
        self._closed.set()
        self._listener.abort()

    def close_clients(self) -> None:
        """close() the transports of all connections."""
        for transport in list(self._transports):
            transport.close()

    def abort_clients(self) -> None:
        """abort() the transports of all connections."""
        for transport in list(self._transports):
            transport.abort()

    async def wait_closed(self) -> None:
        """Wait until close() is called, and all of its connections have ended."""
        await self._closed.wait()
        await self._listener.aclose()
        if self._task is not None:
            await asyncio.wait([self._task])
        while self._accepting:
            await asyncio.wait(self._accepting)
        await self._idle.wait()

    def __repr__(self) -> str:
        return f"<StreamServer at {self._listener.local_address}>"
