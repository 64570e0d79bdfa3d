/* C helpers of aiordma: several C calls in one step, to lose nothing in between or to save time. */
#ifndef AIORDMA_HELPERS_H
#define AIORDMA_HELPERS_H

#include <errno.h>
#include <netdb.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>
#include <rdma/rdma_verbs.h>

#include "work_requests.h"

/* New in rdma-core 60. #ifdef cannot test if an enumerator exists. */
#define AIORDMA_CM_EVENT_ADDRINFO_RESOLVED 16
#define AIORDMA_CM_EVENT_ADDRINFO_ERROR 17
#define AIORDMA_CM_EVENT_USER 18
#define AIORDMA_CM_EVENT_INTERNAL 19
#define AIORDMA_RAI_SA 0x10
#define AIORDMA_RAI_DNS 0x20
int rdma_resolve_addrinfo(struct rdma_cm_id *id, const char *node, const char *service,
			  const struct rdma_addrinfo *hints);
int rdma_query_addrinfo(struct rdma_cm_id *id, struct rdma_addrinfo **info);
int rdma_write_cm_event(struct rdma_cm_id *id, enum rdma_cm_event_type event, int status,
			uint64_t arg);

/* Providers return an errno, positive or (libsiw) negative, or -1 with errno (libsiw as well). */
static inline int positive(int result)
{
	return result == -1 && errno ? errno : abs(result);
}

/* Which members of `struct aiordma_cm_event` are set besides those of all events. */
enum {
	AIORDMA_NO_PARAMETERS,
	AIORDMA_CONNECTION_PARAMETERS, /* `qp_num`, and what follows `qkey` */
	AIORDMA_OTHER_PARAMETERS,
};

/* A copy of an rdma_cm_event without pointers to its data. The event is already acknowledged. */
struct aiordma_cm_event {
	uintptr_t id;
	uintptr_t listen_id;
	int event;
	int parameters;
	int status;
	int error;		    /* the errno if `status` is -1, else 0 */
	uint64_t arg;		    /* of the events of rdma-core 60 and later */
	uintptr_t context;	    /* the context argument of rdma_join_multicast() */
	struct ibv_ah_attr ah_attr; /* datagrams and multicast only */
	uint32_t qp_num;
	uint32_t qkey; /* datagrams and multicast only */
	uint8_t responder_resources;
	uint8_t initiator_depth;
	uint8_t flow_control;
	uint8_t retry_count;
	uint8_t rnr_retry_count;
	uint8_t srq;
	uint8_t private_data_len;
	uint8_t private_data[255];
};

/* A copy of an ibv_async_event, which is already acknowledged. */
struct aiordma_async_event {
	uintptr_t element; /* the context of the queue or queue pair, or 0 */
	int port_num;
	int event_type;
};

/* The calls of `struct aiordma_id_calls`, in the order in which they are made. */
enum {
	AIORDMA_CREATE_QP = 1 << 0,
	AIORDMA_POST_RECV = 1 << 1,
	AIORDMA_RESOLVE_ROUTE = 1 << 2,
	AIORDMA_ACCEPT = 1 << 3,
	AIORDMA_DISCONNECT = 1 << 4,
	AIORDMA_DESTROY_ID = 1 << 5,
	AIORDMA_DESTROY_QP = 1 << 6,
	AIORDMA_CONNECT = 1 << 7, /* when the event ROUTE_RESOLVED is read */
};

/*
 * Calls on an id, with their arguments. Pointers of librdmacm and libibverbs are valid until the
 * calls have ended; everything else is copied, so that Python can exit at any time.
 */
struct aiordma_id_calls {
	int calls; /* which calls */
	struct rdma_cm_id *id;
	/* rdma_create_qp(): the queue pair is stored in `*cell`, too */
	struct ibv_pd *pd;
	struct ibv_qp_init_attr init;
	struct ibv_qp **cell;
	/* ibv_post_recv(), for each slot */
	uint64_t first_wr_id;
	uint64_t address;
	uint32_t lkey;
	int slot_size;
	int slots;
	/* rdma_resolve_route() */
	int timeout_ms;
	/* rdma_accept() or rdma_connect(); `private_data` is memory for that of the parameters */
	struct rdma_conn_param parameters;
	char private_data[256];
	/* ibv_destroy_qp() */
	struct ibv_qp *qp;
	/* the result: the call that has failed, or 0, and its errno */
	int failed;
	int error;
	/* set by the loop's thread: calls that have not begun are not made */
	int is_cancelled;
	int is_under_way;
	int is_dropped;
	struct aiordma_ended_calls *ended;
	struct aiordma_id_calls *next;
	struct aiordma_id_calls *next_awaiting; /* the event ROUTE_RESOLVED */
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
void aiordma_forget_route(struct rdma_cm_id *id);
int aiordma_connect_resolved(struct rdma_cm_id *id);
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
int aiordma_post_send(struct ibv_qp *qp, struct ibv_send_wr *first);
int aiordma_post_all(struct ibv_qp **cell, struct ibv_send_wr *first);
int aiordma_post_list(struct ibv_qp **cell, uint64_t wr_id, int opcode, struct ibv_sge *segments,
		      int count, uint32_t flags, int64_t imm, uint64_t remote_addr, uint32_t rkey);
int aiordma_post_one(struct ibv_qp **cell, uint64_t wr_id, int opcode, uint64_t addr,
		     uint32_t length, uint32_t lkey, uint32_t flags, int64_t imm,
		     uint64_t remote_addr, uint32_t rkey);
void aiordma_add_link(struct aiordma_chain *chain, uint64_t wr_id, int opcode, uint64_t addr,
		      uint32_t length, uint32_t lkey, uint32_t flags, int64_t imm,
		      uint64_t remote_addr, uint32_t rkey);
int aiordma_post_chain(struct ibv_qp **cell, struct aiordma_chain *chain);
int aiordma_post_send_copy(struct ibv_qp **cell, uint64_t wr_id, uintptr_t addr, const char *data,
			   uint32_t length, uint32_t lkey, uint32_t flags, int64_t imm);
int aiordma_post_send_inline(struct ibv_qp **cell, uint64_t wr_id, const char *data,
			     uint32_t length, uint32_t flags, int64_t imm);
int aiordma_post_write_inline(struct ibv_qp **cell, uint64_t wr_id, const char *data,
			      uint32_t length, uint32_t flags, int64_t imm, uint64_t remote_addr,
			      uint32_t rkey);
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

#endif
