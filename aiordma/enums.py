"""Enumerations and flags of librdmacm and libibverbs.

The values are read from the C headers. The members have the C names without their prefix.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag
from typing import Self

from aiordma._native import lib


class OpenIntEnum(IntEnum):
    """A base for enumerations that newer libraries extend: an unknown number becomes a member."""

    def __reduce_ex__(self, proto: object) -> tuple[object, ...]:
        # By value: Python 3.11 copies and pickles a member by its name, and cannot look up the name
        # of an unknown number.
        return type(self), (self._value_,)

    @classmethod
    def _missing_(cls, value: object) -> Self | None:
        if not isinstance(value, int):
            return None
        member = int.__new__(cls, value)
        member._name_ = f"UNKNOWN_{value}"
        member._value_ = value
        return member


class CmEventType(OpenIntEnum):
    """`enum rdma_cm_event_type`: the type of an id's event. See rdma_get_cm_event(3)."""

    ADDR_RESOLVED = lib.RDMA_CM_EVENT_ADDR_RESOLVED
    ADDR_ERROR = lib.RDMA_CM_EVENT_ADDR_ERROR
    ROUTE_RESOLVED = lib.RDMA_CM_EVENT_ROUTE_RESOLVED
    ROUTE_ERROR = lib.RDMA_CM_EVENT_ROUTE_ERROR
    CONNECT_REQUEST = lib.RDMA_CM_EVENT_CONNECT_REQUEST
    CONNECT_RESPONSE = lib.RDMA_CM_EVENT_CONNECT_RESPONSE
    CONNECT_ERROR = lib.RDMA_CM_EVENT_CONNECT_ERROR
    UNREACHABLE = lib.RDMA_CM_EVENT_UNREACHABLE
    REJECTED = lib.RDMA_CM_EVENT_REJECTED
    ESTABLISHED = lib.RDMA_CM_EVENT_ESTABLISHED
    DISCONNECTED = lib.RDMA_CM_EVENT_DISCONNECTED
    DEVICE_REMOVAL = lib.RDMA_CM_EVENT_DEVICE_REMOVAL
    MULTICAST_JOIN = lib.RDMA_CM_EVENT_MULTICAST_JOIN
    MULTICAST_ERROR = lib.RDMA_CM_EVENT_MULTICAST_ERROR
    ADDR_CHANGE = lib.RDMA_CM_EVENT_ADDR_CHANGE
    TIMEWAIT_EXIT = lib.RDMA_CM_EVENT_TIMEWAIT_EXIT
    ADDRINFO_RESOLVED = lib.AIORDMA_CM_EVENT_ADDRINFO_RESOLVED
    ADDRINFO_ERROR = lib.AIORDMA_CM_EVENT_ADDRINFO_ERROR
    USER = lib.AIORDMA_CM_EVENT_USER
    INTERNAL = lib.AIORDMA_CM_EVENT_INTERNAL


class PortSpace(IntEnum):
    """`enum rdma_port_space`: the kind of service an id offers. See rdma_create_id(3)."""

    IPOIB = lib.RDMA_PS_IPOIB
    TCP = lib.RDMA_PS_TCP
    UDP = lib.RDMA_PS_UDP
    IB = lib.RDMA_PS_IB


class IdOption(IntEnum):
    """Options of level `RDMA_OPTION_ID`. See rdma_set_option(3)."""

    TOS = lib.RDMA_OPTION_ID_TOS
    REUSEADDR = lib.RDMA_OPTION_ID_REUSEADDR
    AFONLY = lib.RDMA_OPTION_ID_AFONLY
    ACK_TIMEOUT = lib.RDMA_OPTION_ID_ACK_TIMEOUT


class IbOption(IntEnum):
    """Options of level `RDMA_OPTION_IB`. See rdma_set_option(3)."""

    PATH = lib.RDMA_OPTION_IB_PATH


class AddrInfoFlags(IntFlag):
    """`ai_flags` of `struct rdma_addrinfo`. See rdma_getaddrinfo(3).

    SA and DNS are for rdma_resolve_addrinfo(3) of rdma-core 60 and later.
    """

    PASSIVE = lib.RAI_PASSIVE
    NUMERICHOST = lib.RAI_NUMERICHOST
    NOROUTE = lib.RAI_NOROUTE
    FAMILY = lib.RAI_FAMILY
    SA = lib.AIORDMA_RAI_SA
    DNS = lib.AIORDMA_RAI_DNS


class JoinFlags(IntEnum):
    """`enum rdma_cm_mc_join_flags`: how to join a group. See rdma_join_multicast_ex(3)."""

    FULLMEMBER = lib.RDMA_MC_JOIN_FLAG_FULLMEMBER
    SENDONLY_FULLMEMBER = lib.RDMA_MC_JOIN_FLAG_SENDONLY_FULLMEMBER


class TransportType(OpenIntEnum):
    """`enum ibv_transport_type`: IB covers InfiniBand and RoCE."""

    IB = lib.IBV_TRANSPORT_IB
    IWARP = lib.IBV_TRANSPORT_IWARP


class AccessFlags(IntFlag):
    """`enum ibv_access_flags`: the allowed access to registered memory. See ibv_reg_mr(3)."""

    LOCAL_WRITE = lib.IBV_ACCESS_LOCAL_WRITE
    REMOTE_WRITE = lib.IBV_ACCESS_REMOTE_WRITE
    REMOTE_READ = lib.IBV_ACCESS_REMOTE_READ
    REMOTE_ATOMIC = lib.IBV_ACCESS_REMOTE_ATOMIC
    MW_BIND = lib.IBV_ACCESS_MW_BIND
    ZERO_BASED = lib.IBV_ACCESS_ZERO_BASED
    ON_DEMAND = lib.IBV_ACCESS_ON_DEMAND
    HUGETLB = lib.IBV_ACCESS_HUGETLB
    RELAXED_ORDERING = lib.IBV_ACCESS_RELAXED_ORDERING


class QpType(OpenIntEnum):
    """`enum ibv_qp_type`: the transport service of a queue pair. See ibv_create_qp(3)."""

    RC = lib.IBV_QPT_RC
    UC = lib.IBV_QPT_UC
    UD = lib.IBV_QPT_UD
    RAW_PACKET = lib.IBV_QPT_RAW_PACKET
    XRC_SEND = lib.IBV_QPT_XRC_SEND
    XRC_RECV = lib.IBV_QPT_XRC_RECV


class QpState(OpenIntEnum):
    """`enum ibv_qp_state`: the state of a queue pair. See ibv_modify_qp(3)."""

    RESET = lib.IBV_QPS_RESET
    INIT = lib.IBV_QPS_INIT
    RTR = lib.IBV_QPS_RTR
    RTS = lib.IBV_QPS_RTS
    SQD = lib.IBV_QPS_SQD
    SQE = lib.IBV_QPS_SQE
    ERR = lib.IBV_QPS_ERR


class SrqType(OpenIntEnum):
    """`enum ibv_srq_type`: the type of a shared receive queue. See ibv_create_srq_ex(3)."""

    BASIC = lib.IBV_SRQT_BASIC
    XRC = lib.IBV_SRQT_XRC


class PortState(OpenIntEnum):
    """`enum ibv_port_state`: the link state of a device's port. See ibv_query_port(3)."""

    NOP = lib.IBV_PORT_NOP
    DOWN = lib.IBV_PORT_DOWN
    INIT = lib.IBV_PORT_INIT
    ARMED = lib.IBV_PORT_ARMED
    ACTIVE = lib.IBV_PORT_ACTIVE
    ACTIVE_DEFER = lib.IBV_PORT_ACTIVE_DEFER


class AsyncEventType(OpenIntEnum):
    """`enum ibv_event_type`: the type of a device's event. See ibv_get_async_event(3)."""

    CQ_ERR = lib.IBV_EVENT_CQ_ERR
    QP_FATAL = lib.IBV_EVENT_QP_FATAL
    QP_REQ_ERR = lib.IBV_EVENT_QP_REQ_ERR
    QP_ACCESS_ERR = lib.IBV_EVENT_QP_ACCESS_ERR
    COMM_EST = lib.IBV_EVENT_COMM_EST
    SQ_DRAINED = lib.IBV_EVENT_SQ_DRAINED
    PATH_MIG = lib.IBV_EVENT_PATH_MIG
    PATH_MIG_ERR = lib.IBV_EVENT_PATH_MIG_ERR
    DEVICE_FATAL = lib.IBV_EVENT_DEVICE_FATAL
    PORT_ACTIVE = lib.IBV_EVENT_PORT_ACTIVE
    PORT_ERR = lib.IBV_EVENT_PORT_ERR
    LID_CHANGE = lib.IBV_EVENT_LID_CHANGE
    PKEY_CHANGE = lib.IBV_EVENT_PKEY_CHANGE
    SM_CHANGE = lib.IBV_EVENT_SM_CHANGE
    SRQ_ERR = lib.IBV_EVENT_SRQ_ERR
    SRQ_LIMIT_REACHED = lib.IBV_EVENT_SRQ_LIMIT_REACHED
    QP_LAST_WQE_REACHED = lib.IBV_EVENT_QP_LAST_WQE_REACHED
    CLIENT_REREGISTER = lib.IBV_EVENT_CLIENT_REREGISTER
    GID_CHANGE = lib.IBV_EVENT_GID_CHANGE
    WQ_FATAL = lib.IBV_EVENT_WQ_FATAL


class SendFlags(IntFlag):
    """`enum ibv_send_flags`: the flags of a work request. See ibv_post_send(3)."""

    FENCE = lib.IBV_SEND_FENCE
    SIGNALED = lib.IBV_SEND_SIGNALED
    SOLICITED = lib.IBV_SEND_SOLICITED
    INLINE = lib.IBV_SEND_INLINE


class WrOpcode(OpenIntEnum):
    """`enum ibv_wr_opcode`: the operation of a work request. See ibv_post_send(3)."""

    RDMA_WRITE = lib.IBV_WR_RDMA_WRITE
    RDMA_WRITE_WITH_IMM = lib.IBV_WR_RDMA_WRITE_WITH_IMM
    SEND = lib.IBV_WR_SEND
    SEND_WITH_IMM = lib.IBV_WR_SEND_WITH_IMM
    RDMA_READ = lib.IBV_WR_RDMA_READ
    ATOMIC_CMP_AND_SWP = lib.IBV_WR_ATOMIC_CMP_AND_SWP
    ATOMIC_FETCH_AND_ADD = lib.IBV_WR_ATOMIC_FETCH_AND_ADD
    BIND_MW = lib.IBV_WR_BIND_MW
    SEND_WITH_INV = lib.IBV_WR_SEND_WITH_INV


class WcStatus(OpenIntEnum):
    """`enum ibv_wc_status`: the status of a completed work request. See ibv_poll_cq(3)."""

    SUCCESS = lib.IBV_WC_SUCCESS
    LOC_LEN_ERR = lib.IBV_WC_LOC_LEN_ERR
    LOC_QP_OP_ERR = lib.IBV_WC_LOC_QP_OP_ERR
    LOC_EEC_OP_ERR = lib.IBV_WC_LOC_EEC_OP_ERR
    LOC_PROT_ERR = lib.IBV_WC_LOC_PROT_ERR
    WR_FLUSH_ERR = lib.IBV_WC_WR_FLUSH_ERR
    MW_BIND_ERR = lib.IBV_WC_MW_BIND_ERR
    BAD_RESP_ERR = lib.IBV_WC_BAD_RESP_ERR
    LOC_ACCESS_ERR = lib.IBV_WC_LOC_ACCESS_ERR
    REM_INV_REQ_ERR = lib.IBV_WC_REM_INV_REQ_ERR
    REM_ACCESS_ERR = lib.IBV_WC_REM_ACCESS_ERR
    REM_OP_ERR = lib.IBV_WC_REM_OP_ERR
    RETRY_EXC_ERR = lib.IBV_WC_RETRY_EXC_ERR
    RNR_RETRY_EXC_ERR = lib.IBV_WC_RNR_RETRY_EXC_ERR
    LOC_RDD_VIOL_ERR = lib.IBV_WC_LOC_RDD_VIOL_ERR
    REM_INV_RD_REQ_ERR = lib.IBV_WC_REM_INV_RD_REQ_ERR
    REM_ABORT_ERR = lib.IBV_WC_REM_ABORT_ERR
    INV_EECN_ERR = lib.IBV_WC_INV_EECN_ERR
    INV_EEC_STATE_ERR = lib.IBV_WC_INV_EEC_STATE_ERR
    FATAL_ERR = lib.IBV_WC_FATAL_ERR
    RESP_TIMEOUT_ERR = lib.IBV_WC_RESP_TIMEOUT_ERR
    GENERAL_ERR = lib.IBV_WC_GENERAL_ERR
    TM_ERR = lib.IBV_WC_TM_ERR
    TM_RNDV_INCOMPLETE = lib.IBV_WC_TM_RNDV_INCOMPLETE


class WcOpcode(OpenIntEnum):
    """`enum ibv_wc_opcode`: the operation that completed. See ibv_poll_cq(3)."""

    SEND = lib.IBV_WC_SEND
    RDMA_WRITE = lib.IBV_WC_RDMA_WRITE
    RDMA_READ = lib.IBV_WC_RDMA_READ
    COMP_SWAP = lib.IBV_WC_COMP_SWAP
    FETCH_ADD = lib.IBV_WC_FETCH_ADD
    BIND_MW = lib.IBV_WC_BIND_MW
    LOCAL_INV = lib.IBV_WC_LOCAL_INV
    RECV = lib.IBV_WC_RECV
    RECV_RDMA_WITH_IMM = lib.IBV_WC_RECV_RDMA_WITH_IMM


class WcFlags(IntFlag):
    """`enum ibv_wc_flags`: the valid optional fields of a completion. See ibv_poll_cq(3)."""

    GRH = lib.IBV_WC_GRH
    WITH_IMM = lib.IBV_WC_WITH_IMM
    WITH_INV = lib.IBV_WC_WITH_INV
    IP_CSUM_OK = lib.IBV_WC_IP_CSUM_OK
