"""RdmaListener: accepts comms, and gives each to the server that listens."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable

import dask
from distributed.comm.addressing import parse_host_port
from distributed.comm.core import BaseListener, CommClosedError

from aiordma.cm.accepting import accept_or_log
from aiordma.dask.addresses import PREFIX, WILDCARDS, device_host, refuse_encryption, to_uri
from aiordma.dask.comm import RdmaComm
from aiordma.dask.options import message_options
from aiordma.errors import LocalClosed, RdmaError
from aiordma.loop import run_in_background, run_in_worker, running_loop
from aiordma.message_streams.connect import MessageListener, listen_messages
from aiordma.message_streams.message_stream import MessageStream

logger = logging.getLogger(__name__)


class RdmaListener(BaseListener):
    """A listener for comms, at one address or at all addresses of RDMA devices."""

    prefix = PREFIX
    """The scheme of addresses. Workers make the address that they log of it."""

    def __init__(
        self,
        address: str,
        comm_handler: Callable[[RdmaComm], Awaitable[object] | None],
        deserialize: bool = True,
        allow_offload: bool = True,
        default_host: str | None = None,
        default_port: int = 0,
        **connection_args: object,
    ) -> None:
        """Take an address without its `rdma://`.

        `comm_handler`, a function or a coroutine function, is called with each comm.

        Raises:
            RuntimeError: encryption is required.
            ValueError: the address is malformed.
        """
        super().__init__()
        refuse_encryption(address, connection_args)
        self._host, self._port = parse_host_port(address, default_port)
        self._default_host = default_host
        self._comm_handler = comm_handler
        self._deserialize = deserialize
        self._allow_offload = allow_offload
        self._listener: MessageListener | None = None
        self._bound: tuple[str, int] | None = None
        self._contact_host = ""

    async def start(self) -> None:
        """Begin to listen. Cancelling leaves nothing behind.

        Raises:
            OSError: the address cannot be listened on, for example because no RDMA device has it.
        """
        host = self._host or "0.0.0.0"  # as tcp:// calls all addresses
        contact = await self._contact_for_all(host) if host in WILDCARDS else None
        backlog = int(dask.config.get("distributed.comm.socket-backlog"))
        self._listener = listener = await listen_messages(
            self._host or None, self._port, backlog=backlog, options=message_options()
        )
        bound, port = listener.local_address
        self._bound = (host if contact else bound), port
        self._contact_host = contact or bound
        run_in_background(running_loop(), self._accept_comms(listener))

    async def _contact_for_all(self, host: str) -> str:
        if self._default_host:
            return self._default_host
        return await run_in_worker(running_loop(), lambda: device_host(WILDCARDS[host]))

    def stop(self) -> None:
        """Stop listening, without waiting. Idempotent. The comms that were accepted stay open."""
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.abort()

    async def _accept_comms(self, listener: MessageListener) -> None:
        loop = running_loop()
        try:
            while True:
                stream = await accept_or_log(listener)
                run_in_background(loop, self._handle_stream(stream))
        except LocalClosed:
            pass
        except RdmaError as error:
            logger.error("%s does not listen any more: %s", to_uri(*listener.local_address), error)
        finally:
            listener.abort()

    async def _handle_stream(self, stream: MessageStream) -> None:
        """Make a comm, exchange handshakes with the peer, and call the handler."""
        if self._listener is None:  # stopped since: abort_handshaking_comms() was called before
            stream.abort()
            return
        local, peer = to_uri(*stream.local_address), to_uri(*stream.peer_address)
        comm = RdmaComm(stream, local, peer, self._deserialize)
        comm.allow_offload = self._allow_offload
        try:
            await self.on_connection(comm)
        except CommClosedError:
            logger.info("connection from %s closed before the handshake was completed", peer)
            return
        except BaseException:
            comm.abort()
            raise
        handling = self._comm_handler(comm)
        if inspect.isawaitable(handling):
            await handling

    def get_host_port(self) -> tuple[str, int]:
        """Return the host and the port that are listened on.

        Raises:
            ValueError: the listener was not started.
        """
        if self._bound is None:
            raise ValueError("invalid operation on a listener that was not started")
        return self._bound

    @property
    def listen_address(self) -> str:
        """The address that is listened on, "rdma://0.0.0.0:port" for all addresses.

        Raises: as get_host_port().
        """
        return to_uri(*self.get_host_port())

    @property
    def contact_address(self) -> str:
        """An address that peers can connect to.

        If all addresses are listened on, it has the first address of an RDMA device.

        Raises: as get_host_port().
        """
        return to_uri(self._contact_host, self.get_host_port()[1])
