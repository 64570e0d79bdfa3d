"""RdmaConnector: connects comms."""

from __future__ import annotations

from distributed.comm.addressing import parse_host_port
from distributed.comm.core import CommClosedError, Connector

from aiordma.dask.addresses import PREFIX, refuse_encryption, to_uri
from aiordma.dask.comm import RdmaComm
from aiordma.dask.options import message_options
from aiordma.errors import RdmaError
from aiordma.message_streams.connect import connect_messages


class RdmaConnector(Connector):
    """Connects comms to listeners of other processes."""

    async def connect(
        self, address: str, deserialize: bool = True, **connection_args: object
    ) -> RdmaComm:
        """Connect to an address without its `rdma://`. See aiordma.connect_messages().

        distributed tries again after an OSError, until its own timeout. Cancelling leaves nothing
        behind.

        Raises:
            CommClosedError: the peer cannot be reached; `__cause__` is the reason.
            RuntimeError: encryption is required.
            ValueError: the address is malformed.
        """
        refuse_encryption(address, connection_args)
        host, port = parse_host_port(address)
        try:
            stream = await connect_messages(host, port, options=message_options())
        except RdmaError as error:
            text = f"cannot connect to {PREFIX}{address}: {type(error).__name__}: {error}"
            raise CommClosedError(text) from error
        return RdmaComm(stream, to_uri(*stream.local_address), PREFIX + address, deserialize)
