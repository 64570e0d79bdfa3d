"""Types of the compiled module, so that nothing untyped leaves it.

A C struct is a class here, and a pointer to it has the same class: cffi reads fields through both.
"""

from typing import Final, Literal, overload

from typing_extensions import Buffer

class CData: ...
class Sockaddr(CData): ...
class VoidPtr(CData): ...

class Integer(CData):
    def __int__(self) -> int: ...

class IbvPd(CData): ...
class IbvSrq(CData): ...

class DeviceList(CData):
    def __getitem__(self, index: int) -> IbvContext: ...

class EventChannelPtr(CData):
    fd: int

class IbvDevice(CData):
    transport_type: Final[int]

class IbvContext(CData):
    device: Final[IbvDevice]
    async_fd: Final[int]

class IbvDeviceAttr(CData):
    max_qp: Final[int]
    max_qp_wr: Final[int]
    max_sge: Final[int]
    max_cq: Final[int]
    max_cqe: Final[int]
    max_mr: Final[int]
    max_mr_size: Final[int]
    max_qp_rd_atom: Final[int]
    max_qp_init_rd_atom: Final[int]
    phys_port_cnt: Final[int]

class IbvMr(CData):
    addr: Final[VoidPtr]
    length: Final[int]
    lkey: Final[int]
    rkey: Final[int]

class IbvCompChannel(CData):
    fd: int

class IbvCq(CData):
    cqe: Final[int]

class IbvQp(CData):
    qp_num: int

class IbvQpCap(CData):
    max_send_wr: int
    max_recv_wr: int
    max_send_sge: int
    max_recv_sge: int
    max_inline_data: int

class IbvQpInitAttr(CData):
    qp_context: VoidPtr
    send_cq: IbvCq
    recv_cq: IbvCq
    srq: IbvSrq
    cap: Final[IbvQpCap]
    qp_type: int
    sq_sig_all: int

class IbvWc(CData):
    wr_id: Final[int]
    status: Final[int]
    opcode: Final[int]
    vendor_err: Final[int]
    byte_len: Final[int]
    imm_data: Final[int]
    qp_num: int
    src_qp: Final[int]
    wc_flags: Final[int]

class CmIdPtr(CData):
    verbs: Final[IbvContext]
    channel: Final[EventChannelPtr]
    qp: IbvQp
    port_num: Final[int]

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

class CmEventCopy(CData):
    id: Final[int]
    listen_id: Final[int]
    event: Final[int]
    status: Final[int]
    error: Final[int]
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
    def __getitem__(self, index: int) -> CmEventCopy: ...

class WcArray(CData):
    def __getitem__(self, index: int) -> IbvWc: ...

class CqArray(CData):
    def __getitem__(self, index: int) -> IbvCq: ...

class NullPtr(
    Sockaddr,
    VoidPtr,
    IbvPd,
    IbvSrq,
    DeviceList,
    EventChannelPtr,
    IbvContext,
    IbvMr,
    IbvCompChannel,
    IbvCq,
    IbvQp,
    CmIdPtr,
    ConnParam,
    Bytes,
):
    """NULL: a pointer of every type at once."""

class Lib:
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
    RDMA_OPTION_ID: Final[int]
    RDMA_OPTION_ID_TOS: Final[int]
    RDMA_OPTION_ID_REUSEADDR: Final[int]
    RDMA_OPTION_ID_AFONLY: Final[int]
    RDMA_OPTION_ID_ACK_TIMEOUT: Final[int]
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
    IBV_EVENT_COMM_EST: Final[int]

    def rdma_create_event_channel(self) -> EventChannelPtr: ...
    def rdma_destroy_event_channel(self, channel: EventChannelPtr) -> None: ...
    def rdma_create_id(
        self, channel: EventChannelPtr, id: CmIdOut, context: VoidPtr, ps: int
    ) -> int: ...
    def rdma_destroy_id(self, id: CmIdPtr) -> int: ...
    def rdma_bind_addr(self, id: CmIdPtr, addr: Sockaddr) -> int: ...
    def rdma_resolve_addr(
        self, id: CmIdPtr, src: Sockaddr, dst: Sockaddr, timeout_ms: int
    ) -> int: ...
    def rdma_resolve_route(self, id: CmIdPtr, timeout_ms: int) -> int: ...
    def rdma_create_qp(self, id: CmIdPtr, pd: IbvPd, attr: IbvQpInitAttr) -> int: ...
    def rdma_destroy_qp(self, id: CmIdPtr) -> None: ...
    def rdma_connect(self, id: CmIdPtr, param: ConnParam) -> int: ...
    def rdma_establish(self, id: CmIdPtr) -> int: ...
    def rdma_listen(self, id: CmIdPtr, backlog: int) -> int: ...
    def rdma_accept(self, id: CmIdPtr, param: ConnParam) -> int: ...
    def rdma_reject(self, id: CmIdPtr, private_data: Bytes, private_data_len: int) -> int: ...
    def rdma_notify(self, id: CmIdPtr, event: int) -> int: ...
    def rdma_disconnect(self, id: CmIdPtr) -> int: ...
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
    def ibv_poll_cq(self, cq: IbvCq, num_entries: int, wc: WcArray) -> int: ...
    def ibv_destroy_qp(self, qp: IbvQp) -> int: ...
    def aiordma_get_cm_events(
        self, channel: EventChannelPtr, events: CmEventArray, capacity: int
    ) -> int: ...
    def aiordma_set_nonblocking(self, fd: int) -> int: ...
    def aiordma_comp_events(
        self, channel: IbvCompChannel, ready: CqArray, capacity: int
    ) -> int: ...
    def aiordma_post_recv(
        self, qp: IbvQp, wr_id: int, addr: int, length: int, lkey: int
    ) -> int: ...
    def aiordma_post_recvs(
        self, qp: IbvQp, first_wr_id: int, addr: int, slot_size: int, count: int, lkey: int
    ) -> int: ...
    def aiordma_post_send(
        self, qp: IbvQp, wr_id: int, addr: int, length: int, lkey: int, flags: int, imm: int
    ) -> int: ...
    def aiordma_post_send_copy(
        self, qp: IbvQp, wr_id: int, addr: int, data: Bytes, length: int, lkey: int, imm: int
    ) -> int: ...
    def aiordma_post_send_inline(
        self, qp: IbvQp, wr_id: int, data: Bytes, length: int, imm: int
    ) -> int: ...
    def aiordma_set_min_rnr_timer(self, qp: IbvQp, timer: int) -> int: ...
    def aiordma_ifaddrs(self, text: Bytes, size: int) -> int: ...

class Ffi:
    errno: int
    NULL: Final[NullPtr]
    @overload
    def new(self, cdecl: Literal["struct aiordma_cm_event[]"], init: int) -> CmEventArray: ...
    @overload
    def new(self, cdecl: Literal["struct ibv_wc[]"], init: int) -> WcArray: ...
    @overload
    def new(self, cdecl: Literal["struct ibv_cq *[]"], init: int) -> CqArray: ...
    @overload
    def new(self, cdecl: Literal["struct ibv_device_attr *"]) -> IbvDeviceAttr: ...
    @overload
    def new(self, cdecl: Literal["struct ibv_qp_init_attr *"]) -> IbvQpInitAttr: ...
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
    def from_buffer(self, cdecl: Literal["char[]"], buffer: Buffer) -> Bytes: ...
    def buffer(self, data: CData, size: int) -> Buffer: ...
    def string(self, data: Bytes, maxlen: int = ...) -> bytes: ...

ffi: Ffi
lib: Lib
