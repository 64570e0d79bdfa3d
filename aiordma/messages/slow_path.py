"""SlowPath: the operations of a connection that the core leaves to Python."""

from __future__ import annotations

from aiordma.cm import AsyncCmId
from aiordma.messages.memory_windows import MemoryWindows
from aiordma.messages.remote_access import RemoteAccess
from aiordma.messages.sender import Sender
from aiordma.options import ConnectionOptions
from aiordma.qp.operation import Operations
from aiordma.qp.scatter_gather import ScatterGatherBuilder
from aiordma.verbs import Device, ProtectionDomain


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
        pd: ProtectionDomain,
        initiator_depth: int,
    ) -> None:
        """`pd`: the protection domain of the queue pair. `initiator_depth`: see RemoteAccess."""
        self._cm = cm
        self._device = device
        self._operations = operations
        self._options = options
        self._pd = pd
        self._initiator_depth = initiator_depth
        self._builder: ScatterGatherBuilder | None = None
        self._sender: Sender | None = None
        self._remote: RemoteAccess | None = None
        self._windows: MemoryWindows | None = None

    @property
    def builder(self) -> ScatterGatherBuilder:
        """The maker of lists of users' memory."""
        if self._builder is None:
            sends, call = self._operations.sends, self._cm.handle.call
            self._builder = ScatterGatherBuilder(sends, self._options.max_sge, call, self._pd)
        return self._builder

    @property
    def sender(self) -> Sender:
        """The sends."""
        if self._sender is None:
            self._sender = Sender(self._operations, self.builder, self._options, self._device)
        return self._sender

    @property
    def remote(self) -> RemoteAccess:
        """The one-sided operations."""
        if self._remote is None:
            self._remote = RemoteAccess(
                self._device,
                self._operations,
                self.builder,
                self._options.max_inline,
                self._initiator_depth,
            )
        return self._remote

    @property
    def windows(self) -> MemoryWindows:
        """The memory windows."""
        if self._windows is None:
            self._windows = MemoryWindows(self._cm, self._operations, self._pd)
        return self._windows
