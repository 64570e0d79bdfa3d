"""IdCalls: calls on an id that block, which one thread makes without the interpreter's lock."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiordma._native import ffi, lib
from aiordma.errors import VerbsError
from aiordma.rdmacm.parameters import ConnectionParameters, fill_parameters
from aiordma.verbs import PackedQueuePairInit, ProtectionDomain, QueuePair
from aiordma.verbs.element import new_context

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiordma._native._lib import EndedCallsPtr, IdCallsPtr
    from aiordma.rdmacm.cm_id import CmId

_FUNCTIONS = {
    lib.AIORDMA_CREATE_QP: "rdma_create_qp",
    lib.AIORDMA_POST_RECV: "ibv_post_recv",
    lib.AIORDMA_RESOLVE_ROUTE: "rdma_resolve_route",
    lib.AIORDMA_ACCEPT: "rdma_accept",
    lib.AIORDMA_DISCONNECT: "rdma_disconnect",
    lib.AIORDMA_DESTROY_ID: "rdma_destroy_id",
    lib.AIORDMA_DESTROY_QP: "ibv_destroy_qp",
    lib.AIORDMA_CONNECT: "rdma_connect",
}


class IdCalls:
    """C calls on one id. They are made in the order of the methods below, until one fails.

    An object is used once: add the calls, have them made by EndedCalls.submit(), check() the
    result.
    """

    __slots__ = ("_cm_id", "have_ended", "have_failed", "pointer", "qp")

    def __init__(self, cm_id: CmId) -> None:
        """Make it without calls.

        Raises:
            VerbsError: ENOMEM.
        """
        pointer = lib.aiordma_new_id_calls(cm_id.pointer)
        if not pointer:
            raise VerbsError(ffi.errno, "malloc")
        self.pointer = ffi.gc(pointer, lib.aiordma_free_id_calls)
        """The C object. It is freed with this object, or when the calls have ended."""
        self.have_ended = False
        """True if EndedCalls.take() has reported the end."""
        self.have_failed = False
        """True if they have ended because one has failed."""
        self.qp: QueuePair | None = None
        """The queue pair of create_qp()."""
        self._cm_id = cm_id

    # --- adding calls ---

    def create_qp(self, init: PackedQueuePairInit, pd: ProtectionDomain) -> QueuePair:
        """Add CmId.create_qp(). Return the queue pair, whose pointer is NULL until it is made.

        Both completion queues must be given. The queue pair has the type of the id.

        Raises:
            ValueError: `pd` is closed.
        """
        calls = self.pointer
        calls.pd, calls.init = pd.open_pointer, init.pointer[0]
        calls.init.qp_context = context = new_context()
        calls.init.qp_type = self._cm_id.pointer.qp_type
        self.qp = self._cm_id.qp = qp = QueuePair.unmade(context, init.caps)
        calls.cell = qp.cell
        calls.calls |= lib.AIORDMA_CREATE_QP
        return qp

    def post_receives(
        self, first_wr_id: int, address: int, lkey: int, slots: int, slot_size: int
    ) -> None:
        """Add ibv_post_recv(3) for each slot of registered memory. Slot n has wr_id first + n."""
        calls = self.pointer
        calls.first_wr_id, calls.address, calls.lkey = first_wr_id, address, lkey
        calls.slots, calls.slot_size = slots, slot_size
        calls.calls |= lib.AIORDMA_POST_RECV

    def resolve_route(self, timeout_ms: int) -> None:
        """Add CmId.resolve_route()."""
        self.pointer.timeout_ms = timeout_ms
        self.pointer.calls |= lib.AIORDMA_RESOLVE_ROUTE

    def connect(self, parameters: ConnectionParameters) -> None:
        """Add CmId.connect(), for EventChannel.get_events() to make it in place of an event.

        resolve_route() is one of the calls. If connecting fails, get_events() returns the event
        ROUTE_RESOLVED. check() raises the error after that and after the end of the calls.

        Raises:
            ValueError: the private data is longer than 255 bytes.
        """
        self._add_parameters(parameters)
        self.pointer.calls |= lib.AIORDMA_CONNECT

    def accept(self, parameters: ConnectionParameters) -> None:
        """Add CmId.accept().

        Raises:
            ValueError: the private data is longer than 255 bytes.
        """
        self._add_parameters(parameters)
        self.pointer.calls |= lib.AIORDMA_ACCEPT

    def _add_parameters(self, parameters: ConnectionParameters) -> None:
        calls, data = self.pointer, parameters.private_data
        fill_parameters(calls.parameters, parameters, calls.private_data)
        if data:
            ffi.memmove(calls.private_data, data, len(data))

    def disconnect(self) -> None:
        """Add CmId.disconnect()."""
        self.pointer.calls |= lib.AIORDMA_DISCONNECT

    def destroy(self) -> None:
        """Add CmId.destroy(), and then QueuePair.destroy(), even if the id cannot be destroyed.

        From now on, the id and its queue pair cannot be used.
        """
        calls, cm_id = self.pointer, self._cm_id
        calls.calls |= lib.AIORDMA_DESTROY_ID
        qp = None if cm_id.qp is None else cm_id.qp.take_pointer()
        if qp is not None:
            calls.qp = qp
            calls.calls |= lib.AIORDMA_DESTROY_QP
        cm_id.take_pointer()

    # --- making them ---

    def cancel(self) -> None:
        """Have the calls not made, if none has begun."""
        self.pointer.is_cancelled = True

    def check(self) -> None:
        """Raise the error of the call that has failed, if one has. Call it after the end.

        Raises:
            VerbsError: as the method of CmId; ENOMEM or EINVAL of ibv_post_recv(3).
        """
        calls = self.pointer
        if calls.failed:
            raise VerbsError(calls.error, _FUNCTIONS[calls.failed])


class EndedCalls:
    """Makes threads of C make calls, and has a descriptor that is readable when calls have ended.

    The threads are not threads of Python, never hold the interpreter's lock, and do not keep the
    interpreter from exiting. Calls of different ids are made at the same time.
    """

    __slots__ = ("_pointer", "_under_way", "fd")

    def __init__(self) -> None:
        """Open it.

        Raises:
            VerbsError: EMFILE, ENOMEM.
        """
        pointer = lib.aiordma_new_ended_calls()
        if not pointer:
            raise VerbsError(ffi.errno, "eventfd")
        self._pointer: EndedCallsPtr | None = pointer
        self.fd = lib.aiordma_ended_calls_fd(pointer)
        self._under_way: dict[IdCallsPtr, tuple[IdCalls, Callable[[], None]]] = {}

    def __len__(self) -> int:
        """Return the number of submitted calls whose end take() has not returned."""
        return len(self._under_way)

    def submit(self, calls: IdCalls, on_end: Callable[[], None]) -> None:
        """Have a thread make the calls. take() returns `on_end` afterwards. Does not block.

        Callable from any thread. Only one object with calls of an id may be under way.

        Raises:
            ValueError: closed.
        """
        if self._pointer is None:
            raise ValueError("the queue of ended calls is closed")
        pointer = calls.pointer
        self._under_way[pointer] = calls, on_end
        submit(pointer, self._pointer)

    def take(self) -> list[Callable[[], None]]:
        """Return the `on_end` of the calls that have ended since the last take()."""
        found: list[Callable[[], None]] = []
        if self._pointer is None:
            return found
        pointer = lib.aiordma_take_ended_calls(self._pointer)
        while pointer:
            following = pointer.next
            calls, on_end = self._under_way.pop(pointer)
            calls.have_ended, calls.have_failed = True, bool(pointer.failed)
            if calls.qp is not None:
                calls.qp.note_made(pointer.init)
            found.append(on_end)
            pointer = following
        return found

    def close(self) -> None:
        """Close the descriptor. Calls that are under way go on. Idempotent."""
        pointer, self._pointer = self._pointer, None
        if pointer is not None:
            lib.aiordma_free_ended_calls(pointer)


submit = lib.aiordma_submit_id_calls
"""Have a thread of C make calls, and report their end."""
