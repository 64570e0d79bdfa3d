"""SlowPath: the operations of a connection that the core leaves to Python."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import TYPE_CHECKING

from aiordma.cm import AsyncCmId
from aiordma.loop import checkpoint_halves_of
from aiordma.messages.memory_windows import MemoryWindows
from aiordma.messages.remote_access import RemoteAccess
from aiordma.messages.sender import Sender
from aiordma.options import ConnectionOptions
from aiordma.qp.operation import Operations
from aiordma.qp.scatter_gather import ScatterGatherBuilder
from aiordma.verbs import Device, ProtectionDomain
from aiordma.verbs.queue_pair import NO_IMMEDIATE

if TYPE_CHECKING:
    from aiordma.memory import RemoteBuffer
    from aiordma.qp.scatter_gather import Sink, Source


class SlowPath:
    """The objects that send and access the peer's memory where the core cannot.

    Each is made when it is first needed: most connections need none of them.
    """

    def __init__(
        self,
        cm: AsyncCmId,
        device: Device,
        operations: Operations,
        options: ConnectionOptions,
    ) -> None:
        """Have the core call this object for what it cannot do."""
        self.pd: ProtectionDomain
        """The protection domain of the queue pair, once that is made."""
        self.initiator_depth = 0
        """The number of reads and atomics that can be in flight. 0 until it is negotiated."""
        self._cm = cm
        self._device = device
        self._operations = operations
        self._options = options
        self._builder: ScatterGatherBuilder | None = None
        self._sender: Sender | None = None
        self._remote: RemoteAccess | None = None
        self._windows: MemoryWindows | None = None
        core = operations.sends.core
        core.checkpoints = checkpoint_halves_of(type(operations.loop))
        core.set_slow(self._send)
        core.set_slow_access(self._read, self._write)

    @property
    def builder(self) -> ScatterGatherBuilder:
        """The maker of lists of users' memory."""
        if self._builder is None:
            sends, call = self._operations.sends, self._cm.handle.call
            self._builder = ScatterGatherBuilder(sends, self._options.max_sge, call, self.pd)
        return self._builder

    @property
    def sender(self) -> Sender:
        """The sends."""
        if self._sender is None:
            self._sender = Sender(self._operations, self.builder, self._options, self._device)
        return self._sender

    @property
    def remote(self) -> RemoteAccess:
        """The one-sided operations. First used after the negotiation of the depth."""
        if self._remote is None:
            self._remote = RemoteAccess(
                self._device,
                self._operations,
                self.builder,
                self._options.max_inline,
                self.initiator_depth,
            )
        return self._remote

    @property
    def windows(self) -> MemoryWindows:
        """The memory windows."""
        if self._windows is None:
            self._windows = MemoryWindows(self._cm, self._operations, self.pd)
        return self._windows

    def _send(self, data: Source, error: int = 0) -> Coroutine[object, None, None]:
        return self.sender.send(data, error)

    def _read(self, remote: RemoteBuffer, into: Sink) -> Coroutine[object, None, None]:
        return self.remote.read(remote, into)

    def _write(
        self, source: Source, remote: RemoteBuffer, imm: int = NO_IMMEDIATE
    ) -> Coroutine[object, None, None]:
        return self.remote.write(source, remote, imm)
