/*
 * The parts of librdmacm, libibverbs and helpers.h that Python uses. "..." leaves the layout of a
 * struct to the compiler.
 */

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

#define RDMA_IB_IP_PS_MASK ...
#define RDMA_IB_IP_PORT_MASK ...
#define RDMA_IB_IP_PS_TCP ...
#define RDMA_IB_IP_PS_UDP ...
#define RDMA_IB_PS_IB ...
#define RDMA_UDP_QKEY ...

#define RDMA_MAX_RESP_RES ...
#define RDMA_MAX_INIT_DEPTH ...

#define RDMA_OPTION_ID ...
#define RDMA_OPTION_IB ...
#define RDMA_OPTION_ID_TOS ...
#define RDMA_OPTION_ID_REUSEADDR ...
#define RDMA_OPTION_ID_AFONLY ...
#define RDMA_OPTION_ID_ACK_TIMEOUT ...
#define RDMA_OPTION_IB_PATH ...

#define RAI_PASSIVE ...
#define RAI_NUMERICHOST ...
#define RAI_NOROUTE ...
#define RAI_FAMILY ...
#define AIORDMA_RAI_SA ...
#define AIORDMA_RAI_DNS ...

#define RDMA_CM_JOIN_MC_ATTR_ADDRESS ...
#define RDMA_CM_JOIN_MC_ATTR_JOIN_FLAGS ...
#define RDMA_CM_JOIN_MC_ATTR_RESERVED ...
#define RDMA_MC_JOIN_FLAG_FULLMEMBER ...
#define RDMA_MC_JOIN_FLAG_SENDONLY_FULLMEMBER ...
#define RDMA_MC_JOIN_FLAG_RESERVED ...

struct sockaddr { ...; };
struct sockaddr_in { ...; };
struct sockaddr_in6 { ...; };
struct sockaddr_storage { ...; };

union ibv_gid {
	uint8_t raw[16];
	...;
};

struct ibv_sa_path_rec {
	union ibv_gid dgid;
	union ibv_gid sgid;
	uint16_t dlid; /* network byte order */
	uint16_t slid; /* network byte order */
	int raw_traffic;
	uint32_t flow_label; /* network byte order */
	uint8_t hop_limit;
	uint8_t traffic_class;
	int reversible;
	uint8_t numb_path;
	uint16_t pkey; /* network byte order */
	uint8_t sl;
	uint8_t mtu_selector;
	uint8_t mtu;
	uint8_t rate_selector;
	uint8_t rate;
	uint8_t packet_life_time_selector;
	uint8_t packet_life_time;
	uint8_t preference;
};

struct rdma_ib_addr {
	union ibv_gid sgid;
	union ibv_gid dgid;
	uint16_t pkey; /* network byte order */
};

struct rdma_addr {
	union {
		struct sockaddr src_addr;
		struct sockaddr_in src_sin;
		struct sockaddr_in6 src_sin6;
		struct sockaddr_storage src_storage;
	};
	union {
		struct sockaddr dst_addr;
		struct sockaddr_in dst_sin;
		struct sockaddr_in6 dst_sin6;
		struct sockaddr_storage dst_storage;
	};
	union {
		struct rdma_ib_addr ibaddr;
	} addr;
};

struct rdma_route {
	struct rdma_addr addr;
	struct ibv_sa_path_rec *path_rec;
	int num_paths;
};

struct rdma_event_channel {
	int fd;
};

struct rdma_cm_id {
	struct ibv_context *verbs;
	struct rdma_event_channel *channel;
	void *context;
	struct ibv_qp *qp;
	struct rdma_route route;
	int ps;
	uint8_t port_num;
	struct rdma_cm_event *event;
	struct ibv_comp_channel *send_cq_channel;
	struct ibv_cq *send_cq;
	struct ibv_comp_channel *recv_cq_channel;
	struct ibv_cq *recv_cq;
	struct ibv_srq *srq;
	struct ibv_pd *pd;
	int qp_type;
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

struct ibv_global_route {
	union ibv_gid dgid;
	uint32_t flow_label;
	uint8_t sgid_index;
	uint8_t hop_limit;
	uint8_t traffic_class;
};

struct ibv_ah_attr {
	struct ibv_global_route grh;
	uint16_t dlid;
	uint8_t sl;
	uint8_t src_path_bits;
	uint8_t static_rate;
	uint8_t is_global;
	uint8_t port_num;
};

struct rdma_ud_param {
	const void *private_data;
	uint8_t private_data_len;
	struct ibv_ah_attr ah_attr;
	uint32_t qp_num;
	uint32_t qkey;
};

/* rdma-core 60 and later add `uint64_t arg` to the union; cm_events.c reads it from there. */
struct rdma_cm_event {
	struct rdma_cm_id *id;
	struct rdma_cm_id *listen_id;
	int event;
	int status;
	union {
		struct rdma_conn_param conn;
		struct rdma_ud_param ud;
	} param;
};

struct rdma_addrinfo {
	int ai_flags;
	int ai_family;
	int ai_qp_type;
	int ai_port_space;
	unsigned int ai_src_len;
	unsigned int ai_dst_len;
	struct sockaddr *ai_src_addr;
	struct sockaddr *ai_dst_addr;
	char *ai_src_canonname;
	char *ai_dst_canonname;
	size_t ai_route_len;
	void *ai_route;
	size_t ai_connect_len;
	void *ai_connect;
	struct rdma_addrinfo *ai_next;
};

struct rdma_cm_join_mc_attr_ex {
	uint32_t comp_mask;
	uint32_t join_flags;
	struct sockaddr *addr;
};

struct ibv_ece {
	uint32_t vendor_id;
	uint32_t options;
	uint32_t comp_mask;
};

struct rdma_event_channel *rdma_create_event_channel(void);
void rdma_destroy_event_channel(struct rdma_event_channel *channel);
int rdma_create_id(struct rdma_event_channel *channel, struct rdma_cm_id **id, void *context, int ps);
int rdma_create_ep(struct rdma_cm_id **id, struct rdma_addrinfo *res, struct ibv_pd *pd,
		   struct ibv_qp_init_attr *attr);
void rdma_destroy_ep(struct rdma_cm_id *id);
int rdma_destroy_id(struct rdma_cm_id *id);
int rdma_bind_addr(struct rdma_cm_id *id, struct sockaddr *addr);
int rdma_resolve_addr(struct rdma_cm_id *id, struct sockaddr *src, struct sockaddr *dst, int timeout_ms);
int rdma_resolve_route(struct rdma_cm_id *id, int timeout_ms);
int rdma_create_qp(struct rdma_cm_id *id, struct ibv_pd *pd, struct ibv_qp_init_attr *attr);
int rdma_create_qp_ex(struct rdma_cm_id *id, struct ibv_qp_init_attr_ex *attr);
void rdma_destroy_qp(struct rdma_cm_id *id);
int rdma_connect(struct rdma_cm_id *id, struct rdma_conn_param *param);
int rdma_establish(struct rdma_cm_id *id);
int rdma_listen(struct rdma_cm_id *id, int backlog);
int rdma_get_request(struct rdma_cm_id *listen, struct rdma_cm_id **id);
int rdma_accept(struct rdma_cm_id *id, struct rdma_conn_param *param);
int rdma_reject(struct rdma_cm_id *id, const void *private_data, uint8_t private_data_len);
int rdma_reject_ece(struct rdma_cm_id *id, const void *private_data, uint8_t private_data_len);
int rdma_notify(struct rdma_cm_id *id, int event);
int rdma_disconnect(struct rdma_cm_id *id);
int rdma_join_multicast(struct rdma_cm_id *id, struct sockaddr *addr, void *context);
int rdma_join_multicast_ex(struct rdma_cm_id *id, struct rdma_cm_join_mc_attr_ex *attr, void *context);
int rdma_leave_multicast(struct rdma_cm_id *id, struct sockaddr *addr);
int rdma_get_cm_event(struct rdma_event_channel *channel, struct rdma_cm_event **event);
int rdma_ack_cm_event(struct rdma_cm_event *event);
uint16_t rdma_get_src_port(struct rdma_cm_id *id); /* network byte order */
uint16_t rdma_get_dst_port(struct rdma_cm_id *id); /* network byte order */
struct sockaddr *rdma_get_local_addr(struct rdma_cm_id *id);
struct sockaddr *rdma_get_peer_addr(struct rdma_cm_id *id);
struct ibv_context **rdma_get_devices(int *num_devices);
void rdma_free_devices(struct ibv_context **list);
const char *rdma_event_str(int event);
int rdma_set_option(struct rdma_cm_id *id, int level, int optname, void *optval, size_t optlen);
int rdma_migrate_id(struct rdma_cm_id *id, struct rdma_event_channel *channel);
int rdma_getaddrinfo(const char *node, const char *service, const struct rdma_addrinfo *hints,
		     struct rdma_addrinfo **res);
void rdma_freeaddrinfo(struct rdma_addrinfo *res);
int rdma_init_qp_attr(struct rdma_cm_id *id, struct ibv_qp_attr *attr, int *mask);
int rdma_set_local_ece(struct rdma_cm_id *id, struct ibv_ece *ece);
int rdma_get_remote_ece(struct rdma_cm_id *id, struct ibv_ece *ece);
int rdma_query_addrinfo(struct rdma_cm_id *id, struct rdma_addrinfo **info);
int rdma_write_cm_event(struct rdma_cm_id *id, int event, int status, uint64_t arg);
const char *gai_strerror(int code);

/* --- rdma/rdma_verbs.h ---------------------------------------------------------------------- */

int rdma_create_srq(struct rdma_cm_id *id, struct ibv_pd *pd, struct ibv_srq_init_attr *attr);
int rdma_create_srq_ex(struct rdma_cm_id *id, struct ibv_srq_init_attr_ex *attr);
void rdma_destroy_srq(struct rdma_cm_id *id);
struct ibv_mr *rdma_reg_msgs(struct rdma_cm_id *id, void *addr, size_t length);
struct ibv_mr *rdma_reg_read(struct rdma_cm_id *id, void *addr, size_t length);
struct ibv_mr *rdma_reg_write(struct rdma_cm_id *id, void *addr, size_t length);
int rdma_dereg_mr(struct ibv_mr *mr);
int rdma_post_recvv(struct rdma_cm_id *id, void *context, struct ibv_sge *sgl, int nsge);
int rdma_post_sendv(struct rdma_cm_id *id, void *context, struct ibv_sge *sgl, int nsge, int flags);
int rdma_post_readv(struct rdma_cm_id *id, void *context, struct ibv_sge *sgl, int nsge, int flags,
		    uint64_t remote_addr, uint32_t rkey);
int rdma_post_writev(struct rdma_cm_id *id, void *context, struct ibv_sge *sgl, int nsge, int flags,
		     uint64_t remote_addr, uint32_t rkey);
int rdma_post_recv(struct rdma_cm_id *id, void *context, void *addr, size_t length,
		   struct ibv_mr *mr);
int rdma_post_send(struct rdma_cm_id *id, void *context, void *addr, size_t length,
		   struct ibv_mr *mr, int flags);
int rdma_post_read(struct rdma_cm_id *id, void *context, void *addr, size_t length,
		   struct ibv_mr *mr, int flags, uint64_t remote_addr, uint32_t rkey);
int rdma_post_write(struct rdma_cm_id *id, void *context, void *addr, size_t length,
		    struct ibv_mr *mr, int flags, uint64_t remote_addr, uint32_t rkey);
int rdma_post_ud_send(struct rdma_cm_id *id, void *context, void *addr, size_t length,
		      struct ibv_mr *mr, int flags, struct ibv_ah *ah, uint32_t remote_qpn);
int rdma_get_send_comp(struct rdma_cm_id *id, struct ibv_wc *wc);
int rdma_get_recv_comp(struct rdma_cm_id *id, struct ibv_wc *wc);

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
#define IBV_QPT_RAW_PACKET ...
#define IBV_QPT_XRC_SEND ...
#define IBV_QPT_XRC_RECV ...

#define IBV_QP_INIT_ATTR_PD ...
#define IBV_QP_INIT_ATTR_XRCD ...
#define IBV_QP_INIT_ATTR_CREATE_FLAGS ...
#define IBV_QP_CREATE_BLOCK_SELF_MCAST_LB ...

#define IBV_SRQT_BASIC ...
#define IBV_SRQT_XRC ...
#define IBV_SRQ_INIT_ATTR_TYPE ...
#define IBV_SRQ_INIT_ATTR_PD ...
#define IBV_SRQ_INIT_ATTR_XRCD ...
#define IBV_SRQ_INIT_ATTR_CQ ...
#define IBV_SRQ_LIMIT ...

#define IBV_MW_TYPE_2 ...
#define IBV_DEVICE_MEM_WINDOW_TYPE_2B ...
#define IBV_ODP_SUPPORT ...

#define IBV_QPS_RESET ...
#define IBV_QPS_INIT ...
#define IBV_QPS_RTR ...
#define IBV_QPS_RTS ...
#define IBV_QPS_SQD ...
#define IBV_QPS_SQE ...
#define IBV_QPS_ERR ...
#define IBV_QP_STATE ...
#define IBV_QP_RETRY_CNT ...

#define IBV_PORT_NOP ...
#define IBV_PORT_DOWN ...
#define IBV_PORT_INIT ...
#define IBV_PORT_ARMED ...
#define IBV_PORT_ACTIVE ...
#define IBV_PORT_ACTIVE_DEFER ...

#define IBV_WR_RDMA_WRITE ...
#define IBV_WR_RDMA_WRITE_WITH_IMM ...
#define IBV_WR_SEND ...
#define IBV_WR_SEND_WITH_IMM ...
#define IBV_WR_RDMA_READ ...
#define IBV_WR_ATOMIC_CMP_AND_SWP ...
#define IBV_WR_ATOMIC_FETCH_AND_ADD ...
#define IBV_WR_BIND_MW ...
#define IBV_WR_SEND_WITH_INV ...

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
#define IBV_WC_IP_CSUM_OK ...

#define IBV_EVENT_CQ_ERR ...
#define IBV_EVENT_QP_FATAL ...
#define IBV_EVENT_QP_REQ_ERR ...
#define IBV_EVENT_QP_ACCESS_ERR ...
#define IBV_EVENT_COMM_EST ...
#define IBV_EVENT_SQ_DRAINED ...
#define IBV_EVENT_PATH_MIG ...
#define IBV_EVENT_PATH_MIG_ERR ...
#define IBV_EVENT_DEVICE_FATAL ...
#define IBV_EVENT_PORT_ACTIVE ...
#define IBV_EVENT_PORT_ERR ...
#define IBV_EVENT_LID_CHANGE ...
#define IBV_EVENT_PKEY_CHANGE ...
#define IBV_EVENT_SM_CHANGE ...
#define IBV_EVENT_SRQ_ERR ...
#define IBV_EVENT_SRQ_LIMIT_REACHED ...
#define IBV_EVENT_QP_LAST_WQE_REACHED ...
#define IBV_EVENT_CLIENT_REREGISTER ...
#define IBV_EVENT_GID_CHANGE ...
#define IBV_EVENT_WQ_FATAL ...

struct ibv_device {
	int transport_type;
	...;
};

struct ibv_context {
	struct ibv_device *device;
	int cmd_fd;
	int async_fd;
	...;
};

struct ibv_device_attr {
	uint32_t vendor_id;
	int max_qp;
	int max_qp_wr;
	int max_sge;
	int max_sge_rd;
	int max_cq;
	int max_cqe;
	int max_mr;
	uint64_t max_mr_size;
	int max_qp_rd_atom;
	int max_qp_init_rd_atom;
	unsigned int device_cap_flags;
	int atomic_cap;
	int max_srq;
	int max_srq_wr;
	int max_srq_sge;
	int max_ah;
	int max_mcast_grp;
	uint8_t phys_port_cnt;
	...;
};

struct ibv_port_attr {
	int state;
	int max_mtu;
	int active_mtu;
	uint32_t max_msg_sz;
	uint16_t lid;
	uint8_t link_layer;
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
	void *cq_context;
	int cqe;
	...;
};

struct ibv_qp {
	void *qp_context;
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

struct ibv_qp_init_attr_ex {
	void *qp_context;
	struct ibv_cq *send_cq;
	struct ibv_cq *recv_cq;
	struct ibv_srq *srq;
	struct ibv_qp_cap cap;
	int qp_type;
	int sq_sig_all;
	uint32_t comp_mask;
	struct ibv_pd *pd;
	struct ibv_xrcd *xrcd;
	uint32_t create_flags;
	...;
};

struct ibv_qp_attr {
	int qp_state;
	int path_mtu;
	uint32_t qkey;
	uint32_t rq_psn;
	uint32_t sq_psn;
	uint32_t dest_qp_num;
	unsigned int qp_access_flags;
	struct ibv_ah_attr ah_attr;
	uint16_t pkey_index;
	uint8_t max_rd_atomic;
	uint8_t max_dest_rd_atomic;
	uint8_t min_rnr_timer;
	uint8_t port_num;
	uint8_t timeout;
	uint8_t retry_cnt;
	uint8_t rnr_retry;
	...;
};

struct ibv_srq {
	...;
};

struct ibv_xrcd { ...; };

struct ibv_srq_attr {
	uint32_t max_wr;
	uint32_t max_sge;
	uint32_t srq_limit;
};

struct ibv_srq_init_attr {
	void *srq_context;
	struct ibv_srq_attr attr;
};

struct ibv_srq_init_attr_ex {
	void *srq_context;
	struct ibv_srq_attr attr;
	uint32_t comp_mask;
	int srq_type;
	struct ibv_pd *pd;
	struct ibv_xrcd *xrcd;
	struct ibv_cq *cq;
	...;
};

struct ibv_ah { ...; };

struct ibv_mw {
	uint32_t rkey;
	...;
};

struct ibv_sge {
	uint64_t addr;
	uint32_t length;
	uint32_t lkey;
};

struct ibv_wc {
	uint64_t wr_id;
	int status;
	int opcode;
	uint32_t vendor_err;
	uint32_t byte_len;
	uint32_t imm_data; /* network byte order; or the invalidated key, in host byte order */
	uint32_t qp_num;
	uint32_t src_qp;
	unsigned int wc_flags;
	uint16_t slid;
	uint8_t sl;
	uint8_t dlid_path_bits;
	...;
};

const char *ibv_get_device_name(struct ibv_device *device);
const char *ibv_wc_status_str(int status);
int ibv_query_device(struct ibv_context *context, struct ibv_device_attr *attr);
struct ibv_pd *ibv_alloc_pd(struct ibv_context *context);
int ibv_dealloc_pd(struct ibv_pd *pd);
struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *addr, size_t length, int access);
struct ibv_mr *ibv_reg_dmabuf_mr(struct ibv_pd *pd, uint64_t offset, size_t length, uint64_t iova,
				 int fd, int access);
int ibv_dereg_mr(struct ibv_mr *mr);
struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *context);
int ibv_destroy_comp_channel(struct ibv_comp_channel *channel);
struct ibv_cq *ibv_create_cq(struct ibv_context *context, int cqe, void *cq_context,
			     struct ibv_comp_channel *channel, int comp_vector);
int ibv_destroy_cq(struct ibv_cq *cq);
int ibv_req_notify_cq(struct ibv_cq *cq, int solicited_only);
int ibv_poll_cq(struct ibv_cq *cq, int num_entries, struct ibv_wc *wc);
struct ibv_qp *ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *attr);
int ibv_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask);
int ibv_destroy_qp(struct ibv_qp *qp);
struct ibv_srq *ibv_create_srq(struct ibv_pd *pd, struct ibv_srq_init_attr *attr);
int ibv_modify_srq(struct ibv_srq *srq, struct ibv_srq_attr *attr, int mask);
int ibv_query_srq(struct ibv_srq *srq, struct ibv_srq_attr *attr);
int ibv_destroy_srq(struct ibv_srq *srq);
int ibv_get_srq_num(struct ibv_srq *srq, uint32_t *srq_num);
struct ibv_mw *ibv_alloc_mw(struct ibv_pd *pd, int type);
int ibv_dealloc_mw(struct ibv_mw *mw);
uint32_t ibv_inc_rkey(uint32_t rkey);
struct ibv_ah *ibv_create_ah(struct ibv_pd *pd, struct ibv_ah_attr *attr);
int ibv_destroy_ah(struct ibv_ah *ah);
int ibv_attach_mcast(struct ibv_qp *qp, const union ibv_gid *gid, uint16_t lid);
int ibv_detach_mcast(struct ibv_qp *qp, const union ibv_gid *gid, uint16_t lid);
int ibv_query_gid(struct ibv_context *context, uint8_t port_num, int index, union ibv_gid *gid);
const char *ibv_event_type_str(int event);

/* --- helpers.h --------------------------------------------------------------------------------- */

enum { AIORDMA_NO_PARAMETERS, AIORDMA_CONNECTION_PARAMETERS, ... };
struct aiordma_cm_event {
	uintptr_t id;
	uintptr_t listen_id;
	int event;
	int parameters;
	int status;
	int error;
	uint64_t arg;
	uintptr_t context;
	struct ibv_ah_attr ah_attr;
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

struct aiordma_async_event {
	uintptr_t element;
	int port_num;
	int event_type;
};

enum {
	AIORDMA_CREATE_QP,
	AIORDMA_POST_RECV,
	AIORDMA_RESOLVE_ROUTE,
	AIORDMA_ACCEPT,
	AIORDMA_DISCONNECT,
	AIORDMA_DESTROY_ID,
	AIORDMA_DESTROY_QP,
	AIORDMA_CONNECT,
	...
};
struct aiordma_ended_calls;
struct aiordma_id_calls {
	int calls;
	struct ibv_pd *pd;
	struct ibv_qp_init_attr init;
	struct ibv_qp **cell;
	uint64_t first_wr_id;
	uint64_t address;
	uint32_t lkey;
	int slot_size;
	int slots;
	int timeout_ms;
	struct rdma_conn_param parameters;
	char private_data[256];
	struct ibv_qp *qp;
	int failed;
	int error;
	int is_cancelled;
	struct aiordma_id_calls *next;
	...;
};
struct aiordma_ended_calls *aiordma_new_ended_calls(void);
int aiordma_ended_calls_fd(const struct aiordma_ended_calls *ended);
struct aiordma_id_calls *aiordma_take_ended_calls(struct aiordma_ended_calls *ended);
void aiordma_free_ended_calls(struct aiordma_ended_calls *ended);
struct aiordma_id_calls *aiordma_new_id_calls(struct rdma_cm_id *id);
void aiordma_free_id_calls(struct aiordma_id_calls *calls);
void aiordma_make_id_calls(struct aiordma_id_calls *calls);
void aiordma_submit_id_calls(struct aiordma_id_calls *calls, struct aiordma_ended_calls *ended);
void aiordma_own_id_calls(struct aiordma_id_calls *calls, struct aiordma_ended_calls *ended);
void aiordma_run_id_calls(struct aiordma_id_calls *calls);
int aiordma_destroy_id(struct rdma_cm_id *id);

int aiordma_get_cm_events(struct rdma_event_channel *channel, struct aiordma_cm_event *events,
			  int capacity);
int aiordma_take_event(struct rdma_cm_id *id, struct aiordma_cm_event *out);
int aiordma_resolve_addrinfo(struct rdma_cm_id *id, const char *node, const char *service,
			     const struct rdma_addrinfo *hints);
int aiordma_set_nonblocking(int fd);
int aiordma_comp_events(struct ibv_comp_channel *channel, struct ibv_cq **ready, int capacity);
int aiordma_comp_event(struct ibv_comp_channel *channel, struct ibv_cq **cq);
int aiordma_async_events(struct ibv_context *context, struct aiordma_async_event *events,
			 int capacity);
uint64_t aiordma_odp_caps(struct ibv_context *context);
int aiordma_query_port(struct ibv_context *context, uint8_t port_num, struct ibv_port_attr *attr);
int aiordma_ah_from_wc(struct ibv_context *context, uint8_t port_num, struct ibv_wc *wc,
		       const char *grh, struct ibv_ah_attr *attr);
void aiordma_await_posts(void);
int aiordma_destroy_qp(struct ibv_qp *qp);
struct ibv_send_wr { ...; };
struct aiordma_link { ...; };
int aiordma_post_send(struct ibv_qp *qp, struct ibv_send_wr *first);
int aiordma_post_all(struct ibv_qp **cell, struct ibv_send_wr *first);
int aiordma_post_list(struct ibv_qp **cell, uint64_t wr_id, int opcode, struct ibv_sge *segments,
		      int count, uint32_t flags, int64_t imm, uint64_t remote_addr, uint32_t rkey);
int aiordma_post_one(struct ibv_qp **cell, uint64_t wr_id, int opcode, uint64_t addr, uint32_t length,
		     uint32_t lkey, uint32_t flags, int64_t imm, uint64_t remote_addr,
		     uint32_t rkey);
struct aiordma_chain {
	int count;
	int capacity;
	struct aiordma_link *links;
};
void aiordma_add_link(struct aiordma_chain *chain, uint64_t wr_id, int opcode, uint64_t addr,
		      uint32_t length, uint32_t lkey, uint32_t flags, int64_t imm,
		      uint64_t remote_addr, uint32_t rkey);
int aiordma_post_chain(struct ibv_qp **cell, struct aiordma_chain *chain);
int aiordma_post_send_copy(struct ibv_qp **cell, uint64_t wr_id, uintptr_t addr, const char *data,
			   uint32_t length, uint32_t lkey, uint32_t flags, int64_t imm);
int aiordma_post_send_inline(struct ibv_qp **cell, uint64_t wr_id, const char *data, uint32_t length,
			     uint32_t flags, int64_t imm);
int aiordma_post_write_inline(struct ibv_qp **cell, uint64_t wr_id, const char *data, uint32_t length,
			      uint32_t flags, int64_t imm, uint64_t remote_addr, uint32_t rkey);
int aiordma_post_write_copy(struct ibv_qp **cell, uint64_t wr_id, uintptr_t addr, const char *data,
			    uint32_t length, uint32_t lkey, uint32_t flags, int64_t imm,
			    uint64_t remote_addr, uint32_t rkey);
int aiordma_post_atomic(struct ibv_qp **cell, uint64_t wr_id, int opcode, uintptr_t addr,
			uint32_t lkey, uint32_t flags, uint64_t remote_addr, uint32_t rkey,
			uint64_t compare_add, uint64_t swap);
int aiordma_post_bind_mw(struct ibv_qp **cell, uint64_t wr_id, struct ibv_mw *mw, uint32_t rkey,
			 struct ibv_mr *mr, uint64_t addr, uint64_t length, uint32_t access,
			 uint32_t flags);
int aiordma_post_ud_send(struct ibv_qp **cell, uint64_t wr_id, uintptr_t addr, uint32_t length,
			 uint32_t lkey, uint32_t flags, int64_t imm, struct ibv_ah *ah,
			 uint32_t remote_qpn, uint32_t remote_qkey);
int aiordma_post_recv(struct ibv_qp **cell, uint64_t wr_id, uintptr_t addr, uint32_t length,
		      uint32_t lkey);
int aiordma_post_srq_recv(struct ibv_srq **cell, uint64_t wr_id, uintptr_t addr, uint32_t length,
			  uint32_t lkey);
int aiordma_set_min_rnr_timer(struct ibv_qp *qp, uint8_t timer);
int aiordma_set_retry_count(struct ibv_qp *qp, uint8_t count);
int aiordma_query_qp_state(struct ibv_qp *qp, int *state);
int aiordma_ifaddrs(char *text, size_t size);
void aiordma_load_error(char *text, size_t size);
