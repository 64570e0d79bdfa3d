"""The parameters of a connection, as values and as C structs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiordma._native import ffi

if TYPE_CHECKING:
    from aiordma._native._lib import Bytes, ConnParam, IbvEce, NullPtr

MAX_PRIVATE_DATA = 255
"""The number of bytes that `private_data_len` can have. Devices allow less: see connect()."""


@dataclass(slots=True)  # not frozen: that would make each one several times slower to create
class ConnectionParameters:
    """`struct rdma_conn_param`. See rdma_connect(3) and rdma_accept(3).

    `retry_count` and `rnr_retry_count` are 0 to 7; an `rnr_retry_count` of 7 means forever. For
    `responder_resources` and `initiator_depth`, 255 means the maximum of the device. `srq` and
    `qp_num` are used only if the id has no queue pair.
    """

    private_data: bytes = b""
    responder_resources: int = 0
    initiator_depth: int = 0
    flow_control: int = 0
    retry_count: int = 7
    rnr_retry_count: int = 7
    srq: int = 0
    qp_num: int = 0


class PackedParameters:
    """A `struct rdma_conn_param *`, NULL for None, and the private data that it points at."""

    __slots__ = ("_private_data", "pointer")

    def __init__(self, parameters: ConnectionParameters | None) -> None:
        self.pointer: ConnParam | NullPtr = ffi.NULL
        if parameters is not None:
            self.pointer = self._pack(parameters)

    def _pack(self, parameters: ConnectionParameters) -> ConnParam:
        param = ffi.new("struct rdma_conn_param *")
        self._private_data = ffi.from_buffer("char[]", parameters.private_data)
        fill_parameters(param, parameters, self._private_data)
        return param


def length_of(private_data: bytes) -> int:
    """Return the length of private data in bytes.

    Raises:
        ValueError: it is longer than 255 bytes.
    """
    nbytes = len(private_data)
    if nbytes > MAX_PRIVATE_DATA:
        raise ValueError(f"private data of {nbytes} bytes: rdma_cm takes up to {MAX_PRIVATE_DATA}")
    return nbytes


def fill_parameters(
    param: ConnParam, parameters: ConnectionParameters, private_data: Bytes
) -> None:
    """Write `parameters` into a C struct. `private_data` is the C memory for the private data.

    Raises:
        ValueError: the private data is longer than 255 bytes.
        OverflowError: another parameter is out of its range.
    """
    param.private_data_len = length_of(parameters.private_data)
    param.private_data = private_data
    param.responder_resources = parameters.responder_resources
    param.initiator_depth = parameters.initiator_depth
    param.flow_control = parameters.flow_control
    param.retry_count = parameters.retry_count
    param.rnr_retry_count = parameters.rnr_retry_count
    param.srq = parameters.srq
    param.qp_num = parameters.qp_num


@dataclass(frozen=True, slots=True)
class Ece:
    """`struct ibv_ece`: enhanced connection establishment, options of devices of one vendor.

    See rdma_set_local_ece(3) and rdma_get_remote_ece(3).
    """

    vendor_id: int = 0
    options: int = 0
    comp_mask: int = 0

    @classmethod
    def read(cls, ece: IbvEce) -> Ece:
        """Return the value of a C struct."""
        return cls(ece.vendor_id, ece.options, ece.comp_mask)

    def write(self) -> IbvEce:
        """Return a C struct with this value."""
        ece = ffi.new("struct ibv_ece *")
        ece.vendor_id, ece.options, ece.comp_mask = self.vendor_id, self.options, self.comp_mask
        return ece
