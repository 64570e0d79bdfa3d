"""Sender: messages to the peer, copied or from registered memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from aiordma.enums import WcOpcode, WrOpcode
from aiordma.errors import RdmaError, VerbsError
from aiordma.loop import checkpoint_of
from aiordma.memory import RemoteBuffer
from aiordma.options import ConnectionOptions
from aiordma.qp.operation import Operations
from aiordma.qp.post_list import MemoryRequest
from aiordma.qp.scatter_gather import ScatterGatherBuilder, is_region
from aiordma.verbs.queue_pair import NO_IMMEDIATE

if TYPE_CHECKING:
    from aiordma.qp.scatter_gather import Source


class Sender:
    """Sends messages. Any number of tasks can send; the messages of each task stay in order."""

    def __init__(
        self, operations: Operations, builder: ScatterGatherBuilder, options: ConnectionOptions
    ) -> None:
        self._sends = operations.sends
        self._callbacks = operations.callbacks
        self._operations = operations
        self._builder = builder
        self._max_inline = options.max_inline
        self._max_size = options.max_message_size
        self._checkpoint = checkpoint_of(operations.loop)
        core = self._sends.core
        # On a loop with checkpoints (trio), each await must pass one, also when a send can be
        # posted immediately.
        self.post_now: Callable[[object], int] = (
            core.send if self._checkpoint is None else _post_nothing
        )
        """Post a small message on the fast path. Return 0, an errno of ibv_post_send(3), or -1 if
        the message was not posted and needs send_copy() or send_registered()."""

    async def send_copy(self, data: bytes | memoryview, nbytes: int, imm: int) -> None:
        """Copy and post one message: see Connection.send()."""
        self._callbacks.check_open()
        if nbytes > self._max_size:
            raise ValueError(f"a message of {nbytes} bytes; max_message_size is {self._max_size}")
        if self._checkpoint is not None:
            await self._checkpoint()
            self._callbacks.check_open()
        sends = self._sends
        has_waited = not sends.try_reserve()
        if has_waited:
            await sends.reserve()
        try:
            if has_waited:
                self._callbacks.check_open()
            if nbytes <= self._max_inline:
                sends.post_inline(data, imm)
            else:
                await self._copy_to_buffer(data, nbytes, imm)
        except VerbsError as error:
            sends.unreserve()
            raise self._callbacks.post_failed(error) from None
        except BaseException:
            sends.unreserve()
            raise
        self._count(nbytes)

    async def _copy_to_buffer(self, data: bytes | memoryview, nbytes: int, imm: int) -> None:
        buffer = self._sends.try_buffer(nbytes)
        if buffer is None:
            buffer = await self._sends.buffer(nbytes, self._builder.call_in_worker)
        try:
            self._callbacks.check_open()
            self._sends.post_copy(buffer, data, imm)
        except VerbsError:
            # libsiw keeps a request that it reports as failed, so that the device can still read
            # the buffer.
            self._sends.keep_until_destroyed(buffer)
            raise
        except BaseException:
            buffer.release()
            raise

    async def send_registered(
        self, data: Source, imm: int, invalidate: RemoteBuffer | None
    ) -> None:
        """Send registered memory without a copy, and wait until it can be reused."""
        self._callbacks.check_open()
        builder, max_bytes, where = self._builder, self._max_size, "a max_message_size"
        if is_region(data):
            sgl = builder.single(data, max_bytes, where)
        else:
            sgl = await builder.sources(data, max_bytes, where)
        opcode = WrOpcode.SEND if imm == NO_IMMEDIATE else WrOpcode.SEND_WITH_IMM
        remote = (0, 0)
        if invalidate is not None:
            opcode, remote = WrOpcode.SEND_WITH_INV, (0, invalidate.rkey)
        count = partial(self._count, sgl.nbytes)
        request = MemoryRequest(opcode, sgl.segments, remote, count, imm)
        await self._operations.perform(WcOpcode.SEND, request, sgl.release)

    def post_error(self, error: int) -> RdmaError:
        """End the connection for an errno of post_now(), and return the exception to raise."""
        return self._callbacks.post_failed(VerbsError(error, "ibv_post_send"))

    def _count(self, nbytes: int) -> None:
        stats = self._sends.stats
        stats.messages_sent += 1
        stats.bytes_sent += nbytes


def _post_nothing(_: object) -> int:
    return -1
