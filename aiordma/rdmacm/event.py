"""CmEvent: one rdma_cm event, copied and acknowledged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiordma._native import ffi, lib
from aiordma.enums import CmEventType
from aiordma.verbs import AddressHandleAttributes

if TYPE_CHECKING:
    from aiordma._native._lib import CmEventCopy


# Not frozen: that would make each event several times slower to create. Without slots, a field that
# an event does not set is the default of the class.
@dataclass
class CmEvent:
    """`struct rdma_cm_event` as a value. See rdma_get_cm_event(3).

    `id` and `listen_id` are the addresses of the C ids. `listen_id` is 0 except in CONNECT_REQUEST.
    `private_data` is as it arrived: InfiniBand and RoCE pad it with zeros, iWARP does not.
    `ah_attr`, `qp_num` and `qkey` are the destination for sends to a datagram peer or to a
    multicast group. In a group's events, `context` is the argument of the call that joined it.
    `arg` is the argument of rdma_write_cm_event(3).
    """

    type: CmEventType
    id: int
    listen_id: int = 0
    status: int = 0
    error: int = 0
    private_data: bytes = b""
    responder_resources: int = 0
    initiator_depth: int = 0
    flow_control: int = 0
    retry_count: int = 0
    rnr_retry_count: int = 0
    srq: int = 0
    qp_num: int = 0
    qkey: int = 0
    ah_attr: AddressHandleAttributes | None = None
    context: int = 0
    arg: int = 0

    @property
    def errno(self) -> int:
        """The errno in the status; 0 for success and for statuses that the transport defines.

        If librdmacm itself fails, it sets the status to -1 and the cause in errno, which is
        `error`.
        """
        if self.status >= 0:
            return 0
        return self.error if self.status == -1 and self.error else -self.status

    def __str__(self) -> str:
        """Return the C name of the type: rdma_event_str(3)."""
        return ffi.string(lib.rdma_event_str(self.type)).decode()


NO_PARAMETERS = lib.AIORDMA_NO_PARAMETERS
CONNECTION_PARAMETERS = lib.AIORDMA_CONNECTION_PARAMETERS

_TYPES = {int(kind): kind for kind in CmEventType}  # faster than CmEventType()
# The events that contain a destination for datagrams.
_ADDRESSED = frozenset({CmEventType.ESTABLISHED, CmEventType.MULTICAST_JOIN})


def read_event(copy: CmEventCopy) -> CmEvent:
    """Return the value of one event that the C helper copied."""
    number, parameters = copy.event, copy.parameters
    kind = _TYPES[number] if number in _TYPES else CmEventType(number)
    event = CmEvent.__new__(CmEvent)
    event.type, event.id, event.listen_id = kind, copy.id, copy.listen_id
    if copy.status:
        event.status, event.error = copy.status, abs(copy.error)
    if parameters == NO_PARAMETERS:
        return event
    if copy.private_data_len:
        event.private_data = bytes(ffi.buffer(copy.private_data, copy.private_data_len))
    event.qp_num = copy.qp_num
    if parameters == CONNECTION_PARAMETERS:
        event.responder_resources = copy.responder_resources
        event.initiator_depth = copy.initiator_depth
        event.flow_control = copy.flow_control
        event.retry_count = copy.retry_count
        event.rnr_retry_count = copy.rnr_retry_count
        event.srq = copy.srq
        return event
    event.qkey = copy.qkey
    if kind in _ADDRESSED and copy.ah_attr.port_num:
        event.ah_attr = AddressHandleAttributes.read(copy.ah_attr)
    event.context = copy.context
    event.arg = copy.arg
    return event
