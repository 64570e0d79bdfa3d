"""StreamTransport: a byte stream as an asyncio transport."""

from __future__ import annotations

import asyncio
import contextvars
import warnings
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeVar, cast

from aiordma.asyncio.errors import as_os_error
from aiordma.asyncio.write_buffer import WriteBuffer
from aiordma.errors import RdmaError
from aiordma.loop import InlineFuture, wake
from aiordma.memory import byte_view
from aiordma.streams.stats import StreamStats
from aiordma.streams.stream_core import StreamCore

if TYPE_CHECKING:
    from typing_extensions import Buffer

P = TypeVar("P", bound=asyncio.BaseProtocol)

# The most bytes read at once, as in the transports of asyncio.
MAX_READ = 256 * 1024


class StreamTransport(asyncio.Transport):
    """An asyncio.Transport over RDMA. It is made by create_connection() or create_server().

    `get_extra_info()` has "peername", "sockname" and "rdma_device".
    """

    # The asyncio loop checks this before it starts TLS on a transport of another class.
    _start_tls_compatible = True

    def __init__(
        self,
        core: StreamCore,
        loop: asyncio.AbstractEventLoop,
        protocol: asyncio.BaseProtocol,
        on_lost: Callable[[StreamTransport], None] | None = None,
    ) -> None:
        """Connect `protocol` to `core` when begin() is called.

        `on_lost` is called after the protocol's connection_lost().
        """
        cm = core.endpoint.cm
        super().__init__(
            {
                "peername": cm.peer_address,
                "sockname": cm.local_address,
                "rdma_device": core.endpoint.device.name,
            }
        )
        self.core = core
        """The stream."""
        self._receiver = core.receiver
        self._inbound = core.data_path.protocol.inbound
        self._fast_path = core.data_path.core
        self._loop = loop
        self._on_lost = on_lost
        self._context = contextvars.copy_context()
        self._buffer = WriteBuffer(self._report)
        # Set when bytes have arrived or the stream has changed; then a new one takes its place.
        self._wakeup = self._make_wakeup()
        # True if the stream has changed otherwise than by bytes that have arrived.
        self._has_changed = False
        # True from begin() to the end of the received data, or to close().
        self._reading = False
        self._paused = False
        self._eof_wanted = False
        self._eof_sent = False
        self._closing = False
        self._lost = False
        self._closing_task: asyncio.Task[None] | None = None
        self._ended = False
        # The reason why nothing can be sent any more; None while it can.
        self._sending_error: RdmaError | None = None
        self.set_protocol(protocol)

    @property
    def stats(self) -> StreamStats:
        """A snapshot of the stream's counters. The waits are those of an aiordma StreamReader."""
        return self.core.snapshot()

    def begin(self) -> None:
        """Call the protocol's connection_made(), and start reading."""
        self._reading = True
        self.core.on_change = self._schedule
        try:
            self._protocol.connection_made(self)
        except Exception as error:
            self._fail(error, "protocol.connection_made() failed")
        self._schedule()

    # --- the protocol ---

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Set the protocol that is called from now on."""
        self.has_reader = False
        """True if an aiordma StreamReader takes the bytes: see take(). It belongs to the protocol,
        as the bytes do: after start_tls() they are those of TLS."""
        self._protocol = cast(asyncio.Protocol, protocol)
        self._buffered_reader = protocol if isinstance(protocol, asyncio.BufferedProtocol) else None

    def get_protocol(self) -> asyncio.BaseProtocol:
        """Return the protocol."""
        return self._protocol

    # --- changes of the stream ---

    def _make_wakeup(self) -> InlineFuture:
        return InlineFuture(self._loop, self._on_wakeup, self._context)

    def _schedule(self) -> None:
        """Read and write soon: after the completions that are processed now, if any.

        Otherwise in the next iteration of the event loop.
        """
        self._has_changed = True
        wake(self._wakeup)

    def wait_for_bytes(self) -> None:
        """Have the next bytes that arrive wake the transport, if it reads."""
        if self.is_reading():
            self._fast_path.waiter = self._wakeup

    def _on_wakeup(self, _: object) -> None:
        """Read and write. Called when bytes have arrived, or the stream has changed."""
        self._wakeup = self._make_wakeup()
        if self._has_changed:
            self._has_changed = False
            self._read_and_write()
        elif self._inbound.available and self.is_reading():
            self._read()
        if self._inbound.available and self.is_reading():
            wake(self._wakeup)
        self.wait_for_bytes()

    def _read_and_write(self) -> None:
        """Read bytes, the end or an error, and write, as far as the stream allows it now."""
        if self.is_reading() and self._receiver.is_readable():
            self._read()
            if self.is_reading() and self._receiver.is_readable():
                self._schedule()
        buffer = self._buffer
        has_work = buffer.size or buffer.paused or self._eof_wanted or self._closing
        if has_work and not self._lost and self._sending_error is None:
            self._flush()
        if buffer.size and self._sending_error is None:
            self.core.notify_sendable()

    # --- reading ---

    def is_reading(self) -> bool:
        """Return True if received data is passed to the protocol."""
        return self._reading and not self._paused and not self._lost

    def pause_reading(self) -> None:
        """Pass no data to the protocol until resume_reading(). Idempotent.

        The peer must stop sending when the receive buffer is full. If sending has failed, the
        connection ends now.
        """
        self._paused = True
        if self._sending_error is not None:
            self._lose(self._sending_error)

    def resume_reading(self) -> None:
        """Pass data to the protocol again after pause_reading(). Idempotent."""
        if self._paused:
            self._paused = False
            self._schedule()

    def take(self, limit: int) -> bytes | None:
        """Return received bytes, at most `limit`, in place of passing them to the protocol.

        Poll for them if that pays. None: there are none, the transport does not read now, or the
        bytes are for another protocol than that of the reader.
        """
        return self._fast_path.read(limit) if self.has_reader and self.is_reading() else None

    def _read(self) -> None:
        try:
            reader = self._buffered_reader
            count = self._read_bytes() if reader is None else self._read_into(reader)
        except RdmaError as error:
            self._lose(error)
            return
        except Exception as error:
            self._fail(error, "the protocol failed on received data")
            return
        if not count:
            self._end_reading()

    def _read_bytes(self) -> int:
        data = self._fast_path.read(MAX_READ) if self._inbound.available else None
        if data is None:  # the end or an error
            data = self._receiver.read(MAX_READ)
        if data:
            self._protocol.data_received(data)
        return len(data)

    def _read_into(self, protocol: asyncio.BufferedProtocol) -> int:
        buffer = protocol.get_buffer(-1)
        with memoryview(buffer) as view, byte_view(view) as memory:
            if not len(memory):
                raise RuntimeError("get_buffer() returned an empty buffer")
            count = self._receiver.read_into(memory)
        if count:
            protocol.buffer_updated(count)
        return count

    def _end_reading(self) -> None:
        self._reading = False
        try:
            keeps_open = self._protocol.eof_received()
        except Exception as error:
            self._fail(error, "protocol.eof_received() failed")
            return
        if self._sending_error is not None:
            self._lose(self._sending_error)
        elif not keeps_open:
            self.close()

    # --- writing ---

    def write(self, data: Buffer) -> None:
        """Send `data`, or store it to be sent later. Never blocks; see set_write_buffer_limits().

        Raises:
            RuntimeError: write_eof() was called.
        """
        if self._eof_wanted:
            raise RuntimeError("Cannot call write() after write_eof()")
        if self._lost or self._closing_task is not None or self._sending_error is not None:
            return  # as with asyncio: writes are ignored when no data waits after close()
        if not self._buffer.size:
            posted = self._fast_path.send(data)
            if posted < 0:
                self._stop_sending(self.core.data_path.sender.post_error(posted))
                return
            if posted > 0:
                data = memoryview(data)[posted:]
                if not data:
                    return
        with memoryview(data) as view, byte_view(view) as memory:
            if not memory.nbytes:
                return
            taken = 0
            if not self._buffer.size:
                try:
                    taken = self.core.write(memory)
                except RdmaError as error:
                    self._stop_sending(error)
                    return
            if taken < len(memory):
                self._buffer.add(memory[taken:], self._protocol)
                self.core.notify_sendable()

    def writelines(self, list_of_data: Iterable[Buffer]) -> None:
        """Call write() with all items joined."""
        self.write(b"".join([bytes(data) for data in list_of_data]))

    def can_write_eof(self) -> bool:
        """Return True."""
        return True

    def write_eof(self) -> None:
        """Finish sending, behind the data written before. Idempotent."""
        if self._eof_wanted or self._closing or self._sending_error is not None:
            return
        self._eof_wanted = True
        self._flush()

    def get_write_buffer_size(self) -> int:
        """Return the number of bytes that wait to be sent."""
        return self._buffer.size

    def get_write_buffer_limits(self) -> tuple[int, int]:
        """Return the low and the high water mark in bytes."""
        return self._buffer.low, self._buffer.high

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Set the water marks in bytes.

        The protocol is paused above `high`, and resumed at `low` or below.
        """
        self._buffer.set_limits(high, low)
        self._buffer.pause_if_full(self._protocol)

    def _flush(self) -> None:
        try:
            if self._buffer.size:
                self._buffer.drain(self.core.write)
            if not self._buffer.size and self._eof_wanted and not self._eof_sent:
                self._eof_sent = True
                self.core.finish()
        except RdmaError as error:
            self._stop_sending(error)
            return
        self._buffer.resume_if_low(self._protocol)
        if not self._buffer.size and self._closing:
            self._start_closing()

    def _stop_sending(self, error: RdmaError) -> None:
        """Stop sending after `error`.

        If the protocol reads, the received data is passed to it first, with what the device has not
        reported yet; reading then ends with the reason. Otherwise the connection is ended at once.
        """
        self._sending_error = error
        self._buffer.clear()
        if self.is_reading():
            self._schedule()
        else:
            self._lose(error)

    # --- the end ---

    def is_closing(self) -> bool:
        """Return True if the transport is closed or closing, or cannot send any more."""
        return self._closing or self._lost or self._sending_error is not None

    def close(self) -> None:
        """Send the data that waits, then close. No more data is received. Idempotent.

        At the end the protocol's connection_lost(None) is called.
        """
        if self._closing or self._lost:
            return
        self._closing = True
        self._reading = False
        if not self._buffer.size:
            self._start_closing()

    def _start_closing(self) -> None:
        if self._closing_task is None:
            self._closing_task = self._loop.create_task(self._close_core())
            self._closing_task.add_done_callback(self._on_closed)

    def _on_closed(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():  # perhaps before it has begun
            self.core.abort()
            self._end(None)

    async def _close_core(self) -> None:
        try:
            await self.core.aclose()
        finally:
            self._end(None)

    def abort(self) -> None:
        """Close at once, without sending the data that waits."""
        self._end_soon(None)

    def _force_close(self, error: Exception | None) -> None:
        """End the connection. Called by the TLS of asyncio after a failure."""
        self._end_soon(error)

    def _lose(self, error: RdmaError) -> None:
        """End the connection because of `error`."""
        self._end_soon(as_os_error(error))

    def _fail(self, error: Exception, where: str) -> None:
        self._report(error, where)
        self._end_soon(error)

    def _report(self, error: Exception, where: str) -> None:
        context = {
            "message": where,
            "exception": error,
            "transport": self,
            "protocol": self._protocol,
        }
        self._loop.call_exception_handler(context)

    def _end_soon(self, error: Exception | None) -> None:
        self.core.abort()
        if not self._lost:
            self._loop.call_soon(self._end, error)
        self._lost = True

    def _end(self, error: Exception | None) -> None:
        if self._ended:
            return
        self._ended = self._lost = True
        self.core.on_change = _ignore_change
        self._fast_path.waiter = None
        self._wakeup = InlineFuture(self._loop)  # without a reference to this object
        self._buffer.clear()
        try:
            self._protocol.connection_lost(error)
        finally:
            if self._on_lost is not None:
                self._on_lost(self)

    def __del__(self, _warn: Callable[..., None] = warnings.warn) -> None:
        core = getattr(self, "core", None)
        if core is not None and not core.endpoint.released:
            _warn(f"unclosed transport {self!r}", ResourceWarning, source=self)
            core.endpoint.abandon()

    def __repr__(self) -> str:
        host, port = self.core.endpoint.peer_address
        state = "closed" if self._lost else "closing" if self._closing else "open"
        return f"<StreamTransport to {host} port {port}, {state}>"


def create_transport(
    core: StreamCore,
    loop: asyncio.AbstractEventLoop,
    protocol_factory: Callable[[], P],
    on_lost: Callable[[StreamTransport], None] | None = None,
) -> tuple[StreamTransport, P]:
    """Return a transport for `core`, and its protocol.

    If the factory fails, `core` is aborted. Raises: the exceptions of the factory.
    """
    try:
        protocol = protocol_factory()
    except BaseException:
        core.abort()
        raise
    return StreamTransport(core, loop, protocol, on_lost), protocol


def _ignore_change() -> None:
    """Ignore a change of a stream whose transport has ended."""
