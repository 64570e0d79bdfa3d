/*
 * The C half of the simulated devices: the queues that work requests are posted to, and the queues
 * that completions are taken from. Python executes the requests (network.py) and adds the
 * completions. Nothing here waits, so a post and a poll are as they are with a real provider.
 */
#ifndef SIMULATOR_DEVICE_H
#define SIMULATOR_DEVICE_H

#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>
#include <stdint.h>

#define SIM_MAX_SGE 16
#define SIM_MAX_INLINE 256
#define ONE_MORE 0xffffffff

/* A copy of a posted work request, of either kind. */
struct sim_request {
	unsigned int order; /* among the requests of all queues */
	uint64_t wr_id;
	int opcode;
	unsigned int flags;
	uint32_t imm_data; /* in network byte order, or the key to invalidate */
	int num_sge;
	struct ibv_sge sge[SIM_MAX_SGE];
	uint64_t remote_addr;
	uint32_t rkey;
	uint64_t compare_add;
	uint64_t swap;
	struct ibv_ah *ah;
	uint32_t remote_qpn;
	uint32_t remote_qkey;
	struct ibv_mw *mw;
	struct ibv_mr *mr;
	uint64_t bind_addr;
	uint64_t bind_length;
	unsigned int bind_access;
	unsigned int inline_length;
	char inline_data[SIM_MAX_INLINE];
};

/*
 * A work queue. An entry is taken when the device begins to execute it, and free again when the
 * program has polled its completion or that of a later request.
 */
struct sim_queue {
	struct sim_request *ring;
	unsigned int capacity;
	unsigned int posted;
	unsigned int taken;
	unsigned int freed;
	unsigned int calls; /* of ibv_post_send() or ibv_post_recv() */
	int refusal;	    /* the result of posting, if not 0 */
	int refusal_errno;
	unsigned int accepted; /* requests that are accepted before the refusal takes effect */
};

struct sim_qp {
	struct ibv_qp qp;
	struct sim_queue sends;
	struct sim_queue receives;
	struct sim_queue *receive_queue; /* its own, or that of a shared receive queue */
	unsigned int max_inline;
	unsigned int max_sge;
	int sq_sig_all;
};

struct sim_srq {
	struct ibv_srq srq;
	struct sim_queue receives;
};

/* A completion, and the entries that are free once it is polled. */
struct sim_completion {
	struct ibv_wc wc;
	struct sim_queue *queue;
	unsigned int freed;
};

struct sim_cq {
	struct ibv_cq cq;
	struct sim_completion *ring;
	unsigned int capacity;
	unsigned int put;
	unsigned int visible; /* completions before this number can be polled */
	unsigned int polled;
	int is_armed;
	int has_overflowed;
	unsigned int hidden_until; /* the number of the poll that finds completions again */
	int poll_failure;	   /* the result of polling, if negative */
	int arm_failure;	   /* the result of arming, if not 0 */
	unsigned int polls;
	unsigned int arms;
	unsigned int events;	   /* read by ibv_get_cq_event() */
	unsigned int acknowledged; /* by ibv_ack_cq_events() */
};

struct sim_channel {
	struct ibv_comp_channel channel;
	struct ibv_cq *events[1024];
	unsigned int raised;
	unsigned int read;
	int failure; /* errno of ibv_get_cq_event(), if not 0 */
};

struct sim_context {
	struct verbs_context verbs;
	struct ibv_device device;
	struct ibv_async_event events[256];
	unsigned int raised;
	unsigned int read;
	int failure; /* errno of ibv_get_async_event(), if not 0 */
};

struct sim_context *sim_new_context(const char *name, int transport);
struct sim_qp *sim_new_qp(struct ibv_context *context, struct ibv_qp_init_attr *attr,
			  uint32_t number);
struct sim_srq *sim_new_srq(struct ibv_context *context, unsigned int depth);
struct sim_cq *sim_new_cq(struct ibv_context *context, int entries,
			  struct ibv_comp_channel *channel);
struct sim_channel *sim_new_channel(struct ibv_context *context);
void sim_drop_completions(struct sim_qp *qp);
void sim_free_qp(struct sim_qp *qp);
void sim_free_srq(struct sim_srq *srq);
void sim_free_cq(struct sim_cq *cq);
void sim_free_channel(struct sim_channel *channel);
struct sim_request *sim_take(struct sim_queue *queue);
int sim_complete(struct sim_cq *cq, const struct ibv_wc *wc, struct sim_queue *queue,
		 unsigned int freed, int is_late);
void sim_raise(struct sim_context *context, int type, void *element, int port_num);
void sim_raise_completion_event(struct sim_cq *cq);
void sim_wake(int fd);
void sim_hold_posts(int on);
int sim_held_posts(void);

#endif
