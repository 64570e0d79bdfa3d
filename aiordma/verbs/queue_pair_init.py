"""QueuePairInit: the arguments of a new queue pair. QueuePairAttributes: changes to one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiordma._native import ffi, lib
from aiordma.enums import QpState, QpType
from aiordma.verbs.completion import CompletionQueue
from aiordma.verbs.element import new_context
from aiordma.verbs.shared_receive_queue import SharedReceiveQueue

if TYPE_CHECKING:
    from aiordma._native._lib import IbvQpAttr, IbvQpCap, IbvQpInitAttr


@dataclass(slots=True)  # not frozen: that would make each one several times slower to create
class QueuePairCaps:
    """The capacity of a queue pair (`struct ibv_qp_cap`): requests, segments, inline bytes."""

    max_send_wr: int
    max_recv_wr: int
    max_send_sge: int = 1
    max_recv_sge: int = 1
    max_inline_data: int = 0


@dataclass(slots=True)  # not frozen, as above
class QueuePairInit:
    """The arguments of a new queue pair (`struct ibv_qp_init_attr` and `_ex`).

    If a completion queue is None, the id creates one, with its own channel. If `qp_type` is None,
    the id takes the type of its port space. `create_flags` are passed to rdma_create_qp_ex(3).
    """

    caps: QueuePairCaps
    send_cq: CompletionQueue | None = None
    recv_cq: CompletionQueue | None = None
    srq: SharedReceiveQueue | None = None
    qp_type: QpType | None = None
    sq_sig_all: bool = False
    create_flags: int = 0

    def fill(self, attr: IbvQpInitAttr, qp_type: int) -> None:
        """Write the arguments into a C struct. `qp_type`: the type if `self.qp_type` is None.

        Raises:
            ValueError: a queue is closed.
        """
        caps = self.caps
        attr.qp_context = new_context()
        attr.send_cq = self.send_cq.open_pointer if self.send_cq is not None else ffi.NULL
        attr.recv_cq = self.recv_cq.open_pointer if self.recv_cq is not None else ffi.NULL
        attr.srq = self.srq.pointer if self.srq is not None else ffi.NULL
        attr.qp_type = qp_type if self.qp_type is None else self.qp_type
        attr.sq_sig_all = self.sq_sig_all
        cap = attr.cap
        cap.max_send_wr, cap.max_recv_wr = caps.max_send_wr, caps.max_recv_wr
        cap.max_send_sge, cap.max_recv_sge = caps.max_send_sge, caps.max_recv_sge
        cap.max_inline_data = caps.max_inline_data


class PackedQueuePairInit:
    """A QueuePairInit as a C struct, for any number of queue pairs: see IdCalls.create_qp."""

    __slots__ = ("caps", "pointer")

    def __init__(self, init: QueuePairInit) -> None:
        """Pack `init`, which has both completion queues. If it has no `qp_type`, that is RC.

        Raises:
            ValueError: a queue is closed.
        """
        self.caps = init.caps
        self.pointer = ffi.new("struct ibv_qp_init_attr *")
        """The C struct. Its queues must exist when it is used."""
        init.fill(self.pointer, QpType.RC)


def read_caps(cap: IbvQpCap) -> QueuePairCaps:
    """Return the real capacity of a queue pair, which is not less than what was requested."""
    return QueuePairCaps(
        max_send_wr=cap.max_send_wr,
        max_recv_wr=cap.max_recv_wr,
        max_send_sge=cap.max_send_sge,
        max_recv_sge=cap.max_recv_sge,
        max_inline_data=cap.max_inline_data,
    )


class QueuePairAttributes:
    """`struct ibv_qp_attr` with the mask of the fields that are set. See ibv_modify_qp(3).

    `CmId.init_qp_attr` sets the fields for a connection. The caller can change the fields of
    `pointer` afterwards.
    """

    __slots__ = ("mask", "pointer")

    def __init__(self, pointer: IbvQpAttr, mask: int) -> None:
        self.pointer = pointer
        self.mask = mask

    @classmethod
    def to_state(cls, state: QpState) -> QueuePairAttributes:
        """Return attributes that only change the state to `state`."""
        attr = ffi.new("struct ibv_qp_attr *")
        attr.qp_state = state
        return cls(attr, lib.IBV_QP_STATE)
