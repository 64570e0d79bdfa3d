/* What Python sees of librdmacm, libibverbs and shim.c. "..." leaves the layout to the compiler. */

/* --- rdma/rdma_cma.h ------------------------------------------------------------------------ */

#define RDMA_CM_EVENT_ADDR_RESOLVED ...
#define RDMA_CM_EVENT_ADDR_ERROR ...
#define RDMA_CM_EVENT_ROUTE_RESOLVED ...
#define RDMA_CM_EVENT_ROUTE_ERROR ...
#define RDMA_CM_EVENT_CONNECT_REQUEST ...
#define RDMA_CM_EVENT_CONNECT_RESPONSE ...
#define RDMA_CM_EVENT_CONNECT_ERROR ...
#define RDMA_CM_EVENT_UNREACHABLE ...
#define RDMA_CM_EVENT_REJECTED ...
#define RDMA_CM_EVENT_ESTABLISHED ...
#define RDMA_CM_EVENT_DISCONNECTED ...
#define RDMA_CM_EVENT_DEVICE_REMOVAL ...
#define RDMA_CM_EVENT_MULTICAST_JOIN ...
#define RDMA_CM_EVENT_MULTICAST_ERROR ...
#define RDMA_CM_EVENT_ADDR_CHANGE ...
#define RDMA_CM_EVENT_TIMEWAIT_EXIT ...
#define AIORDMA_CM_EVENT_ADDRINFO_RESOLVED ...
#define AIORDMA_CM_EVENT_ADDRINFO_ERROR ...
#define AIORDMA_CM_EVENT_USER ...
#define AIORDMA_CM_EVENT_INTERNAL ...

#define RDMA_PS_IPOIB ...
#define RDMA_PS_TCP ...
#define RDMA_PS_UDP ...
#define RDMA_PS_IB ...

#define RDMA_OPTION_ID ...
#define RDMA_OPTION_ID_TOS ...
#define RDMA_OPTION_ID_REUSEADDR ...
#define RDMA_OPTION_ID_AFONLY ...
#define RDMA_OPTION_ID_ACK_TIMEOUT ...

struct rdma_event_channel {
	int fd;
};

struct rdma_cm_id {
	struct ibv_context *verbs;
	struct rdma_event_channel *channel;
	struct ibv_qp *qp;
	uint8_t port_num;
	...;
};

struct rdma_conn_param {
	const void *private_data;
	uint8_t private_data_len;
	uint8_t responder_resources;
	uint8_t initiator_depth;
	uint8_t flow_control;
	uint8_t retry_count;
	uint8_t rnr_retry_count;
	uint8_t srq;
	uint32_t qp_num;
};

struct rdma_event_channel *rdma_create_event_channel(void);
void rdma_destroy_event_channel(struct rdma_event_channel *channel);
int rdma_create_id(struct rdma_event_channel *channel, struct rdma_cm_id **id, void *context, int ps);
int rdma_destroy_id(struct rdma_cm_id *id);
int rdma_bind_addr(struct rdma_cm_id *id, struct sockaddr *addr);
int rdma_resolve_addr(struct rdma_cm_id *id, struct sockaddr *src, struct sockaddr *dst, int timeout_ms);
int rdma_resolve_route(struct rdma_cm_id *id, int timeout_ms);
int rdma_create_qp(struct rdma_cm_id *id, struct ibv_pd *pd, struct ibv_qp_init_attr *attr);
void rdma_destroy_qp(struct rdma_cm_id *id);
int rdma_connect(struct rdma_cm_id *id, struct rdma_conn_param *param);
int rdma_establish(struct rdma_cm_id *id);
int rdma_listen(struct rdma_cm_id *id, int backlog);
int rdma_accept(struct rdma_cm_id *id, struct rdma_conn_param *param);
int rdma_reject(struct rdma_cm_id *id, const void *private_data, uint8_t private_data_len);
int rdma_notify(struct rdma_cm_id *id, int event);
int rdma_disconnect(struct rdma_cm_id *id);
int rdma_set_option(struct rdma_cm_id *id, int level, int optname, void *optval, size_t optlen);
struct sockaddr *rdma_get_local_addr(struct rdma_cm_id *id);
struct sockaddr *rdma_get_peer_addr(struct rdma_cm_id *id);
struct ibv_context **rdma_get_devices(int *num_devices);
void rdma_free_devices(struct ibv_context **list);

/* --- infiniband/verbs.h --------------------------------------------------------------------- */

#define IBV_TRANSPORT_IB ...
#define IBV_TRANSPORT_IWARP ...

#define IBV_ACCESS_LOCAL_WRITE ...
#define IBV_ACCESS_REMOTE_WRITE ...
#define IBV_ACCESS_REMOTE_READ ...
#define IBV_ACCESS_REMOTE_ATOMIC ...
#define IBV_ACCESS_MW_BIND ...
#define IBV_ACCESS_ZERO_BASED ...
#define IBV_ACCESS_ON_DEMAND ...
#define IBV_ACCESS_HUGETLB ...
#define IBV_ACCESS_RELAXED_ORDERING ...

#define IBV_QPT_RC ...
#define IBV_QPT_UC ...
#define IBV_QPT_UD ...

#define IBV_SEND_FENCE ...
#define IBV_SEND_SIGNALED ...
#define IBV_SEND_SOLICITED ...
#define IBV_SEND_INLINE ...

#define IBV_WC_SUCCESS ...
#define IBV_WC_LOC_LEN_ERR ...
#define IBV_WC_LOC_QP_OP_ERR ...
#define IBV_WC_LOC_EEC_OP_ERR ...
#define IBV_WC_LOC_PROT_ERR ...
#define IBV_WC_WR_FLUSH_ERR ...
#define IBV_WC_MW_BIND_ERR ...
#define IBV_WC_BAD_RESP_ERR ...
#define IBV_WC_LOC_ACCESS_ERR ...
#define IBV_WC_REM_INV_REQ_ERR ...
#define IBV_WC_REM_ACCESS_ERR ...
#define IBV_WC_REM_OP_ERR ...
#define IBV_WC_RETRY_EXC_ERR ...
#define IBV_WC_RNR_RETRY_EXC_ERR ...
#define IBV_WC_LOC_RDD_VIOL_ERR ...
#define IBV_WC_REM_INV_RD_REQ_ERR ...
#define IBV_WC_REM_ABORT_ERR ...
#define IBV_WC_INV_EECN_ERR ...
#define IBV_WC_INV_EEC_STATE_ERR ...
#define IBV_WC_FATAL_ERR ...
#define IBV_WC_RESP_TIMEOUT_ERR ...
#define IBV_WC_GENERAL_ERR ...
#define IBV_WC_TM_ERR ...
#define IBV_WC_TM_RNDV_INCOMPLETE ...

#define IBV_WC_SEND ...
#define IBV_WC_RDMA_WRITE ...
#define IBV_WC_RDMA_READ ...
#define IBV_WC_COMP_SWAP ...
#define IBV_WC_FETCH_ADD ...
#define IBV_WC_BIND_MW ...
#define IBV_WC_LOCAL_INV ...
#define IBV_WC_RECV ...
#define IBV_WC_RECV_RDMA_WITH_IMM ...

#define IBV_WC_GRH ...
#define IBV_WC_WITH_IMM ...
#define IBV_WC_WITH_INV ...

#define IBV_EVENT_COMM_EST ...

struct ibv_device {
	int transport_type;
	...;
};

struct ibv_context {
	struct ibv_device *device;
	int async_fd;
	...;
};

struct ibv_device_attr {
	int max_qp;
	int max_qp_wr;
	int max_sge;
	int max_cq;
	int max_cqe;
	int max_mr;
	uint64_t max_mr_size;
	int max_qp_rd_atom;
	int max_qp_init_rd_atom;
	uint8_t phys_port_cnt;
	...;
};

struct ibv_pd { ...; };

struct ibv_mr {
	void *addr;
	size_t length;
	uint32_t lkey;
	uint32_t rkey;
	...;
};

struct ibv_comp_channel {
	int fd;
	...;
};

struct ibv_cq {
	int cqe;
	...;
};

struct ibv_qp {
	uint32_t qp_num;
	...;
};

struct ibv_qp_cap {
	uint32_t max_send_wr;
	uint32_t max_recv_wr;
	uint32_t max_send_sge;
	uint32_t max_recv_sge;
	uint32_t max_inline_data;
};

struct ibv_qp_init_attr {
	void *qp_context;
	struct ibv_cq *send_cq;
	struct ibv_cq *recv_cq;
	struct ibv_srq *srq;
	struct ibv_qp_cap cap;
	int qp_type;
	int sq_sig_all;
};

struct ibv_wc {
	uint64_t wr_id;
	int status;
	int opcode;
	uint32_t vendor_err;
	uint32_t byte_len;
	uint32_t imm_data; /* network byte order */
	uint32_t qp_num;
	uint32_t src_qp;
	unsigned int wc_flags;
	...;
};

const char *ibv_get_device_name(struct ibv_device *device);
const char *ibv_wc_status_str(int status);
int ibv_query_device(struct ibv_context *context, struct ibv_device_attr *attr);
struct ibv_pd *ibv_alloc_pd(struct ibv_context *context);
int ibv_dealloc_pd(struct ibv_pd *pd);
struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *addr, size_t length, int access);
int ibv_dereg_mr(struct ibv_mr *mr);
struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *context);
int ibv_destroy_comp_channel(struct ibv_comp_channel *channel);
struct ibv_cq *ibv_create_cq(struct ibv_context *context, int cqe, void *cq_context,
			     struct ibv_comp_channel *channel, int comp_vector);
int ibv_destroy_cq(struct ibv_cq *cq);
int ibv_req_notify_cq(struct ibv_cq *cq, int solicited_only);
int ibv_poll_cq(struct ibv_cq *cq, int num_entries, struct ibv_wc *wc);
int ibv_destroy_qp(struct ibv_qp *qp);

/* --- shim.h --------------------------------------------------------------------------------- */

struct aiordma_cm_event {
	uintptr_t id;
	uintptr_t listen_id;
	int event;
	int status;
	int error;
	uint32_t qp_num;
	uint32_t qkey;
	uint8_t responder_resources;
	uint8_t initiator_depth;
	uint8_t flow_control;
	uint8_t retry_count;
	uint8_t rnr_retry_count;
	uint8_t srq;
	uint8_t private_data_len;
	uint8_t private_data[255];
};

int aiordma_get_cm_events(struct rdma_event_channel *channel, struct aiordma_cm_event *events,
			  int capacity);
int aiordma_set_nonblocking(int fd);
int aiordma_comp_events(struct ibv_comp_channel *channel, struct ibv_cq **ready, int capacity);
int aiordma_post_recv(struct ibv_qp *qp, uint64_t wr_id, uintptr_t addr, uint32_t length,
		      uint32_t lkey);
int aiordma_post_recvs(struct ibv_qp *qp, uint64_t first_wr_id, uintptr_t addr, uint32_t slot_size,
		       uint32_t count, uint32_t lkey);
int aiordma_post_send(struct ibv_qp *qp, uint64_t wr_id, uintptr_t addr, uint32_t length,
		      uint32_t lkey, uint32_t flags, int64_t imm);
int aiordma_post_send_copy(struct ibv_qp *qp, uint64_t wr_id, uintptr_t addr, const char *data,
			   uint32_t length, uint32_t lkey, int64_t imm);
int aiordma_post_send_inline(struct ibv_qp *qp, uint64_t wr_id, const char *data, uint32_t length,
			     int64_t imm);
int aiordma_set_min_rnr_timer(struct ibv_qp *qp, uint8_t timer);
int aiordma_ifaddrs(char *text, size_t size);
