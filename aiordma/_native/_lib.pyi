"""Types of the compiled module made by cffi, which has no annotations.

A C struct is a class here, and a pointer to it has the same class: cffi reads fields through both.
"""

from collections.abc import Callable, Iterator
from typing import Final, Literal, overload

from typing_extensions import Buffer

class CData: ...
class Sockaddr(CData): ...
class VoidPtr(CData): ...

class Integer(CData):
    def __int__(self) -> int: ...

class IbvPd(CData): ...
class IbvSrq(CData): ...
class IbvAh(CData): ...
class IbvXrcd(CData): ...

class Gid(CData):
    raw: Bytes

class GlobalRoute(CData):
    dgid: Gid
    flow_label: int
    sgid_index: int
    hop_limit: int
    traffic_class: int

class IbvAhAttr(CData):
    grh: Final[GlobalRoute]
    dlid: int
    sl: int
    src_path_bits: int
    static_rate: int
    is_global: int
    port_num: int

class IbvPortAttr(CData):
    state: Final[int]
    max_mtu: Final[int]
    active_mtu: Final[int]
    max_msg_sz: Final[int]
    lid: Final[int]
    link_layer: Final[int]

class IbvEce(CData):
    vendor_id: int
    options: int
    comp_mask: int

class SaPathRec(CData):
    dgid: Final[Gid]
    sgid: Final[Gid]
    dlid: Final[int]
    slid: Final[int]
    raw_traffic: Final[int]
    flow_label: Final[int]
    hop_limit: Final[int]
    traffic_class: Final[int]
    reversible: Final[int]
    numb_path: Final[int]
    pkey: Final[int]
    sl: Final[int]
    mtu_selector: Final[int]
    mtu: Final[int]
    rate_selector: Final[int]
    rate: Final[int]
    packet_life_time_selector: Final[int]
    packet_life_time: Final[int]
    preference: Final[int]

class SaPathRecs(CData):
    def __getitem__(self, index: int) -> SaPathRec: ...

class IbAddr(CData):
    sgid: Final[Gid]
    dgid: Final[Gid]
    pkey: Final[int]

class AddrUnion(CData):
    ibaddr: Final[IbAddr]

class RouteAddr(CData):
    addr: Final[AddrUnion]

class RouteAddrPtr(CData):
    def __getitem__(self, index: int) -> RouteAddr: ...

class CmRoute(CData):
    addr: Final[RouteAddr]
    path_rec: Final[SaPathRecs]
    num_paths: Final[int]

class DeviceList(CData):
    def __getitem__(self, index: int) -> IbvContext: ...

class EventChannelPtr(CData):
    fd: int

class IbvDevice(CData):
    transport_type: Final[int]

class IbvContext(CData):
    device: Final[IbvDevice]
    cmd_fd: Final[int]
    async_fd: Final[int]

class IbvDeviceAttr(CData):
    vendor_id: Final[int]
    max_qp: Final[int]
    max_qp_wr: Final[int]
    max_sge: Final[int]
    max_sge_rd: Final[int]
    max_cq: Final[int]
    max_cqe: Final[int]
    max_mr: Final[int]
    max_mr_size: Final[int]
    max_qp_rd_atom: Final[int]
    max_qp_init_rd_atom: Final[int]
    device_cap_flags: Final[int]
    atomic_cap: Final[int]
    max_srq: Final[int]
    max_srq_wr: Final[int]
    max_srq_sge: Final[int]
    max_ah: Final[int]
    max_mcast_grp: Final[int]
    phys_port_cnt: Final[int]

class IbvMw(CData):
    rkey: Final[int]

class IbvMr(CData):
    addr: Final[VoidPtr]
    length: Final[int]
    lkey: Final[int]
    rkey: Final[int]

class IbvCompChannel(CData):
    fd: int

class IbvCq(CData):
    cq_context: VoidPtr
    cqe: Final[int]

class IbvQp(CData):
    qp_context: VoidPtr
    qp_num: int

class IbvQpCap(CData):
    max_send_wr: int
    max_recv_wr: int
    max_send_sge: int
    max_recv_sge: int
    max_inline_data: int

class IbvQpInitAttr(CData):
    def __getitem__(self, index: int) -> IbvQpInitAttr: ...

    qp_context: VoidPtr
    send_cq: IbvCq
    recv_cq: IbvCq
    srq: IbvSrq
    cap: Final[IbvQpCap]
    qp_type: int
    sq_sig_all: int

class IbvQpInitAttrEx(IbvQpInitAttr):
    comp_mask: int
    pd: IbvPd
    xrcd: IbvXrcd
    create_flags: int

class IbvQpAttr(CData):
    qp_state: int
    path_mtu: int
    qkey: int
    rq_psn: int
    sq_psn: int
    dest_qp_num: int
    qp_access_flags: int
    ah_attr: Final[IbvAhAttr]
    pkey_index: int
    max_rd_atomic: int
    max_dest_rd_atomic: int
    min_rnr_timer: int
    port_num: int
    timeout: int
    retry_cnt: int
    rnr_retry: int

class IbvSrqAttr(CData):
    max_wr: int
    max_sge: int
    srq_limit: int

class IbvSrqInitAttr(CData):
    srq_context: VoidPtr
    attr: Final[IbvSrqAttr]

class IbvSrqInitAttrEx(IbvSrqInitAttr):
    comp_mask: int
    srq_type: int
    pd: IbvPd
    xrcd: IbvXrcd
    cq: IbvCq

class IbvSge(CData):
    addr: int
    length: int
    lkey: int

class SgeArray(CData):
    def __getitem__(self, index: int) -> IbvSge: ...

class IbvWc(CData):
    wr_id: Final[int]
    status: Final[int]
    opcode: Final[int]
    vendor_err: Final[int]
    byte_len: Final[int]
    imm_data: Final[int]
    qp_num: int
    src_qp: int
    wc_flags: int
    slid: int
    sl: int
    dlid_path_bits: int

class CmIdPtr(CData):
    verbs: Final[IbvContext]
    channel: Final[EventChannelPtr]
    context: Final[VoidPtr]
    qp: Final[IbvQp]
    route: Final[CmRoute]
    ps: Final[int]
    port_num: Final[int]
    event: Final[CmEventPtr]
    send_cq_channel: Final[IbvCompChannel]
    send_cq: Final[IbvCq]
    recv_cq_channel: Final[IbvCompChannel]
    recv_cq: Final[IbvCq]
    srq: IbvSrq
    pd: Final[IbvPd]
    qp_type: Final[int]

class CmEventPtr(CData):
    id: Final[CmIdPtr]

class CmEventOut(CData):
    def __getitem__(self, index: int) -> CmEventPtr: ...

class AddrInfoPtr(CData):
    ai_flags: int
    ai_family: int
    ai_qp_type: int
    ai_port_space: int
    ai_src_len: int
    ai_dst_len: int
    ai_src_addr: Sockaddr
    ai_dst_addr: Sockaddr
    ai_src_canonname: Bytes
    ai_dst_canonname: Bytes
    ai_route_len: int
    ai_route: Bytes
    ai_connect_len: int
    ai_connect: Bytes
    ai_next: AddrInfoPtr

class AddrInfoOut(CData):
    def __getitem__(self, index: int) -> AddrInfoPtr: ...

class JoinAttr(CData):
    comp_mask: int
    join_flags: int
    addr: Sockaddr

class CmIdOut(CData):
    def __getitem__(self, index: int) -> CmIdPtr: ...

class IntOut(CData):
    def __getitem__(self, index: int) -> int: ...

class ConnParam(CData):
    private_data: Bytes
    private_data_len: int
    responder_resources: int
    initiator_depth: int
    flow_control: int
    retry_count: int
    rnr_retry_count: int
    srq: int
    qp_num: int

class Bytes(CData):
    def __len__(self) -> int: ...
    def __enter__(self) -> Bytes: ...
    def __exit__(self, *exc_info: object) -> None: ...

class CmEventCopy(CData):
    id: Final[int]
    listen_id: Final[int]
    event: Final[int]
    parameters: Final[int]
    status: Final[int]
    error: Final[int]
    arg: Final[int]
    context: Final[int]
    ah_attr: Final[IbvAhAttr]
    qp_num: int
    qkey: Final[int]
    responder_resources: Final[int]
    initiator_depth: Final[int]
    flow_control: Final[int]
    retry_count: Final[int]
    rnr_retry_count: Final[int]
    srq: Final[int]
    private_data_len: Final[int]
    private_data: Final[Bytes]

class CmEventArray(CData):
    def __getitem__(self, index: slice) -> CmEventArray: ...
    def __iter__(self) -> Iterator[CmEventCopy]: ...

class AsyncEventCopy(CData):
    element: Final[int]
    port_num: Final[int]
    event_type: Final[int]

class AsyncEventArray(CData):
    def __getitem__(self, index: int) -> AsyncEventCopy: ...

class SendWr(CData): ...
class LinkArray(CData): ...

class RequestChainPtr(CData):
    """`struct aiordma_chain`."""

    count: int
    capacity: int
    links: LinkArray

class QpCell(CData):
    """`struct ibv_qp *[1]`"""

    def __getitem__(self, index: int) -> IbvQp: ...
    def __setitem__(self, index: int, value: IbvQp | NullPtr) -> None: ...

class SrqCell(CData):
    """`struct ibv_srq *[1]`"""

    def __getitem__(self, index: int) -> IbvSrq: ...
    def __setitem__(self, index: int, value: IbvSrq | NullPtr) -> None: ...

class WcArray(CData):
    def __getitem__(self, index: int) -> IbvWc: ...

class CqArray(CData):
    def __getitem__(self, index: int) -> IbvCq: ...

class EndedCallsPtr(CData): ...

class IdCallsPtr(CData):
    calls: int
    pd: IbvPd
    init: IbvQpInitAttr
    cell: QpCell
    first_wr_id: int
    address: int
    lkey: int
    slot_size: int
    slots: int
    timeout_ms: int
    parameters: Final[ConnParam]
    private_data: Final[Bytes]
    qp: IbvQp
    failed: Final[int]
    error: Final[int]
    is_cancelled: int
    next: Final[IdCallsPtr]

class NullPtr(
    Sockaddr,
    VoidPtr,
    IbvPd,
    IbvSrq,
    IbvAh,
    IbvXrcd,
    CmEventPtr,
    AddrInfoPtr,
    DeviceList,
    EventChannelPtr,
    IbvContext,
    IbvMr,
    IbvCompChannel,
    IbvCq,
    IbvQp,
    CmIdPtr,
    Bytes,
):
    """NULL, which can be used as a pointer of each of these types."""

class Lib:
    AIORDMA_NO_PARAMETERS: Final[int]
    AIORDMA_CONNECTION_PARAMETERS: Final[int]
    AIORDMA_CREATE_QP: Final[int]
    AIORDMA_POST_RECV: Final[int]
    AIORDMA_RESOLVE_ROUTE: Final[int]
    AIORDMA_ACCEPT: Final[int]
    AIORDMA_DISCONNECT: Final[int]
    AIORDMA_DESTROY_ID: Final[int]
    AIORDMA_DESTROY_QP: Final[int]
    AIORDMA_CONNECT: Final[int]
    RDMA_CM_EVENT_ADDR_RESOLVED: Final[int]
    RDMA_CM_EVENT_ADDR_ERROR: Final[int]
    RDMA_CM_EVENT_ROUTE_RESOLVED: Final[int]
    RDMA_CM_EVENT_ROUTE_ERROR: Final[int]
    RDMA_CM_EVENT_CONNECT_REQUEST: Final[int]
    RDMA_CM_EVENT_CONNECT_RESPONSE: Final[int]
    RDMA_CM_EVENT_CONNECT_ERROR: Final[int]
    RDMA_CM_EVENT_UNREACHABLE: Final[int]
    RDMA_CM_EVENT_REJECTED: Final[int]
    RDMA_CM_EVENT_ESTABLISHED: Final[int]
    RDMA_CM_EVENT_DISCONNECTED: Final[int]
    RDMA_CM_EVENT_DEVICE_REMOVAL: Final[int]
    RDMA_CM_EVENT_MULTICAST_JOIN: Final[int]
    RDMA_CM_EVENT_MULTICAST_ERROR: Final[int]
    RDMA_CM_EVENT_ADDR_CHANGE: Final[int]
    RDMA_CM_EVENT_TIMEWAIT_EXIT: Final[int]
    AIORDMA_CM_EVENT_ADDRINFO_RESOLVED: Final[int]
    AIORDMA_CM_EVENT_ADDRINFO_ERROR: Final[int]
    AIORDMA_CM_EVENT_USER: Final[int]
    AIORDMA_CM_EVENT_INTERNAL: Final[int]
    RDMA_PS_IPOIB: Final[int]
    RDMA_PS_TCP: Final[int]
    RDMA_PS_UDP: Final[int]
    RDMA_PS_IB: Final[int]
    RDMA_IB_IP_PS_MASK: Final[int]
    RDMA_IB_IP_PORT_MASK: Final[int]
    RDMA_IB_IP_PS_TCP: Final[int]
    RDMA_IB_IP_PS_UDP: Final[int]
    RDMA_IB_PS_IB: Final[int]
    RDMA_UDP_QKEY: Final[int]
    RDMA_MAX_RESP_RES: Final[int]
    RDMA_MAX_INIT_DEPTH: Final[int]
    RDMA_OPTION_ID: Final[int]
    RDMA_OPTION_IB: Final[int]
    RDMA_OPTION_ID_TOS: Final[int]
    RDMA_OPTION_ID_REUSEADDR: Final[int]
    RDMA_OPTION_ID_AFONLY: Final[int]
    RDMA_OPTION_ID_ACK_TIMEOUT: Final[int]
    RDMA_OPTION_IB_PATH: Final[int]
    RAI_PASSIVE: Final[int]
    RAI_NUMERICHOST: Final[int]
    RAI_NOROUTE: Final[int]
    RAI_FAMILY: Final[int]
    AIORDMA_RAI_SA: Final[int]
    AIORDMA_RAI_DNS: Final[int]
    RDMA_CM_JOIN_MC_ATTR_ADDRESS: Final[int]
    RDMA_CM_JOIN_MC_ATTR_JOIN_FLAGS: Final[int]
    RDMA_CM_JOIN_MC_ATTR_RESERVED: Final[int]
    RDMA_MC_JOIN_FLAG_FULLMEMBER: Final[int]
    RDMA_MC_JOIN_FLAG_SENDONLY_FULLMEMBER: Final[int]
    RDMA_MC_JOIN_FLAG_RESERVED: Final[int]
    IBV_TRANSPORT_IB: Final[int]
    IBV_TRANSPORT_IWARP: Final[int]
    IBV_ACCESS_LOCAL_WRITE: Final[int]
    IBV_ACCESS_REMOTE_WRITE: Final[int]
    IBV_ACCESS_REMOTE_READ: Final[int]
    IBV_ACCESS_REMOTE_ATOMIC: Final[int]
    IBV_ACCESS_MW_BIND: Final[int]
    IBV_ACCESS_ZERO_BASED: Final[int]
    IBV_ACCESS_ON_DEMAND: Final[int]
    IBV_ACCESS_HUGETLB: Final[int]
    IBV_ACCESS_RELAXED_ORDERING: Final[int]
    IBV_QPT_RC: Final[int]
    IBV_QPT_UC: Final[int]
    IBV_QPT_UD: Final[int]
    IBV_QPT_RAW_PACKET: Final[int]
    IBV_QPT_XRC_SEND: Final[int]
    IBV_QPT_XRC_RECV: Final[int]
    IBV_QP_INIT_ATTR_PD: Final[int]
    IBV_QP_INIT_ATTR_XRCD: Final[int]
    IBV_QP_INIT_ATTR_CREATE_FLAGS: Final[int]
    IBV_QP_CREATE_BLOCK_SELF_MCAST_LB: Final[int]
    IBV_SRQT_BASIC: Final[int]
    IBV_SRQT_XRC: Final[int]
    IBV_SRQ_INIT_ATTR_TYPE: Final[int]
    IBV_SRQ_INIT_ATTR_PD: Final[int]
    IBV_SRQ_INIT_ATTR_XRCD: Final[int]
    IBV_SRQ_INIT_ATTR_CQ: Final[int]
    IBV_SRQ_LIMIT: Final[int]
    IBV_MW_TYPE_2: Final[int]
    IBV_DEVICE_MEM_WINDOW_TYPE_2B: Final[int]
    IBV_ODP_SUPPORT: Final[int]
    IBV_QPS_RESET: Final[int]
    IBV_QPS_INIT: Final[int]
    IBV_QPS_RTR: Final[int]
    IBV_QPS_RTS: Final[int]
    IBV_QPS_SQD: Final[int]
    IBV_QPS_SQE: Final[int]
    IBV_QPS_ERR: Final[int]
    IBV_QP_STATE: Final[int]
    IBV_QP_RETRY_CNT: Final[int]
    IBV_PORT_NOP: Final[int]
    IBV_PORT_DOWN: Final[int]
    IBV_PORT_INIT: Final[int]
    IBV_PORT_ARMED: Final[int]
    IBV_PORT_ACTIVE: Final[int]
    IBV_PORT_ACTIVE_DEFER: Final[int]
    IBV_WR_RDMA_WRITE: Final[int]
    IBV_WR_RDMA_WRITE_WITH_IMM: Final[int]
    IBV_WR_SEND: Final[int]
    IBV_WR_SEND_WITH_IMM: Final[int]
    IBV_WR_RDMA_READ: Final[int]
    IBV_WR_ATOMIC_CMP_AND_SWP: Final[int]
    IBV_WR_ATOMIC_FETCH_AND_ADD: Final[int]
    IBV_WR_BIND_MW: Final[int]
    IBV_WR_SEND_WITH_INV: Final[int]
    IBV_SEND_FENCE: Final[int]
    IBV_SEND_SIGNALED: Final[int]
    IBV_SEND_SOLICITED: Final[int]
    IBV_SEND_INLINE: Final[int]
    IBV_WC_SUCCESS: Final[int]
    IBV_WC_LOC_LEN_ERR: Final[int]
    IBV_WC_LOC_QP_OP_ERR: Final[int]
    IBV_WC_LOC_EEC_OP_ERR: Final[int]
    IBV_WC_LOC_PROT_ERR: Final[int]
    IBV_WC_WR_FLUSH_ERR: Final[int]
    IBV_WC_MW_BIND_ERR: Final[int]
    IBV_WC_BAD_RESP_ERR: Final[int]
    IBV_WC_LOC_ACCESS_ERR: Final[int]
    IBV_WC_REM_INV_REQ_ERR: Final[int]
    IBV_WC_REM_ACCESS_ERR: Final[int]
    IBV_WC_REM_OP_ERR: Final[int]
    IBV_WC_RETRY_EXC_ERR: Final[int]
    IBV_WC_RNR_RETRY_EXC_ERR: Final[int]
    IBV_WC_LOC_RDD_VIOL_ERR: Final[int]
    IBV_WC_REM_INV_RD_REQ_ERR: Final[int]
    IBV_WC_REM_ABORT_ERR: Final[int]
    IBV_WC_INV_EECN_ERR: Final[int]
    IBV_WC_INV_EEC_STATE_ERR: Final[int]
    IBV_WC_FATAL_ERR: Final[int]
    IBV_WC_RESP_TIMEOUT_ERR: Final[int]
    IBV_WC_GENERAL_ERR: Final[int]
    IBV_WC_TM_ERR: Final[int]
    IBV_WC_TM_RNDV_INCOMPLETE: Final[int]
    IBV_WC_SEND: Final[int]
    IBV_WC_RDMA_WRITE: Final[int]
    IBV_WC_RDMA_READ: Final[int]
    IBV_WC_COMP_SWAP: Final[int]
    IBV_WC_FETCH_ADD: Final[int]
    IBV_WC_BIND_MW: Final[int]
    IBV_WC_LOCAL_INV: Final[int]
    IBV_WC_RECV: Final[int]
    IBV_WC_RECV_RDMA_WITH_IMM: Final[int]
    IBV_WC_GRH: Final[int]
    IBV_WC_WITH_IMM: Final[int]
    IBV_WC_WITH_INV: Final[int]
    IBV_WC_IP_CSUM_OK: Final[int]
    IBV_EVENT_CQ_ERR: Final[int]
    IBV_EVENT_QP_FATAL: Final[int]
    IBV_EVENT_QP_REQ_ERR: Final[int]
    IBV_EVENT_QP_ACCESS_ERR: Final[int]
    IBV_EVENT_COMM_EST: Final[int]
    IBV_EVENT_SQ_DRAINED: Final[int]
    IBV_EVENT_PATH_MIG: Final[int]
    IBV_EVENT_PATH_MIG_ERR: Final[int]
    IBV_EVENT_DEVICE_FATAL: Final[int]
    IBV_EVENT_PORT_ACTIVE: Final[int]
    IBV_EVENT_PORT_ERR: Final[int]
    IBV_EVENT_LID_CHANGE: Final[int]
    IBV_EVENT_PKEY_CHANGE: Final[int]
    IBV_EVENT_SM_CHANGE: Final[int]
    IBV_EVENT_SRQ_ERR: Final[int]
    IBV_EVENT_SRQ_LIMIT_REACHED: Final[int]
    IBV_EVENT_QP_LAST_WQE_REACHED: Final[int]
    IBV_EVENT_CLIENT_REREGISTER: Final[int]
    IBV_EVENT_GID_CHANGE: Final[int]
    IBV_EVENT_WQ_FATAL: Final[int]

    def rdma_create_event_channel(self) -> EventChannelPtr: ...
    def rdma_destroy_event_channel(self, channel: EventChannelPtr) -> None: ...
    def rdma_create_id(
        self, channel: EventChannelPtr, id: CmIdOut, context: VoidPtr, ps: int
    ) -> int: ...
    def rdma_create_ep(
        self, id: CmIdOut, res: AddrInfoPtr, pd: IbvPd, attr: IbvQpInitAttr | NullPtr
    ) -> int: ...
    def rdma_destroy_ep(self, id: CmIdPtr) -> None: ...
    def rdma_destroy_id(self, id: CmIdPtr) -> int: ...
    def rdma_bind_addr(self, id: CmIdPtr, addr: Sockaddr) -> int: ...
    def rdma_resolve_addr(
        self, id: CmIdPtr, src: Sockaddr, dst: Sockaddr, timeout_ms: int
    ) -> int: ...
    def rdma_resolve_route(self, id: CmIdPtr, timeout_ms: int) -> int: ...
    def rdma_create_qp(self, id: CmIdPtr, pd: IbvPd, attr: IbvQpInitAttr) -> int: ...
    def rdma_create_qp_ex(self, id: CmIdPtr, attr: IbvQpInitAttrEx) -> int: ...
    def rdma_destroy_qp(self, id: CmIdPtr) -> None: ...
    def rdma_connect(self, id: CmIdPtr, param: ConnParam | NullPtr) -> int: ...
    def rdma_establish(self, id: CmIdPtr) -> int: ...
    def rdma_listen(self, id: CmIdPtr, backlog: int) -> int: ...
    def rdma_get_request(self, listen: CmIdPtr, id: CmIdOut) -> int: ...
    def rdma_accept(self, id: CmIdPtr, param: ConnParam | NullPtr) -> int: ...
    def rdma_reject(self, id: CmIdPtr, private_data: Bytes, private_data_len: int) -> int: ...
    def rdma_reject_ece(self, id: CmIdPtr, private_data: Bytes, private_data_len: int) -> int: ...
    def rdma_notify(self, id: CmIdPtr, event: int) -> int: ...
    def rdma_disconnect(self, id: CmIdPtr) -> int: ...
    def rdma_join_multicast(self, id: CmIdPtr, addr: Sockaddr, context: VoidPtr) -> int: ...
    def rdma_join_multicast_ex(self, id: CmIdPtr, attr: JoinAttr, context: VoidPtr) -> int: ...
    def rdma_leave_multicast(self, id: CmIdPtr, addr: Sockaddr) -> int: ...
    def rdma_get_cm_event(self, channel: EventChannelPtr, event: CmEventOut) -> int: ...
    def rdma_ack_cm_event(self, event: CmEventPtr) -> int: ...
    def rdma_get_src_port(self, id: CmIdPtr) -> int: ...
    def rdma_get_dst_port(self, id: CmIdPtr) -> int: ...
    def rdma_event_str(self, event: int) -> Bytes: ...
    def rdma_migrate_id(self, id: CmIdPtr, channel: EventChannelPtr) -> int: ...
    def rdma_getaddrinfo(
        self, node: Bytes, service: Bytes, hints: AddrInfoPtr, res: AddrInfoOut
    ) -> int: ...
    def rdma_freeaddrinfo(self, res: AddrInfoPtr) -> None: ...
    def rdma_init_qp_attr(self, id: CmIdPtr, attr: IbvQpAttr, mask: IntOut) -> int: ...
    def rdma_set_local_ece(self, id: CmIdPtr, ece: IbvEce) -> int: ...
    def rdma_get_remote_ece(self, id: CmIdPtr, ece: IbvEce) -> int: ...
    def rdma_query_addrinfo(self, id: CmIdPtr, info: AddrInfoOut) -> int: ...
    def rdma_write_cm_event(self, id: CmIdPtr, event: int, status: int, arg: int) -> int: ...
    def gai_strerror(self, code: int) -> Bytes: ...
    def rdma_create_srq(self, id: CmIdPtr, pd: IbvPd, attr: IbvSrqInitAttr) -> int: ...
    def rdma_create_srq_ex(self, id: CmIdPtr, attr: IbvSrqInitAttrEx) -> int: ...
    def rdma_destroy_srq(self, id: CmIdPtr) -> None: ...
    def rdma_reg_msgs(self, id: CmIdPtr, addr: Bytes, length: int) -> IbvMr: ...
    def rdma_reg_read(self, id: CmIdPtr, addr: Bytes, length: int) -> IbvMr: ...
    def rdma_reg_write(self, id: CmIdPtr, addr: Bytes, length: int) -> IbvMr: ...
    def rdma_dereg_mr(self, mr: IbvMr) -> int: ...
    def rdma_post_recvv(self, id: CmIdPtr, context: VoidPtr, sgl: SgeArray, nsge: int) -> int: ...
    def rdma_post_sendv(
        self, id: CmIdPtr, context: VoidPtr, sgl: SgeArray, nsge: int, flags: int
    ) -> int: ...
    def rdma_post_readv(
        self,
        id: CmIdPtr,
        context: VoidPtr,
        sgl: SgeArray,
        nsge: int,
        flags: int,
        remote_addr: int,
        rkey: int,
    ) -> int: ...
    def rdma_post_writev(
        self,
        id: CmIdPtr,
        context: VoidPtr,
        sgl: SgeArray,
        nsge: int,
        flags: int,
        remote_addr: int,
        rkey: int,
    ) -> int: ...
    def rdma_post_recv(
        self, id: CmIdPtr, context: VoidPtr, addr: VoidPtr, length: int, mr: IbvMr
    ) -> int: ...
    def rdma_post_send(
        self, id: CmIdPtr, context: VoidPtr, addr: VoidPtr, length: int, mr: IbvMr, flags: int
    ) -> int: ...
    def rdma_post_read(
        self,
        id: CmIdPtr,
        context: VoidPtr,
        addr: VoidPtr,
        length: int,
        mr: IbvMr,
        flags: int,
        remote_addr: int,
        rkey: int,
    ) -> int: ...
    def rdma_post_write(
        self,
        id: CmIdPtr,
        context: VoidPtr,
        addr: VoidPtr,
        length: int,
        mr: IbvMr,
        flags: int,
        remote_addr: int,
        rkey: int,
    ) -> int: ...
    def rdma_post_ud_send(
        self,
        id: CmIdPtr,
        context: VoidPtr,
        addr: VoidPtr,
        length: int,
        mr: IbvMr,
        flags: int,
        ah: IbvAh,
        remote_qpn: int,
    ) -> int: ...
    def rdma_get_send_comp(self, id: CmIdPtr, wc: IbvWc) -> int: ...
    def rdma_get_recv_comp(self, id: CmIdPtr, wc: IbvWc) -> int: ...
    def rdma_set_option(
        self, id: CmIdPtr, level: int, optname: int, optval: Bytes, optlen: int
    ) -> int: ...
    def rdma_get_local_addr(self, id: CmIdPtr) -> Sockaddr: ...
    def rdma_get_peer_addr(self, id: CmIdPtr) -> Sockaddr: ...
    def rdma_get_devices(self, num_devices: IntOut) -> DeviceList: ...
    def rdma_free_devices(self, list: DeviceList) -> None: ...
    def ibv_get_device_name(self, device: IbvDevice) -> Bytes: ...
    def ibv_wc_status_str(self, status: int) -> Bytes: ...
    def ibv_query_device(self, context: IbvContext, attr: IbvDeviceAttr) -> int: ...
    def ibv_alloc_pd(self, context: IbvContext) -> IbvPd: ...
    def ibv_dealloc_pd(self, pd: IbvPd) -> int: ...
    def ibv_reg_mr(self, pd: IbvPd, addr: Bytes, length: int, access: int) -> IbvMr: ...
    def ibv_reg_dmabuf_mr(
        self, pd: IbvPd, offset: int, length: int, iova: int, fd: int, access: int
    ) -> IbvMr: ...
    def ibv_alloc_mw(self, pd: IbvPd, type: int) -> IbvMw | NullPtr: ...
    def ibv_dealloc_mw(self, mw: IbvMw | NullPtr) -> int: ...
    def ibv_inc_rkey(self, rkey: int) -> int: ...
    def ibv_dereg_mr(self, mr: IbvMr) -> int: ...
    def ibv_create_comp_channel(self, context: IbvContext) -> IbvCompChannel: ...
    def ibv_destroy_comp_channel(self, channel: IbvCompChannel) -> int: ...
    def ibv_create_cq(
        self,
        context: IbvContext,
        cqe: int,
        cq_context: VoidPtr,
        channel: IbvCompChannel,
        comp_vector: int,
    ) -> IbvCq: ...
    def ibv_destroy_cq(self, cq: IbvCq) -> int: ...
    def ibv_req_notify_cq(self, cq: IbvCq, solicited_only: int) -> int: ...
    def ibv_poll_cq(self, cq: IbvCq, num_entries: int, wc: WcArray | IbvWc) -> int: ...
    def ibv_create_qp(self, pd: IbvPd, attr: IbvQpInitAttr) -> IbvQp: ...
    def ibv_modify_qp(self, qp: IbvQp, attr: IbvQpAttr, mask: int) -> int: ...
    def ibv_destroy_qp(self, qp: IbvQp) -> int: ...
    def ibv_create_srq(self, pd: IbvPd, attr: IbvSrqInitAttr) -> IbvSrq: ...
    def ibv_modify_srq(self, srq: IbvSrq, attr: IbvSrqAttr, mask: int) -> int: ...
    def ibv_query_srq(self, srq: IbvSrq, attr: IbvSrqAttr) -> int: ...
    def ibv_destroy_srq(self, srq: IbvSrq) -> int: ...
    def ibv_get_srq_num(self, srq: IbvSrq, srq_num: IntOut) -> int: ...
    def ibv_create_ah(self, pd: IbvPd, attr: IbvAhAttr) -> IbvAh: ...
    def ibv_destroy_ah(self, ah: IbvAh) -> int: ...
    def ibv_attach_mcast(self, qp: IbvQp, gid: Gid, lid: int) -> int: ...
    def ibv_detach_mcast(self, qp: IbvQp, gid: Gid, lid: int) -> int: ...
    def ibv_query_gid(self, context: IbvContext, port_num: int, index: int, gid: Gid) -> int: ...
    def ibv_event_type_str(self, event: int) -> Bytes: ...
    def aiordma_new_ended_calls(self) -> EndedCallsPtr: ...
    def aiordma_ended_calls_fd(self, ended: EndedCallsPtr) -> int: ...
    def aiordma_take_ended_calls(self, ended: EndedCallsPtr) -> IdCallsPtr: ...
    def aiordma_free_ended_calls(self, ended: EndedCallsPtr) -> None: ...
    def aiordma_new_id_calls(self, id: CmIdPtr) -> IdCallsPtr: ...
    def aiordma_free_id_calls(self, calls: IdCallsPtr) -> None: ...
    def aiordma_make_id_calls(self, calls: IdCallsPtr) -> None: ...
    def aiordma_submit_id_calls(self, calls: IdCallsPtr, ended: EndedCallsPtr) -> None: ...
    def aiordma_own_id_calls(self, calls: IdCallsPtr, ended: EndedCallsPtr) -> None: ...
    def aiordma_run_id_calls(self, calls: IdCallsPtr) -> None: ...
    def aiordma_destroy_id(self, id: CmIdPtr) -> int: ...
    def aiordma_get_cm_events(
        self, channel: EventChannelPtr, events: CmEventArray, capacity: int
    ) -> int: ...
    def aiordma_take_event(self, id: CmIdPtr, out: CmEventCopy) -> int: ...
    def aiordma_resolve_addrinfo(
        self, id: CmIdPtr, node: Bytes, service: Bytes, hints: AddrInfoPtr
    ) -> int: ...
    def aiordma_set_nonblocking(self, fd: int) -> int: ...
    def aiordma_comp_events(
        self, channel: IbvCompChannel, ready: CqArray, capacity: int
    ) -> int: ...
    def aiordma_comp_event(self, channel: IbvCompChannel, cq: NullPtr) -> int: ...
    def aiordma_async_events(
        self, context: IbvContext, events: AsyncEventArray, capacity: int
    ) -> int: ...
    def aiordma_odp_caps(self, context: IbvContext) -> int: ...
    def aiordma_query_port(self, context: IbvContext, port_num: int, attr: IbvPortAttr) -> int: ...
    def aiordma_ah_from_wc(
        self, context: IbvContext, port_num: int, wc: IbvWc, grh: Bytes, attr: IbvAhAttr
    ) -> int: ...
    def aiordma_await_posts(self) -> None: ...
    def aiordma_destroy_qp(self, qp: IbvQp) -> int: ...
    def aiordma_post_send(self, qp: IbvQp, first: SendWr) -> int: ...
    def aiordma_post_all(self, cell: QpCell, first: SendWr) -> int: ...
    def aiordma_post_one(
        self,
        cell: QpCell,
        wr_id: int,
        opcode: int,
        addr: int,
        length: int,
        lkey: int,
        flags: int,
        imm: int,
        remote_addr: int,
        rkey: int,
    ) -> int: ...
    def aiordma_post_list(
        self,
        cell: QpCell,
        wr_id: int,
        opcode: int,
        segments: SgeArray,
        count: int,
        flags: int,
        imm: int,
        remote_addr: int,
        rkey: int,
    ) -> int: ...
    def aiordma_add_link(
        self,
        chain: RequestChainPtr,
        wr_id: int,
        opcode: int,
        addr: int,
        length: int,
        lkey: int,
        flags: int,
        imm: int,
        remote_addr: int,
        rkey: int,
    ) -> None: ...
    def aiordma_post_chain(self, cell: QpCell, chain: RequestChainPtr) -> int: ...
    def aiordma_post_send_copy(
        self,
        cell: QpCell,
        wr_id: int,
        addr: int,
        data: Bytes,
        length: int,
        lkey: int,
        flags: int,
        imm: int,
    ) -> int: ...
    def aiordma_post_send_inline(
        self, cell: QpCell, wr_id: int, data: Bytes, length: int, flags: int, imm: int
    ) -> int: ...
    def aiordma_post_write_inline(
        self,
        cell: QpCell,
        wr_id: int,
        data: Bytes,
        length: int,
        flags: int,
        imm: int,
        remote_addr: int,
        rkey: int,
    ) -> int: ...
    def aiordma_post_write_copy(
        self,
        cell: QpCell,
        wr_id: int,
        addr: int,
        data: Bytes,
        length: int,
        lkey: int,
        flags: int,
        imm: int,
        remote_addr: int,
        rkey: int,
    ) -> int: ...
    def aiordma_post_atomic(
        self,
        cell: QpCell,
        wr_id: int,
        opcode: int,
        addr: int,
        lkey: int,
        flags: int,
        remote_addr: int,
        rkey: int,
        compare_add: int,
        swap: int,
    ) -> int: ...
    def aiordma_post_bind_mw(
        self,
        cell: QpCell,
        wr_id: int,
        mw: IbvMw | NullPtr,
        rkey: int,
        mr: IbvMr,
        addr: int,
        length: int,
        access: int,
        flags: int,
    ) -> int: ...
    def aiordma_post_ud_send(
        self,
        cell: QpCell,
        wr_id: int,
        addr: int,
        length: int,
        lkey: int,
        flags: int,
        imm: int,
        ah: IbvAh,
        remote_qpn: int,
        remote_qkey: int,
    ) -> int: ...
    def aiordma_post_recv(
        self, cell: QpCell, wr_id: int, addr: int, length: int, lkey: int
    ) -> int: ...
    def aiordma_post_srq_recv(
        self, cell: SrqCell, wr_id: int, addr: int, length: int, lkey: int
    ) -> int: ...
    def aiordma_set_min_rnr_timer(self, qp: IbvQp, timer: int) -> int: ...
    def aiordma_set_retry_count(self, qp: IbvQp, count: int) -> int: ...
    def aiordma_query_qp_state(self, qp: IbvQp, state: IntOut) -> int: ...
    def aiordma_ifaddrs(self, text: Bytes, size: int) -> int: ...
    def aiordma_load_error(self, text: Bytes, size: int) -> None: ...

class Ffi:
    def release(self, cdata: CData) -> None: ...
    def gc(self, cdata: IdCallsPtr, destructor: Callable[[IdCallsPtr], None]) -> IdCallsPtr: ...
    @overload
    def addressof(self, cdata: RouteAddr, field: Literal["src_addr", "dst_addr"]) -> Sockaddr: ...
    @overload
    def addressof(
        self,
        cdata: Lib,
        field: Literal["aiordma_post_send", "aiordma_post_all", "aiordma_comp_event"],
    ) -> VoidPtr: ...
    errno: int
    NULL: Final[NullPtr]
    @overload
    def new(self, cdecl: Literal["struct aiordma_cm_event[]"], init: int) -> CmEventArray: ...
    @overload
    def new(self, cdecl: Literal["struct ibv_qp *[1]"], init: list[IbvQp]) -> QpCell: ...
    @overload
    def new(self, cdecl: Literal["struct aiordma_link[]"], init: int) -> LinkArray: ...
    @overload
    def new(
        self, cdecl: Literal["struct aiordma_chain *"], init: tuple[int, int, LinkArray]
    ) -> RequestChainPtr: ...
    @overload
    def new(self, cdecl: Literal["struct rdma_addr *"], init: RouteAddr) -> RouteAddrPtr: ...
    @overload
    def new(self, cdecl: Literal["struct ibv_qp_cap *"], init: IbvQpCap) -> IbvQpCap: ...
    @overload
    def new(self, cdecl: Literal["struct ibv_srq *[1]"], init: list[IbvSrq]) -> SrqCell: ...
    @overload
    def new(self, cdecl: Literal["struct ibv_wc[]"], init: int) -> WcArray: ...
    @overload
    def new(self, cdecl: Literal["struct ibv_cq *[]"], init: int) -> CqArray: ...
    @overload
    def new(self, cdecl: Literal["struct ibv_device_attr *"]) -> IbvDeviceAttr: ...
    @overload
    def new(self, cdecl: Literal["struct ibv_qp_init_attr *"]) -> IbvQpInitAttr: ...
    @overload
    def new(self, cdecl: Literal["struct ibv_qp_init_attr_ex *"]) -> IbvQpInitAttrEx: ...
    @overload
    def new(self, cdecl: Literal["struct ibv_qp_attr *"]) -> IbvQpAttr: ...
    @overload
    def new(self, cdecl: Literal["struct ibv_srq_attr *"]) -> IbvSrqAttr: ...
    @overload
    def new(self, cdecl: Literal["struct ibv_srq_init_attr *"]) -> IbvSrqInitAttr: ...
    @overload
    def new(self, cdecl: Literal["struct ibv_srq_init_attr_ex *"]) -> IbvSrqInitAttrEx: ...
    @overload
    def new(self, cdecl: Literal["struct ibv_ah_attr *"]) -> IbvAhAttr: ...
    @overload
    def new(self, cdecl: Literal["struct ibv_port_attr *"]) -> IbvPortAttr: ...
    @overload
    def new(self, cdecl: Literal["struct ibv_ece *"]) -> IbvEce: ...
    @overload
    def new(self, cdecl: Literal["union ibv_gid *"]) -> Gid: ...
    @overload
    def new(self, cdecl: Literal["struct ibv_wc *"]) -> IbvWc: ...
    @overload
    def new(
        self, cdecl: Literal["struct ibv_sge[]"], init: int | list[tuple[int, int, int]]
    ) -> SgeArray: ...
    @overload
    def new(self, cdecl: Literal["struct aiordma_async_event[]"], init: int) -> AsyncEventArray: ...
    @overload
    def new(self, cdecl: Literal["struct aiordma_cm_event *"]) -> CmEventCopy: ...
    @overload
    def new(self, cdecl: Literal["struct rdma_addrinfo *"]) -> AddrInfoPtr: ...
    @overload
    def new(self, cdecl: Literal["struct rdma_addrinfo **"]) -> AddrInfoOut: ...
    @overload
    def new(self, cdecl: Literal["struct rdma_cm_join_mc_attr_ex *"]) -> JoinAttr: ...
    @overload
    def new(self, cdecl: Literal["uint32_t *"]) -> IntOut: ...
    @overload
    def new(self, cdecl: Literal["struct rdma_conn_param *"]) -> ConnParam: ...
    @overload
    def new(self, cdecl: Literal["struct rdma_cm_id **"]) -> CmIdOut: ...
    @overload
    def new(self, cdecl: Literal["int *"]) -> IntOut: ...
    @overload
    def new(self, cdecl: Literal["char[]"], init: int | bytes) -> Bytes: ...
    @overload
    def cast(self, cdecl: Literal["uintptr_t"], source: CData) -> Integer: ...
    @overload
    def cast(self, cdecl: Literal["struct sockaddr *"], source: CData) -> Sockaddr: ...
    @overload
    def cast(self, cdecl: Literal["struct rdma_cm_id *"], source: int) -> CmIdPtr: ...
    @overload
    def cast(self, cdecl: Literal["struct ibv_wc *"], source: int) -> WcArray: ...
    @overload
    def cast(self, cdecl: Literal["void *"], source: int) -> VoidPtr: ...
    @overload
    def cast(self, cdecl: Literal["struct ibv_qp_init_attr *"], source: CData) -> IbvQpInitAttr: ...
    def memmove(self, dest: CData, src: Buffer | CData, n: int) -> None: ...
    def from_buffer(self, cdecl: Literal["char[]"], buffer: Buffer) -> Bytes: ...
    def buffer(self, data: CData, size: int) -> Buffer: ...
    def string(self, data: Bytes, maxlen: int = ...) -> bytes: ...

ffi: Ffi
lib: Lib
