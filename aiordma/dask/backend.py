"""RdmaBackend: the backend of distributed for addresses that begin with `rdma://`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from distributed.comm.addressing import parse_host_port, unparse_host_port
from distributed.comm.registry import Backend
from distributed.utils import ensure_ip, get_ip

from aiordma.dask.addresses import device_host, is_device_host
from aiordma.dask.comm import RdmaComm
from aiordma.dask.connector import RdmaConnector
from aiordma.dask.listener import RdmaListener


class RdmaBackend(Backend):
    """Makes connectors and listeners, and interprets addresses. distributed makes one object.

    The arguments are addresses without their `rdma://`.
    """

    def get_connector(self) -> RdmaConnector:
        """Return a connector for any address."""
        return RdmaConnector()

    def get_listener(
        self,
        loc: str,
        handle_comm: Callable[[RdmaComm], Awaitable[object] | None],
        deserialize: bool,
        **connection_args: Any,
    ) -> RdmaListener:
        """Return a listener, which is not started yet.

        Raises: as RdmaListener.
        """
        return RdmaListener(loc, handle_comm, deserialize, **connection_args)

    def get_address_host(self, loc: str) -> str:
        """Return the host of an address.

        Raises:
            ValueError: the address is malformed.
        """
        return self.get_address_host_port(loc)[0]

    def get_address_host_port(self, loc: str) -> tuple[str, int]:
        """Return the host and the port of an address.

        Raises:
            ValueError: the address is malformed.
        """
        return parse_host_port(loc)

    def resolve_address(self, loc: str) -> str:
        """Return an address with a numeric host. Blocks: see getaddrinfo(3).

        Raises:
            OSError: the name is unknown.
            ValueError: the address is malformed.
        """
        host, port = parse_host_port(loc)
        return unparse_host_port(ensure_ip(host), port)

    def get_local_address_for(self, loc: str) -> str:
        """Return the host of this machine from which an address is reached. Blocks.

        If no RDMA device has the address of the route, it is the first one of an RDMA device.

        Raises:
            OSError: the name is unknown, or this machine has no RDMA device.
            ValueError: the address is malformed.
        """
        host = ensure_ip(parse_host_port(loc)[0])
        local = get_ip(host)
        if not is_device_host(local):
            local = device_host(":" in host)
        return unparse_host_port(local, None)
