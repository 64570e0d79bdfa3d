"""Sender: messages to the peer, copied or from registered memory."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from aiordma.enums import WcOpcode, WrOpcode
from aiordma.errors import VerbsError
from aiordma.loop import cancellation_of, schedule_point_of
from aiordma.memory import RemoteBuffer
from aiordma.options import ConnectionOptions
from aiordma.qp.operation import Operations
from aiordma.qp.post_list import MemoryRequest
from aiordma.qp.scatter_gather import (
    ScatterGatherBuilder,
    is_region,
    is_registered,
    join_buffers,
)
from aiordma.verbs import Device
from aiordma.verbs.queue_pair import NO_IMMEDIATE, checked_immediate

if TYPE_CHECKING:
    from aiordma.memory.buffer_pool import PooledBuffer
    from aiordma.qp.scatter_gather import Source


def checked_imm(device: Device, imm: int | None) -> int:
    """Return the immediate data of a request: `imm`, or NO_IMMEDIATE if it is None.

    Raises:
        ValueError: `imm` is not a number of 32 bits, or the device is iWARP.
    """
    if imm is None:
        return NO_IMMEDIATE
    number = checked_immediate(imm)
    if device.is_iwarp:
        raise ValueError("iWARP carries no immediate data")
    return number


class Sender:
    """Sends messages. Any number of tasks can send; the messages of each task stay in order."""

    def __init__(
        self,
        operations: Operations,
        builder: ScatterGatherBuilder,
        options: ConnectionOptions,
        device: Device,
    ) -> None:
        self._sends = operations.sends
        self._callbacks = operations.callbacks
        self._operations = operations
        self._builder = builder
        self._max_inline = options.max_inline
        self._max_size = options.max_message_size
        self._device = device
        self._raise_if_cancelled = cancellation_of(type(operations.loop))
        self._schedule_point = schedule_point_of(type(operations.loop))

    async def send(self, data: Source, error: int = 0) -> None:
        """Send one message that the core has not posted: see Connection.send().

        `error`: the errno of ibv_post_send(3) if the core has tried to post it.
        """
        if error:
            raise self._callbacks.post_failed(VerbsError(error, "ibv_post_send"))
        await self._send_slowly(data, NO_IMMEDIATE, None)

    async def send_with(
        self, data: Source, imm: int | None, invalidate: RemoteBuffer | None
    ) -> None:
        """Send one message with immediate data, or invalidate a key: see Connection.send()."""
        number = checked_imm(self._device, imm)
        if imm is not None and invalidate is not None:
            raise ValueError("a message carries immediate data or invalidates a key, not both")
        await self._send_slowly(data, number, invalidate)

    async def _send_slowly(self, data: Source, imm: int, invalidate: RemoteBuffer | None) -> None:
        if type(data) is bytes and invalidate is None:
            await self._send_copy(data, len(data), imm)
        elif invalidate is not None or is_registered(data):
            await self._send_registered(data, imm, invalidate)
        else:
            with join_buffers(data) as view:  # keeps the buffer from being resized meanwhile
                await self._send_copy(view, len(view), imm)

    async def _send_copy(self, data: bytes | memoryview, nbytes: int, imm: int) -> None:
        """Copy and post one message."""
        self._callbacks.check_open()
        if nbytes > self._max_size:
            raise ValueError(f"a message of {nbytes} bytes; max_message_size is {self._max_size}")
        if self._raise_if_cancelled is not None:
            await self._raise_if_cancelled()
        sends = self._sends
        if not sends.try_reserve():
            await sends.reserve()
        buffer: PooledBuffer | None = None
        number: int | None = None
        try:
            if nbytes > self._max_inline:
                buffer = sends.try_buffer(nbytes)
                if buffer is None:
                    buffer = await sends.buffer(nbytes, self._builder.call_in_worker)
            self._callbacks.check_open()
            number = sends.posted
            if buffer is None:
                sends.post_inline(data, imm)
            else:
                sends.post_copy(buffer, data, imm)
        except VerbsError as error:
            sends.unreserve()
            if buffer is not None:
                # libsiw keeps a request that it reports as failed: the device can still read it.
                sends.keep_until_destroyed(buffer)
            raise self._callbacks.post_failed(error) from None
        except BaseException:
            # After a Ctrl-C the request can be in flight: its completion releases both.
            if number is None or number == sends.posted:
                sends.unreserve()
                if buffer is not None:
                    buffer.release()
            raise
        self._count(nbytes)
        if self._schedule_point is not None:
            await self._schedule_point()

    async def _send_registered(
        self, data: Source, imm: int, invalidate: RemoteBuffer | None
    ) -> None:
        """Send registered memory without a copy, and wait until it can be reused."""
        self._callbacks.check_open()
        builder, max_bytes, where = self._builder, self._max_size, "a max_message_size"
        opcode = WrOpcode.SEND if imm == NO_IMMEDIATE else WrOpcode.SEND_WITH_IMM
        remote = (0, 0)
        if invalidate is not None:
            opcode, remote = WrOpcode.SEND_WITH_INV, (0, invalidate.rkey)
        if is_region(data):
            sgl = builder.single(data, max_bytes, where)
        else:
            sgl = await builder.sources(data, max_bytes, where)
        count = partial(self._count, sgl.nbytes)
        request = MemoryRequest(opcode, sgl.segments, remote, count, imm)
        await self._operations.perform(WcOpcode.SEND, request, sgl.release)

    def _count(self, nbytes: int) -> None:
        stats = self._sends.stats
        stats.messages_sent += 1
        stats.bytes_sent += nbytes
