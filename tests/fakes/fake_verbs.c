/*
 * A verbs provider without a device. It records the posted requests, and returns the completions
 * that a test has added. The inline functions of verbs.h call it through the context.
 */
#include <errno.h>
#include <infiniband/verbs.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define LIMIT 65536
#define PRIVATE_WORDS 512

struct posted {
	uint64_t wr_id;
	uint64_t address;
	char kind; /* s: send, r: receive, q: receive of a shared queue */
	int opcode;
	unsigned int flags;
	int num_sge;
	unsigned int length;
	unsigned int lkey;
	uint64_t remote;
	unsigned int rkey;
	unsigned int imm_data; /* in network byte order */
	unsigned char data[64]; /* a copy of a send's memory at the time of the posting */
};

struct fake {
	/* Functions that libibverbs itself looks up, for ibv_get_cq_event(), before the context. */
	void *private_words[PRIVATE_WORDS];
	struct verbs_context verbs;
	struct ibv_qp qp;
	struct ibv_srq srq;
	struct ibv_cq cq;
	struct ibv_comp_channel channel;
	struct ibv_qp *qp_cell[1];
	struct ibv_srq *srq_cell[1];
	struct posted posts[LIMIT];
	struct ibv_wc waiting[LIMIT];
	unsigned int posted;
	unsigned int put;
	unsigned int taken;
	unsigned int polls;
	unsigned int arms;
	unsigned int calls; /* of ibv_post_send() */
	int post_result;
	int post_errno;
	int accepted; /* requests that are accepted before the others are refused */
	int poll_result; /* if negative */
	int arm_result;
	int is_blocking; /* threads that post wait until it is 0 */
	int blocked; /* threads that wait */
};

static struct fake *fake_of(struct ibv_context *context)
{
	return (struct fake *)((char *)context - offsetof(struct fake, verbs.context));
}

static struct posted *record(struct fake *fake, char kind, uint64_t wr_id, struct ibv_sge *list,
			     int num_sge)
{
	struct posted *posted = &fake->posts[fake->posted++ % LIMIT];

	memset(posted, 0, sizeof(*posted));
	posted->kind = kind;
	posted->wr_id = wr_id;
	posted->num_sge = num_sge;
	if (num_sge) {
		posted->address = list->addr;
		posted->length = list->length;
		posted->lkey = list->lkey;
	}
	return posted;
}

static void wait_while_blocked(struct fake *fake)
{
	__atomic_add_fetch(&fake->blocked, 1, __ATOMIC_SEQ_CST);
	while (__atomic_load_n(&fake->is_blocking, __ATOMIC_SEQ_CST))
		usleep(1000);
	__atomic_sub_fetch(&fake->blocked, 1, __ATOMIC_SEQ_CST);
}

static int refused(struct fake *fake)
{
	if (fake->post_errno)
		errno = fake->post_errno;
	return fake->post_result;
}

static int post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
	struct fake *fake = fake_of(qp->context);
	struct posted *posted;

	wait_while_blocked(fake);
	fake->calls++;
	for (; wr; wr = wr->next) {
		if (fake->post_result && !fake->accepted) {
			*bad = wr;
			return refused(fake);
		}
		if (fake->accepted)
			fake->accepted--;
		posted = record(fake, 's', wr->wr_id, wr->sg_list, wr->num_sge);
		posted->opcode = wr->opcode;
		posted->flags = wr->send_flags;
		posted->remote = wr->wr.rdma.remote_addr;
		posted->rkey = wr->wr.rdma.rkey;
		posted->imm_data = wr->imm_data;
		if (posted->length <= sizeof(posted->data))
			memcpy(posted->data, (void *)(uintptr_t)posted->address, posted->length);
	}
	return 0;
}

static int post_receive(struct fake *fake, char kind, struct ibv_recv_wr *wr,
			struct ibv_recv_wr **bad)
{
	wait_while_blocked(fake);
	if (fake->post_result) {
		*bad = wr;
		return refused(fake);
	}
	record(fake, kind, wr->wr_id, wr->sg_list, wr->num_sge);
	return wr->next ? EINVAL : 0;
}

static int post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
	return post_receive(fake_of(qp->context), 'r', wr, bad);
}

static int post_srq_recv(struct ibv_srq *srq, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
	return post_receive(fake_of(srq->context), 'q', wr, bad);
}

static int poll_cq(struct ibv_cq *cq, int entries, struct ibv_wc *batch)
{
	struct fake *fake = fake_of(cq->context);
	unsigned int put = __atomic_load_n(&fake->put, __ATOMIC_ACQUIRE);
	int count = 0;

	__atomic_add_fetch(&fake->polls, 1, __ATOMIC_RELAXED);
	if (fake->poll_result < 0)
		return fake->poll_result;
	while (count < entries && fake->taken != put)
		batch[count++] = fake->waiting[fake->taken++ % LIMIT];
	return count;
}

static int req_notify_cq(struct ibv_cq *cq, int solicited_only)
{
	struct fake *fake = fake_of(cq->context);

	fake->arms++;
	return solicited_only ? EINVAL : fake->arm_result;
}

static int nothing(void)
{
	return 0;
}

struct fake *fake_new(void)
{
	struct fake *fake = calloc(1, sizeof(*fake));
	struct ibv_context *context = &fake->verbs.context;
	int index;

	for (index = 0; index < PRIVATE_WORDS; index++)
		fake->private_words[index] = (void *)nothing;
	fake->verbs.priv = (void *)fake->private_words;
	context->ops.post_send = post_send;
	context->ops.post_recv = post_recv;
	context->ops.post_srq_recv = post_srq_recv;
	context->ops.poll_cq = poll_cq;
	context->ops.req_notify_cq = req_notify_cq;
	fake->qp.context = fake->srq.context = fake->cq.context = context;
	fake->channel.context = context;
	pthread_mutex_init(&fake->cq.mutex, NULL);
	pthread_cond_init(&fake->cq.cond, NULL);
	fake->qp_cell[0] = &fake->qp;
	fake->srq_cell[0] = &fake->srq;
	return fake;
}

void fake_free(struct fake *fake)
{
	free(fake);
}

uintptr_t fake_address(struct fake *fake, char what)
{
	switch (what) {
	case 'p':
		return (uintptr_t)fake->qp_cell;
	case 's':
		return (uintptr_t)fake->srq_cell;
	case 'c':
		return (uintptr_t)&fake->cq;
	default:
		return (uintptr_t)&fake->channel;
	}
}

void fake_destroy(struct fake *fake)
{
	fake->qp_cell[0] = NULL;
	fake->srq_cell[0] = NULL;
}

void fake_refuse(struct fake *fake, int result, int code)
{
	fake->post_result = result;
	fake->post_errno = code;
}

/* Accept `count` sends before fake_refuse() takes effect. */
void fake_accept_sends(struct fake *fake, int count)
{
	fake->accepted = count;
}

void fake_block_posts(struct fake *fake, int on)
{
	__atomic_store_n(&fake->is_blocking, on, __ATOMIC_SEQ_CST);
}

void fake_break(struct fake *fake, int poll_result, int arm_result)
{
	fake->poll_result = poll_result;
	fake->arm_result = arm_result;
}

unsigned int fake_count(struct fake *fake, char what)
{
	switch (what) {
	case 'p':
		return fake->posted;
	case 'a':
		return fake->arms;
	case 'w':
		return fake->put - fake->taken;
	case 'h':
		return __atomic_load_n(&fake->blocked, __ATOMIC_SEQ_CST);
	case 'c':
		return fake->calls;
	case 'e':
		return fake->cq.comp_events_completed;
	default:
		return __atomic_load_n(&fake->polls, __ATOMIC_RELAXED);
	}
}

struct posted *fake_post(struct fake *fake, unsigned int index)
{
	return &fake->posts[index % LIMIT];
}

/* Add a completion. Any thread can call this, but only one at a time. */
void fake_put(struct fake *fake, uint64_t wr_id, int status, int opcode, unsigned int length,
	      unsigned int flags, unsigned int imm_data, unsigned int qp_num)
{
	struct ibv_wc *wc = &fake->waiting[fake->put % LIMIT];

	memset(wc, 0, sizeof(*wc));
	wc->wr_id = wr_id;
	wc->status = status;
	wc->opcode = opcode;
	wc->byte_len = length;
	wc->wc_flags = flags;
	wc->imm_data = imm_data;
	wc->qp_num = qp_num;
	__atomic_store_n(&fake->put, fake->put + 1, __ATOMIC_RELEASE);
}

void fake_watch(struct fake *fake, int fd)
{
	fake->channel.fd = fd;
}
