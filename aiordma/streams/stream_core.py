"""StreamCore: a stream on an endpoint, without the interface of any event loop.

Its methods do what is possible at once, or wait until it is. The core lives as long as the endpoint
and its queue pair. Users have an adapter, which refers to the core.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import index
from typing import TYPE_CHECKING, Self

from aiordma.cm import AsyncCmId, close_after
from aiordma.cm.establishing import establish
from aiordma.dispatch import AdaptiveWait
from aiordma.enums import AccessFlags
from aiordma.errors import BusyError, LocalClosed, PeerClosed
from aiordma.loop import (
    Deadline,
    WaitQueue,
    cancellation_of,
    checkpoint_halves_of,
    checkpoint_of,
    future_factory,
    schedule_point_of,
    yield_of,
)
from aiordma.memory import MemoryRegion, MemorySlice, byte_view
from aiordma.qp.endpoint import Endpoint
from aiordma.rdmacm.address import format_address
from aiordma.streams.options import StreamOptions
from aiordma.streams.stats import StreamStats
from aiordma.streams.stream_data_path import StreamDataPath
from aiordma.streams.stream_receiver import StreamReceiver
from aiordma.streams.wire import MAX_OFFSET, ConnectionData, Mapping, Segment
from aiordma.verbs import ProtectionDomain

if TYPE_CHECKING:
    from typing_extensions import Buffer


class StreamCore:
    """One side of a stream. Call all methods on the thread of the loop."""

    def __init__(self, cm: AsyncCmId, options: StreamOptions) -> None:
        """Own `cm` from now on. Called by connect() and accept()."""
        self.on_change: Callable[[], None] = _ignore_change
        """Called after a change other than the arrival of bytes: sending can have become possible,
        or the stream can have ended. It must not raise."""
        self.loop = cm.loop
        self.options = options
        self._change = WaitQueue(cm.loop)
        self.endpoint = Endpoint(
            cm,
            options.connection_options(),
            lambda callbacks: StreamDataPath(cm, callbacks, options, self._changed),
        )
        self.data_path = self.endpoint.data_path
        self._is_open = False
        self._mapped = 0
        self._bytes_written = 0
        self._checkpoint = checkpoint_of(type(cm.loop))
        self._raise_if_cancelled = cancellation_of(type(cm.loop))
        self._schedule_point = schedule_point_of(type(cm.loop))
        self.receiver = StreamReceiver(self.endpoint)
        busy = self.data_path.busy
        self._writing = AdaptiveWait(self._change, busy, self.notify_sendable)

    @classmethod
    async def connect(cls, cm: AsyncCmId, options: StreamOptions) -> Self:
        """Connect along the route of the id. The id is closed if this fails or is cancelled.

        Raises: as AsyncCmId.connect(), and ProtocolError.
        """
        try:
            core = cls(cm, options)
            await cm.handle.call(core.data_path.allocate)
            endpoint = core.endpoint
            await endpoint.connect(core.data_path.protocol.connection_data())
            core._start(endpoint.peer_private_data)
        except BaseException as error:
            await close_after(cm, error)
            raise
        return core

    @classmethod
    async def accept(cls, cm: AsyncCmId, options: StreamOptions) -> Self:
        """Accept the connection request of the id. Reject it if the peer does not use rsocket.

        The id is closed if this fails or is cancelled.

        Raises: as AsyncCmId.accept(), and ProtocolError.
        """
        try:
            request = cm.request
            ConnectionData.unpack(request.private_data if request is not None else b"")
            core = cls(cm, options)
            await cm.handle.call(core.data_path.allocate)
            await core.endpoint.accept(core.data_path.protocol.connection_data())
            core._start(core.endpoint.peer_private_data)
        except BaseException as error:
            await close_after(cm, error)
            raise
        return core

    def _start(self, peer_data: bytes) -> None:
        data_path, dispatcher = self.data_path, self.data_path.dispatcher
        data_path.protocol.start(peer_data)
        data_path.core.swaps = data_path.protocol.swaps
        data_path.core.checkpoints = checkpoint_halves_of(type(self.loop))
        data_path.core.set_slow(self.receiver.receive, self.send_rest)
        data_path.core.set_parking(
            future_factory(self.loop), yield_of(self.loop), data_path.polling
        )
        data_path.core.may_park = not self.endpoint.closed
        self._is_open = True
        adaptive = self.options.adaptive_poll
        data_path.polling.open(dispatcher, data_path.busy.nanoseconds, adaptive)
        self._writing.open(dispatcher, adaptive=adaptive)
        data_path.sender.post_controls()

    def snapshot(self) -> StreamStats:
        """Return the statistics of this moment."""
        data_path = self.data_path
        inbound, outbound = data_path.protocol.inbound, data_path.protocol.outbound
        return StreamStats(
            bytes_sent=outbound.nbytes,
            bytes_received=inbound.nbytes,
            bytes_written=self._bytes_written,
            send_waits=self._writing.waits,
            receive_waits=self.receiver.waits + data_path.core.waits,
            sends_posted=len(data_path.sends),
            bytes_unread=inbound.available,
        )

    def _changed(self) -> None:
        if not self._is_open:
            return
        if self.endpoint.closed:
            self.data_path.protocol.connection_lost()
        self.data_path.core.wake()
        self._change.wake_all()
        self.on_change()

    def notify_sendable(self) -> None:
        """Have on_change called after the next completion, once.

        It is called for other changes in any case.
        """
        self.data_path.core.notify_sendable = True

    # --- sending ---

    def check_sending(self) -> None:
        """Raise an exception if no data can be sent any more.

        Raises:
            LocalClosed: the stream was closed here, or send_eof() was called.
            PeerClosed: the peer closed the stream, or its connection ended.
            Others: as Endpoint.check_open().
        """
        self.endpoint.check_open()
        protocol = self.data_path.protocol
        if protocol.peer_left:
            peer = format_address(self.endpoint.peer_address)
            raise PeerClosed(f"{peer} closed the stream")
        if not protocol.state.may_send:
            raise LocalClosed("the sending side of the stream was ended")

    def write(self, data: memoryview) -> int:
        """Post the part of `data` that may be posted now, and return its length in bytes.

        Raises: as check_sending().
        """
        self.check_sending()
        return self.data_path.sender.write(data)

    async def wait_writable(self) -> None:
        """Wait as ByteStream.wait_sendable()."""
        with self._sending():
            if self._raise_if_cancelled is not None:
                await self._raise_if_cancelled()
            await self._writing.until(self._may_write)
            self.check_sending()
            if self._schedule_point is not None:
                await self._schedule_point()

    async def send_rest(self, data: Buffer | MemorySlice | MemoryRegion, posted: int = 0) -> None:
        """Send what the core has not posted: see ByteStream.send().

        `posted`: the number of bytes that it has posted, or a negative errno.
        """
        if posted < 0:
            raise self.data_path.sender.post_error(posted)
        if isinstance(data, (MemorySlice, MemoryRegion)):
            await self.send_registered(data[:])
        else:
            with memoryview(data) as view, byte_view(view) as memory:
                await self.send(memory[posted:])

    async def send(self, data: memoryview) -> None:
        """Send bytes as ByteStream.send()."""
        with self._sending():
            if self._raise_if_cancelled is not None:
                await self._raise_if_cancelled()
            taken = self.write(data)
            if taken < len(data) and self.data_path.sends.core.preempted:
                await self.data_path.busy.yield_to_loop()  # then write() may poll for room
                taken += self.write(data[taken:])
            while taken < len(data):
                await self._writing.until(self._may_write)
                taken += self.write(data[taken:])
            if self._schedule_point is not None:
                await self._schedule_point()

    async def send_registered(self, part: MemorySlice) -> None:
        """Send registered memory without a copy, and wait until it may be reused."""
        with self._sending():
            if self._checkpoint is not None:
                await self._checkpoint()
            data_path, references = self.data_path, _RegionReferences(part.region)
            while len(part):
                self.check_sending()
                room = data_path.sender.room
                if room:
                    references.acquire(data_path.pd)
                    data_path.sender.write_registered(part[:room], references)
                    part = part[room:]
                else:
                    await self._writing.until(
                        lambda: bool(data_path.sender.room) or self._is_finished()
                    )
            await self._writing.until(lambda: not references.count or self.endpoint.closed)
            if references.count:
                raise self.endpoint.end_reason()

    # --- mappings ---

    @property
    def peer_mappings(self) -> int:
        """The number of mappings that the peer takes in all."""
        return self.data_path.protocol.peer_mappings

    async def iomap(self, part: MemorySlice, offset: int) -> None:
        """Map memory as ByteStream.iomap()."""
        data_path, region = self.data_path, part.region
        offset = index(offset)
        if not 0 <= offset <= MAX_OFFSET - len(part):
            raise ValueError(f"the offsets of a mapping are 0 to 2^64 - 1, not {offset} and more")
        if not region.access & AccessFlags.REMOTE_WRITE:
            raise ValueError("memory to be mapped must be registered with REMOTE_WRITE")
        with self._sending():
            if self._checkpoint is not None:
                await self._checkpoint()
            limit = self.peer_mappings
            if self._mapped >= limit:
                raise ValueError(
                    f"the peer takes {limit} mappings: its RDMA_IOMAPSIZE, or `mappings`"
                )
            await self._writing.until(lambda: data_path.sender.may_announce or self._is_finished())
            self.check_sending()
            region.acquire(data_path.pd)
            self.endpoint.cm.handle.add_released_callback(region.release)
            segment = Segment(part.addr, region.rkey, len(part))
            data_path.sender.announce(self._mapped, Mapping(offset, segment))
            self._mapped += 1

    async def iowrite(self, data: memoryview, offset: int) -> None:
        """Write as ByteStream.iowrite()."""
        data_path = self.data_path
        offset = index(offset)
        with self._sending():
            if self._checkpoint is not None:
                await self._checkpoint()
            target = data_path.protocol.outbound.find_mapped(offset, len(data))
            if target is None:
                raise ValueError(f"the peer has not mapped {len(data)} bytes at offset {offset}")
            taken = 0
            while taken < len(data):
                self.check_sending()
                written = data_path.sender.write_mapped(data[taken:], target.after(taken))
                self._bytes_written += written
                taken += written
                if taken < len(data):
                    await self._writing.until(
                        lambda: data_path.sender.may_write_mapped or self._is_finished()
                    )

    @contextmanager
    def _sending(self) -> Iterator[None]:
        self.check_sending()
        self._check_no_writer()
        self.data_path.core.has_writer = True
        try:
            yield
        finally:
            self.data_path.core.has_writer = False

    def _check_no_writer(self) -> None:
        if self.data_path.core.has_writer:
            raise BusyError("another task is sending on this stream")

    def _is_finished(self) -> bool:
        return self.endpoint.closed or not self.data_path.protocol.state.may_send

    def _may_write(self) -> bool:
        return self.data_path.core.may_copy or self._is_finished()

    async def send_eof(self) -> None:
        """Finish sending as ByteStream.send_eof()."""
        self.endpoint.check_open()
        self._check_no_writer()
        if self._checkpoint is not None:
            await self._checkpoint()
            self._check_no_writer()
        self.finish()

    def finish(self) -> None:
        """Finish sending, behind the data that is posted. Idempotent.

        Raises: as Endpoint.check_open().
        """
        self.endpoint.check_open()
        self.data_path.protocol.finish()
        self.data_path.sender.post_controls()

    # --- the end ---

    async def aclose(self) -> None:
        """Let the posted data arrive, send DISCONNECT, disconnect, and destroy everything."""
        endpoint, protocol = self.endpoint, self.data_path.protocol
        deadline = Deadline(self.loop, self.options.close_timeout, self._close_timed_out)
        try:
            if not endpoint.closed:
                protocol.leave()
                self.data_path.sender.post_controls()
            while not (protocol.all_controls_completed or endpoint.closed or deadline.expired):
                self.notify_sendable()
                await self._change.wait()
            await endpoint.aclose(deadline)
        except BaseException:
            endpoint.abort()
            raise
        finally:
            deadline.cancel()

    def _close_timed_out(self) -> None:
        self._change.wake_all()
        self.endpoint.wake()

    def abort(self) -> None:
        """End the stream at once. Idempotent."""
        self.endpoint.abort()


class _RegionReferences:
    """References to a memory region, one for each work request that uses it."""

    def __init__(self, region: MemoryRegion) -> None:
        self._region = region
        self.count = 0

    def acquire(self, pd: ProtectionDomain) -> None:
        self._region.acquire(pd)
        self.count += 1

    def release(self) -> None:
        self.count -= 1
        self._region.release()


def _ignore_change() -> None:
    """Ignore a change. The value of on_change until an adapter sets it."""


async def connect_stream_core(
    host: str, port: int, local_address: tuple[str, int] | None, options: StreamOptions
) -> StreamCore:
    """Connect and return the StreamCore, for an adapter. Raises: as connect_stream()."""

    async def finish(cm: AsyncCmId) -> StreamCore:
        return await StreamCore.connect(cm, options)

    return await establish(host, port, local_address, options.connection_options(), finish)
