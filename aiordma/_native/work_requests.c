/*
 * Posting work requests. Each function returns 0 or a positive errno.
 *
 * A queue is named by a cell: the memory where its QueuePair stores the C pointer. The cell becomes
 * NULL when the queue is destroyed. Another thread can do that at any time, because this one posts
 * without the interpreter's lock. `imm` is immediate data in host byte order; negative: none.
 */
#include "helpers.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* Each thread locks it for reading while it posts. */
static pthread_rwlock_t posting = PTHREAD_RWLOCK_INITIALIZER;

static void reset_posting(void)
{
	posting = (pthread_rwlock_t)PTHREAD_RWLOCK_INITIALIZER;
}

/* A forked child does not have the threads that had locked it. */
__attribute__((constructor)) static void reset_posting_in_children(void)
{
	pthread_atfork(NULL, NULL, reset_posting);
}

/* Wait until no thread posts any more to a queue whose cell the caller has set to NULL. */
void aiordma_await_posts(void)
{
	pthread_rwlock_wrlock(&posting);
	pthread_rwlock_unlock(&posting);
}

/*
 * Destroy a queue pair when no thread posts to it any more. The caller has set its cell to NULL,
 * with the interpreter's lock held: the fast path posts small requests with that lock only. Returns
 * 0 or an errno.
 */
int aiordma_destroy_qp(struct ibv_qp *qp)
{
	aiordma_await_posts();
	return ibv_destroy_qp(qp);
}

/*
 * Post a request and the requests linked to it. All sends are posted here, except those of
 * rdma_verbs.h. The caller makes sure that no other thread destroys the queue pair meanwhile. It
 * can be NULL.
 */
int aiordma_post_send(struct ibv_qp *qp, struct ibv_send_wr *first)
{
	struct ibv_send_wr *bad;

	errno = 0;
	return qp ? positive(ibv_post_send(qp, first, &bad)) : EINVAL;
}

/* Do what aiordma_post_send() does, in a thread that does not hold the interpreter's lock. */
int aiordma_post_all(struct ibv_qp **cell, struct ibv_send_wr *first)
{
	int error;

	pthread_rwlock_rdlock(&posting);
	error = aiordma_post_send(__atomic_load_n(cell, __ATOMIC_ACQUIRE), first);
	pthread_rwlock_unlock(&posting);
	return error;
}

static int post(struct ibv_qp **cell, struct ibv_send_wr *wr, int64_t imm)
{
	aiordma_fill_imm(wr, imm);
	return aiordma_post_all(cell, wr);
}

/*
 * Send, write or read the memory in `segments`: see aiordma_request().
 *
 * A read of nothing has a segment of no bytes. Without one, siw takes the segment of an older
 * request, and reads as many bytes.
 */
int aiordma_post_list(struct ibv_qp **cell, uint64_t wr_id, int opcode, struct ibv_sge *segments,
		      int count, uint32_t flags, int64_t imm, uint64_t remote_addr, uint32_t rkey)
{
	struct ibv_sge nothing = { .length = 0 };
	int is_empty = opcode == IBV_WR_RDMA_READ && !count;
	struct ibv_send_wr wr =
		aiordma_request(wr_id, opcode, is_empty ? &nothing : segments, is_empty ? 1 : count,
				flags, imm, remote_addr, rkey);

	return aiordma_post_all(cell, &wr);
}

/* Send, write or read memory in one piece. */
int aiordma_post_one(struct ibv_qp **cell, uint64_t wr_id, int opcode, uint64_t addr,
		     uint32_t length, uint32_t lkey, uint32_t flags, int64_t imm,
		     uint64_t remote_addr, uint32_t rkey)
{
	struct ibv_sge sge = { .addr = addr, .length = length, .lkey = lkey };

	return aiordma_post_list(cell, wr_id, opcode, &sge, 1, flags, imm, remote_addr, rkey);
}

/*
 * Append a request with the arguments of aiordma_post_one() to a chain. The caller makes sure that
 * there is room.
 */
void aiordma_add_link(struct aiordma_chain *chain, uint64_t wr_id, int opcode, uint64_t addr,
		      uint32_t length, uint32_t lkey, uint32_t flags, int64_t imm,
		      uint64_t remote_addr, uint32_t rkey)
{
	struct ibv_sge segment = { .addr = addr, .length = length, .lkey = lkey };

	aiordma_append(chain, wr_id, opcode, segment, flags, imm, remote_addr, rkey);
}

/* Post a chain, in one call of ibv_post_send(). On failure its first requests might be posted. */
int aiordma_post_chain(struct ibv_qp **cell, struct aiordma_chain *chain)
{
	return aiordma_post_all(cell, &chain->links->wr);
}

/* Copy `data` into the registered memory at `addr`, and send it. */
int aiordma_post_send_copy(struct ibv_qp **cell, uint64_t wr_id, uintptr_t addr, const char *data,
			   uint32_t length, uint32_t lkey, uint32_t flags, int64_t imm)
{
	struct ibv_sge sge = { .addr = addr, .length = length, .lkey = lkey };

	memcpy((void *)addr, data, length);
	return aiordma_post_list(cell, wr_id, imm < 0 ? IBV_WR_SEND : IBV_WR_SEND_WITH_IMM, &sge,
				 length ? 1 : 0, flags, imm, 0, 0);
}

/* Send bytes inline: the device copies them while posting, so `data` can be reused on return. */
int aiordma_post_send_inline(struct ibv_qp **cell, uint64_t wr_id, const char *data,
			     uint32_t length, uint32_t flags, int64_t imm)
{
	struct ibv_sge sge = { .addr = (uintptr_t)data, .length = length };

	return aiordma_post_list(cell, wr_id, imm < 0 ? IBV_WR_SEND : IBV_WR_SEND_WITH_IMM, &sge,
				 length ? 1 : 0, flags | IBV_SEND_INLINE, imm, 0, 0);
}

/* Write bytes inline: see aiordma_post_send_inline(). */
int aiordma_post_write_inline(struct ibv_qp **cell, uint64_t wr_id, const char *data,
			      uint32_t length, uint32_t flags, int64_t imm, uint64_t remote_addr,
			      uint32_t rkey)
{
	struct ibv_sge sge = { .addr = (uintptr_t)data, .length = length };
	int opcode = imm < 0 ? IBV_WR_RDMA_WRITE : IBV_WR_RDMA_WRITE_WITH_IMM;

	return aiordma_post_list(cell, wr_id, opcode, &sge, length ? 1 : 0, flags | IBV_SEND_INLINE,
				 imm, remote_addr, rkey);
}

/* Copy `data` into the registered memory at `addr`, and write it. */
int aiordma_post_write_copy(struct ibv_qp **cell, uint64_t wr_id, uintptr_t addr, const char *data,
			    uint32_t length, uint32_t lkey, uint32_t flags, int64_t imm,
			    uint64_t remote_addr, uint32_t rkey)
{
	struct ibv_sge sge = { .addr = addr, .length = length, .lkey = lkey };
	int opcode = imm < 0 ? IBV_WR_RDMA_WRITE : IBV_WR_RDMA_WRITE_WITH_IMM;

	memcpy((void *)addr, data, length);
	return aiordma_post_list(cell, wr_id, opcode, &sge, length ? 1 : 0, flags, imm, remote_addr,
				 rkey);
}

/* Post an atomic operation on 8 bytes of the peer's memory. Their old value is stored at `addr`. */
int aiordma_post_atomic(struct ibv_qp **cell, uint64_t wr_id, int opcode, uintptr_t addr,
			uint32_t lkey, uint32_t flags, uint64_t remote_addr, uint32_t rkey,
			uint64_t compare_add, uint64_t swap)
{
	struct ibv_sge sge = { .addr = addr, .length = 8, .lkey = lkey };
	struct ibv_send_wr wr = {
		.wr_id = wr_id,
		.sg_list = &sge,
		.num_sge = 1,
		.opcode = opcode,
		.send_flags = flags,
		.wr.atomic = {
			.remote_addr = remote_addr,
			.compare_add = compare_add,
			.swap = swap,
			.rkey = rkey,
		},
	};

	return post(cell, &wr, -1);
}

/* Bind a memory window of type 2 to a part of a region. The peer uses the key `rkey` for it. */
int aiordma_post_bind_mw(struct ibv_qp **cell, uint64_t wr_id, struct ibv_mw *mw, uint32_t rkey,
			 struct ibv_mr *mr, uint64_t addr, uint64_t length, uint32_t access,
			 uint32_t flags)
{
	struct ibv_send_wr wr = {
		.wr_id = wr_id,
		.opcode = IBV_WR_BIND_MW,
		.send_flags = flags,
		.bind_mw = {
			.mw = mw,
			.rkey = rkey,
			.bind_info = {
				.mr = mr,
				.addr = addr,
				.length = length,
				.mw_access_flags = access,
			},
		},
	};

	return post(cell, &wr, -1);
}

/* Send a datagram. */
int aiordma_post_ud_send(struct ibv_qp **cell, uint64_t wr_id, uintptr_t addr, uint32_t length,
			 uint32_t lkey, uint32_t flags, int64_t imm, struct ibv_ah *ah,
			 uint32_t remote_qpn, uint32_t remote_qkey)
{
	struct ibv_sge sge = { .addr = addr, .length = length, .lkey = lkey };
	struct ibv_send_wr wr = {
		.wr_id = wr_id,
		.sg_list = &sge,
		.num_sge = length ? 1 : 0,
		.opcode = imm < 0 ? IBV_WR_SEND : IBV_WR_SEND_WITH_IMM,
		.send_flags = flags,
		.wr.ud = { .ah = ah, .remote_qpn = remote_qpn, .remote_qkey = remote_qkey },
	};

	if (!ah)
		return EINVAL;
	return post(cell, &wr, imm);
}

int aiordma_post_recv(struct ibv_qp **cell, uint64_t wr_id, uintptr_t addr, uint32_t length,
		      uint32_t lkey)
{
	struct ibv_sge sge = { .addr = addr, .length = length, .lkey = lkey };
	struct ibv_recv_wr wr = { .wr_id = wr_id, .sg_list = &sge, .num_sge = 1 };
	struct ibv_recv_wr *bad;
	struct ibv_qp *qp;
	int error = EINVAL;

	pthread_rwlock_rdlock(&posting);
	qp = __atomic_load_n(cell, __ATOMIC_ACQUIRE);
	errno = 0;
	if (qp)
		error = positive(ibv_post_recv(qp, &wr, &bad));
	pthread_rwlock_unlock(&posting);
	return error;
}

int aiordma_post_srq_recv(struct ibv_srq **cell, uint64_t wr_id, uintptr_t addr, uint32_t length,
			  uint32_t lkey)
{
	struct ibv_sge sge = { .addr = addr, .length = length, .lkey = lkey };
	struct ibv_recv_wr wr = { .wr_id = wr_id, .sg_list = &sge, .num_sge = 1 };
	struct ibv_recv_wr *bad;
	struct ibv_srq *srq;
	int error = EINVAL;

	pthread_rwlock_rdlock(&posting);
	srq = __atomic_load_n(cell, __ATOMIC_ACQUIRE);
	errno = 0;
	if (srq)
		error = positive(ibv_post_srq_recv(srq, &wr, &bad));
	pthread_rwlock_unlock(&posting);
	return error;
}

/* Set the time after which the peer repeats a send that found no receive posted here. */
int aiordma_set_min_rnr_timer(struct ibv_qp *qp, uint8_t timer)
{
	struct ibv_qp_attr attr = { .min_rnr_timer = timer };

	if (!qp)
		return EINVAL;
	return abs(ibv_modify_qp(qp, &attr, IBV_QP_MIN_RNR_TIMER));
}

/* Store the state of the queue pair. The kernel can have changed it: qp->state has an older one. */
int aiordma_query_qp_state(struct ibv_qp *qp, int *state)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RESET };
	struct ibv_qp_init_attr init;
	int error = qp ? abs(ibv_query_qp(qp, &attr, IBV_QP_STATE, &init)) : EINVAL;

	*state = attr.qp_state;
	return error;
}

static int has_failed(struct ibv_qp *qp)
{
	int state;

	return aiordma_query_qp_state(qp, &state) || state == IBV_QPS_ERR;
}

/* Modify a queue pair whose send queue drains. A queue without requests drains within microseconds,
 * but in another thread of the kernel: until then, the call fails. It also fails if the connection
 * ends meanwhile. */
static int modify_drained(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask)
{
	const struct timespec millisecond = { .tv_nsec = 1000000 };
	int error, tries;

	for (tries = 0; tries < 1000; tries++) {
		error = ibv_modify_qp(qp, attr, mask);
		if (!error || has_failed(qp))
			break;
		nanosleep(&millisecond, NULL);
	}
	return abs(error);
}

/* The retry count can only be changed while the send queue is drained (SQD). That call makes the
 * device drain the queue again. */
int aiordma_set_retry_count(struct ibv_qp *qp, uint8_t count)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_SQD, .retry_cnt = count };
	int error, resumed;

	if (!qp)
		return EINVAL;
	error = ibv_modify_qp(qp, &attr, IBV_QP_STATE);
	if (error)
		return abs(error);
	error = modify_drained(qp, &attr, IBV_QP_STATE | IBV_QP_RETRY_CNT);
	attr.qp_state = IBV_QPS_RTS;
	resumed = modify_drained(qp, &attr, IBV_QP_STATE);
	return error ? error : resumed;
}
