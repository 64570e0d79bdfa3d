"""RdmaComm: the messages of distributed between two of its processes."""

from __future__ import annotations

import asyncio
import logging
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from distributed.comm.core import Comm, CommClosedError
from distributed.comm.utils import from_frames, to_frames
from distributed.system import MEMORY_LIMIT

from aiordma.dask.frames import pack, receive
from aiordma.dask.options import message_options
from aiordma.errors import RdmaError
from aiordma.loop import ensure_called
from aiordma.message_streams.message_stream import MessageStream
from aiordma.message_streams.wire import EAGER_OVERHEAD

logger = logging.getLogger(__name__)

MAX_UNSENT = MEMORY_LIMIT // 2
"""The size in bytes of the messages that can wait to be sent before write() waits."""


class RdmaComm(Comm):
    """A comm of distributed over a MessageStream.

    One task may read and one may write at a time. RdmaConnector and RdmaListener make comms.
    """

    max_shard_size = sys.maxsize
    """The size in bytes from which distributed splits a frame. None is split, because the device
    reads a frame of any size into one piece of memory."""

    def __init__(
        self, stream: MessageStream, local_addr: str, peer_addr: str, deserialize: bool = True
    ) -> None:
        """Wrap `stream`, which belongs to the running loop, and own it from now on."""
        self._stream = stream
        self._local_addr = local_addr  # distributed.comm.core.connect() reads these two
        self._peer_addr = peer_addr
        self._nbytes_written = 0
        self._part_nbytes = message_options().slot_size - EAGER_OVERHEAD
        # distributed drops comms that the peer has closed, and closes only the others.
        loop = asyncio.get_running_loop()
        self._finalizer = weakref.finalize(self, _abort_dropped, loop, stream)
        self._finalizer.atexit = False
        super().__init__(deserialize=deserialize)

    @property
    def local_address(self) -> str:
        """The address of this side."""
        return self._local_addr

    @property
    def peer_address(self) -> str:
        """The address of the peer: that which was connected to, or the one that connected."""
        return self._peer_addr

    async def read(self, deserializers: Any = None) -> Any:
        """Wait for the next message and return it, as an object if the comm deserializes.

        Large frames are read by the device into the memory that the objects keep.

        Cancelling aborts the comm, as with each comm of distributed.

        Raises:
            CommClosedError: the comm is closed, or the connection has failed.
            Exception: the message cannot be deserialized. The comm goes on.
        """
        with self._aborted_on_failure():
            frames = await receive(self._stream)
        try:
            return await from_frames(
                frames,
                deserialize=self.deserialize,
                deserializers=deserializers,
                allow_offload=self.allow_offload,
            )
        except asyncio.CancelledError:
            self.abort()  # the message is lost
            raise
        except EOFError:
            self.abort()
            raise CommClosedError("aborted comm on truncated data") from None

    async def write(self, msg: Any, serializers: Any = None, on_error: Any = "message") -> int:
        """Serialize a message and have it sent. Return its size in bytes.

        It does not wait for the peer, except if messages of half of the memory limit wait to be
        sent already. The memory of large frames must not change until the peer has read them:
        distributed never changes the data of a message.

        Cancelling sends nothing.

        Raises:
            CommClosedError: the comm is closed, or the connection has failed.
            Exception: the message cannot be serialized, and `on_error` is "raise". The comm goes
                on.
        """
        stream = self._stream
        if self.closed():
            raise CommClosedError(f"{self!r}: the comm is closed")
        frames = await to_frames(
            msg,
            allow_offload=self.allow_offload,
            serializers=serializers,
            on_error=on_error,
            context={
                "sender": self.local_info,
                "recipient": self.remote_info,
                **self.handshake_options,
            },
            frame_split_size=self.max_shard_size,
        )
        parts, large, nbytes = pack(frames, self._part_nbytes)
        with self._aborted_on_failure():
            if self._nbytes_written - stream.stats.bytes_sent > MAX_UNSENT:
                await stream.drain()
            for part in parts:
                stream.send_soon(part)
            if large:
                stream.send_soon(large)
        self._nbytes_written += nbytes
        return nbytes

    @contextmanager
    def _aborted_on_failure(self) -> Iterator[None]:
        """Abort the comm if the block fails or is cancelled.

        Raises:
            CommClosedError: for each RdmaError.
        """
        try:
            yield
        except RdmaError as error:
            self.abort()
            raise CommClosedError(f"in {self!r}: {type(error).__name__}: {error}") from error
        except BaseException:
            self.abort()
            raise

    async def close(self) -> None:
        """Close the comm, when the peer has taken the messages that were written. Idempotent.

        If the peer does not take them in the time of `distributed.comm.timeouts.tcp`, they are
        lost. Cancelling ends the connection by force.
        """
        await self._stream.aclose()
        self._finalizer.detach()

    def abort(self) -> None:
        """End the connection at once. Idempotent. Messages that were not read are lost."""
        self._stream.abort()
        self._finalizer.detach()

    def closed(self) -> bool:
        """Return True if the comm was closed here or by the peer, or has failed."""
        return self._stream.closed


def _abort_dropped(loop: asyncio.AbstractEventLoop, stream: MessageStream) -> None:
    """Abort the stream of a comm that was dropped, from any thread."""
    if not stream.closed:
        logger.warning("closing a comm that was dropped without being closed: %r", stream)

    def abort() -> None:
        if loop.is_closed():
            stream.abandon()
        else:
            stream.abort()

    ensure_called(loop, abort)
