/* The queues of the simulated devices, and the functions of verbs.h that use them. */
#define _GNU_SOURCE
#include "device.h"

#include <errno.h>
#include <pthread.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#undef ibv_reg_mr
#undef ibv_query_port

/* Guards all queues: threads can post without the interpreter's lock. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* Make a descriptor readable once more. */
void sim_wake(int fd)
{
	uint64_t one = 1;

	if (write(fd, &one, sizeof(one)) != sizeof(one))
		abort();
}

static int new_event_fd(void)
{
	return eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK | EFD_SEMAPHORE);
}

/* Read one event. Returns -1 with errno if there is none, or if reading must fail. */
static int read_event_fd(int fd, int failure)
{
	uint64_t count;

	errno = failure;
	if (failure)
		return -1;
	return read(fd, &count, sizeof(count)) == sizeof(count) ? 0 : -1;
}

/* Free memory that nothing may use any more. Other values make a later use visible. */
static void poison_and_free(void *memory, size_t size)
{
	memset(memory, 0xdd, size);
	__asm__ volatile("" : : "r"(memory) : "memory"); /* or the compiler leaves memset() out */
	free(memory);
}

/* --- posting --- */

static void open_queue(struct sim_queue *queue, unsigned int capacity)
{
	queue->capacity = capacity;
	queue->ring = calloc(capacity + 1, sizeof(*queue->ring));
}

static unsigned int posted_in_total;
static int is_holding, held;

/* Let the threads that post wait, until `on` is 0. */
void sim_hold_posts(int on)
{
	__atomic_store_n(&is_holding, on, __ATOMIC_RELAXED);
}

/* Return the number of threads that wait. */
int sim_held_posts(void)
{
	return __atomic_load_n(&held, __ATOMIC_RELAXED);
}

/*
 * Use the queue without the lock, as a provider that rings a doorbell. The lock would put a post
 * before the destruction that follows it, and hide from ThreadSanitizer that nothing else does.
 */
static void ring_doorbell(struct sim_queue *queue)
{
	__atomic_add_fetch(&held, 1, __ATOMIC_RELAXED);
	while (__atomic_load_n(&is_holding, __ATOMIC_RELAXED))
		usleep(1000);
	__atomic_sub_fetch(&held, 1, __ATOMIC_RELAXED);
	__atomic_add_fetch(&queue->calls, 1, __ATOMIC_RELAXED);
}

/* Return the entry for the next request, or NULL if the request is refused; then errno is set. */
static struct sim_request *next_entry(struct sim_queue *queue, int *result)
{
	*result = 0;
	if (queue->refusal) {
		if (!queue->accepted) {
			errno = queue->refusal_errno ? queue->refusal_errno : errno;
			*result = queue->refusal;
			return NULL;
		}
		queue->accepted--;
	}
	if (queue->posted - queue->freed >= queue->capacity) {
		*result = ENOMEM;
		return NULL;
	}
	return memset(&queue->ring[queue->posted % queue->capacity], 0, sizeof(struct sim_request));
}

static int copy_sge(struct sim_request *request, const struct ibv_sge *list, int count,
		    unsigned int limit)
{
	if (count < 0 || (unsigned int)count > limit || count > SIM_MAX_SGE)
		return EINVAL;
	request->num_sge = count;
	if (count)
		memcpy(request->sge, list, count * sizeof(*list));
	return 0;
}

static int copy_inline(struct sim_request *request, unsigned int limit)
{
	int index;

	for (index = 0; index < request->num_sge; index++) {
		const struct ibv_sge *sge = &request->sge[index];

		if (request->inline_length + sge->length > limit)
			return EINVAL;
		memcpy(request->inline_data + request->inline_length, (void *)(uintptr_t)sge->addr,
		       sge->length);
		request->inline_length += sge->length;
	}
	return 0;
}

static int copy_send(struct sim_qp *qp, struct sim_request *request, const struct ibv_send_wr *wr)
{
	int error = copy_sge(request, wr->sg_list, wr->num_sge, qp->max_sge);

	request->wr_id = wr->wr_id;
	request->opcode = wr->opcode;
	request->flags = wr->send_flags | (qp->sq_sig_all ? IBV_SEND_SIGNALED : 0);
	request->imm_data = wr->imm_data;
	if (wr->opcode == IBV_WR_BIND_MW) {
		request->mw = wr->bind_mw.mw;
		request->rkey = wr->bind_mw.rkey;
		request->mr = wr->bind_mw.bind_info.mr;
		request->bind_addr = wr->bind_mw.bind_info.addr;
		request->bind_length = wr->bind_mw.bind_info.length;
		request->bind_access = wr->bind_mw.bind_info.mw_access_flags;
	} else if (qp->qp.qp_type == IBV_QPT_UD) {
		request->ah = wr->wr.ud.ah;
		request->remote_qpn = wr->wr.ud.remote_qpn;
		request->remote_qkey = wr->wr.ud.remote_qkey;
	} else {
		/* The members of `rdma` and `atomic` have the same places, apart from the key. */
		int is_atomic = wr->opcode == IBV_WR_ATOMIC_CMP_AND_SWP ||
				wr->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD;

		request->remote_addr = wr->wr.rdma.remote_addr;
		request->rkey = is_atomic ? wr->wr.atomic.rkey : wr->wr.rdma.rkey;
		request->compare_add = is_atomic ? wr->wr.atomic.compare_add : 0;
		request->swap = is_atomic ? wr->wr.atomic.swap : 0;
	}
	if (!error && wr->send_flags & IBV_SEND_INLINE)
		error = copy_inline(request, qp->max_inline);
	return error;
}

static int post_send(struct ibv_qp *ibv_qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
	struct sim_qp *qp = (struct sim_qp *)ibv_qp;
	int result = 0;

	pthread_mutex_lock(&lock);
	for (; wr; wr = wr->next) {
		struct sim_request *request = next_entry(&qp->sends, &result);

		if (request && qp->qp.state < IBV_QPS_RTS)
			result = EINVAL;
		if (request && !result)
			result = copy_send(qp, request, wr);
		if (result) {
			*bad = wr;
			break;
		}
		request->order = posted_in_total++;
		qp->sends.posted++;
	}
	pthread_mutex_unlock(&lock);
	ring_doorbell(&qp->sends);
	return result;
}

static int post_receive(struct sim_queue *queue, unsigned int max_sge, struct ibv_recv_wr *wr,
			struct ibv_recv_wr **bad)
{
	int result = 0;

	pthread_mutex_lock(&lock);
	for (; wr; wr = wr->next) {
		struct sim_request *request = next_entry(queue, &result);

		if (request)
			result = copy_sge(request, wr->sg_list, wr->num_sge, max_sge);
		if (result) {
			*bad = wr;
			break;
		}
		request->wr_id = wr->wr_id;
		request->order = posted_in_total++;
		queue->posted++;
	}
	pthread_mutex_unlock(&lock);
	ring_doorbell(queue);
	return result;
}

static int post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
	if (qp->state == IBV_QPS_RESET)
		return EINVAL;
	return post_receive(&((struct sim_qp *)qp)->receives, ((struct sim_qp *)qp)->max_sge, wr,
			    bad);
}

static int post_srq_recv(struct ibv_srq *srq, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
	return post_receive(&((struct sim_srq *)srq)->receives, SIM_MAX_SGE, wr, bad);
}

/* Return the oldest request that the device has not begun to execute, or NULL. */
struct sim_request *sim_take(struct sim_queue *queue)
{
	struct sim_request *request = NULL;

	pthread_mutex_lock(&lock);
	if (queue->taken != queue->posted)
		request = &queue->ring[queue->taken++ % queue->capacity];
	pthread_mutex_unlock(&lock);
	return request;
}

/* --- completions --- */

static int poll_cq(struct ibv_cq *ibv_cq, int entries, struct ibv_wc *batch)
{
	struct sim_cq *cq = (struct sim_cq *)ibv_cq;
	int count = 0;

	pthread_mutex_lock(&lock);
	cq->polls++;
	if (cq->poll_failure || cq->has_overflowed)
		count = cq->poll_failure ? cq->poll_failure : -1;
	if (cq->polls < cq->hidden_until)
		entries = 0;
	while (count >= 0 && count < entries && cq->polled != cq->visible) {
		struct sim_completion *entry = &cq->ring[cq->polled++ % cq->capacity];

		batch[count++] = entry->wc;
		if (entry->queue && entry->freed == ONE_MORE)
			entry->queue->freed++;
		else if (entry->queue && (int)(entry->freed - entry->queue->freed) > 0)
			entry->queue->freed = entry->freed;
	}
	if (!count)
		cq->visible = cq->put; /* at the next poll */
	pthread_mutex_unlock(&lock);
	return count;
}

static int req_notify_cq(struct ibv_cq *ibv_cq, int solicited_only)
{
	struct sim_cq *cq = (struct sim_cq *)ibv_cq;

	pthread_mutex_lock(&lock);
	cq->arms++;
	cq->is_armed = !cq->arm_failure;
	cq->visible = cq->put;
	pthread_mutex_unlock(&lock);
	return cq->arm_failure;
}

/* Raise an event of the completion queue. */
void sim_raise_completion_event(struct sim_cq *cq)
{
	struct sim_channel *channel = (struct sim_channel *)cq->cq.channel;

	channel->events[channel->raised++ % 1024] = &cq->cq;
	sim_wake(channel->channel.fd);
}

/*
 * Add a completion. When it is polled, the entries of `queue` before the number `freed` are free;
 * ONE_MORE: one more entry is free. Raise an event if the queue is armed. Returns -1 if the queue
 * has overflowed.
 *
 * If `is_late` and the queue is not armed, the program finds the completion as if it had come right
 * before the program armed the queue, or after a poll that found none.
 */
int sim_complete(struct sim_cq *cq, const struct ibv_wc *wc, struct sim_queue *queue,
		 unsigned int freed, int is_late)
{
	pthread_mutex_lock(&lock);
	if (cq->put - cq->polled >= cq->capacity) {
		cq->has_overflowed = 1;
	} else {
		cq->ring[cq->put++ % cq->capacity] =
			(struct sim_completion){ .wc = *wc, .queue = queue, .freed = freed };
		if (!is_late || cq->is_armed)
			cq->visible = cq->put;
		if (cq->is_armed && cq->cq.channel)
			sim_raise_completion_event(cq);
		cq->is_armed = 0;
	}
	pthread_mutex_unlock(&lock);
	return cq->has_overflowed ? -1 : 0;
}

int ibv_get_cq_event(struct ibv_comp_channel *ibv_channel, struct ibv_cq **cq, void **cq_context)
{
	struct sim_channel *channel = (struct sim_channel *)ibv_channel;

	if (read_event_fd(ibv_channel->fd, channel->failure))
		return -1;
	*cq = channel->events[channel->read++ % 1024];
	*cq_context = (*cq)->cq_context;
	((struct sim_cq *)*cq)->events++;
	return 0;
}

void ibv_ack_cq_events(struct ibv_cq *cq, unsigned int count)
{
	((struct sim_cq *)cq)->acknowledged += count;
}

/* --- asynchronous events --- */

void sim_raise(struct sim_context *context, int type, void *element, int port_num)
{
	struct ibv_async_event *event = &context->events[context->raised++ % 256];

	memset(event, 0, sizeof(*event));
	event->event_type = type;
	if (element)
		event->element.qp = element;
	else
		event->element.port_num = port_num;
	sim_wake(context->verbs.context.async_fd);
}

int ibv_get_async_event(struct ibv_context *ibv_context, struct ibv_async_event *event)
{
	size_t offset = offsetof(struct sim_context, verbs.context);
	struct sim_context *context = (struct sim_context *)((char *)ibv_context - offset);

	if (read_event_fd(ibv_context->async_fd, context->failure))
		return -1;
	*event = context->events[context->read++ % 256];
	return 0;
}

void ibv_ack_async_event(struct ibv_async_event *event)
{
}

/* --- making and freeing --- */

struct ibv_mw *sim_ibv_alloc_mw(struct ibv_pd *pd, enum ibv_mw_type type); /* in Python */
int sim_ibv_dealloc_mw(struct ibv_mw *mw);

struct sim_context *sim_new_context(const char *name, int transport)
{
	struct sim_context *made = calloc(1, sizeof(*made));
	struct ibv_context *context = &made->verbs.context;

	made->device.node_type = transport == IBV_TRANSPORT_IWARP ? IBV_NODE_RNIC : IBV_NODE_CA;
	made->device.transport_type = transport;
	strncpy(made->device.name, name, sizeof(made->device.name) - 1);
	context->device = &made->device;
	context->ops.post_send = post_send;
	context->ops.post_recv = post_recv;
	context->ops.post_srq_recv = post_srq_recv;
	context->ops.poll_cq = poll_cq;
	context->ops.req_notify_cq = req_notify_cq;
	context->ops.alloc_mw = sim_ibv_alloc_mw;
	context->ops.dealloc_mw = sim_ibv_dealloc_mw;
	context->cmd_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	context->async_fd = new_event_fd();
	context->num_comp_vectors = 1;
	return made;
}

struct sim_qp *sim_new_qp(struct ibv_context *context, struct ibv_qp_init_attr *attr,
			  uint32_t number)
{
	struct sim_qp *made = calloc(1, sizeof(*made));

	made->qp.context = context;
	made->qp.qp_context = attr->qp_context;
	made->qp.send_cq = attr->send_cq;
	made->qp.recv_cq = attr->recv_cq;
	made->qp.srq = attr->srq;
	made->qp.qp_num = number;
	made->qp.qp_type = attr->qp_type;
	made->max_inline = attr->cap.max_inline_data;
	made->max_sge = attr->cap.max_send_sge > attr->cap.max_recv_sge ? attr->cap.max_send_sge :
									  attr->cap.max_recv_sge;
	made->sq_sig_all = attr->sq_sig_all;
	open_queue(&made->sends, attr->cap.max_send_wr);
	open_queue(&made->receives, attr->cap.max_recv_wr);
	made->receive_queue =
		attr->srq ? &((struct sim_srq *)attr->srq)->receives : &made->receives;
	return made;
}

struct sim_srq *sim_new_srq(struct ibv_context *context, unsigned int depth)
{
	struct sim_srq *made = calloc(1, sizeof(*made));

	made->srq.context = context;
	open_queue(&made->receives, depth);
	return made;
}

struct sim_cq *sim_new_cq(struct ibv_context *context, int entries,
			  struct ibv_comp_channel *channel)
{
	struct sim_cq *made = calloc(1, sizeof(*made));

	made->cq.context = context;
	made->cq.channel = channel;
	made->cq.cqe = entries;
	pthread_mutex_init(&made->cq.mutex, NULL);
	pthread_cond_init(&made->cq.cond, NULL);
	made->capacity = entries;
	made->ring = calloc(entries, sizeof(*made->ring));
	return made;
}

struct sim_channel *sim_new_channel(struct ibv_context *context)
{
	struct sim_channel *made = calloc(1, sizeof(*made));

	made->channel.context = context;
	made->channel.fd = new_event_fd();
	if (made->channel.fd >= 0)
		return made;
	free(made);
	return NULL;
}

/* Detach the completions of a queue pair from its queues. They stay until they are polled. */
static void detach(struct ibv_cq *ibv_cq, struct sim_queue *sends, struct sim_queue *receives)
{
	struct sim_cq *cq = (struct sim_cq *)ibv_cq;
	unsigned int index;

	if (!cq)
		return;
	for (index = cq->polled; index != cq->put; index++) {
		struct sim_completion *entry = &cq->ring[index % cq->capacity];

		if (entry->queue == sends || entry->queue == receives)
			entry->queue = NULL;
	}
}

/* Remove the completions of a queue pair that were not polled. */
static void drop(struct ibv_cq *ibv_cq, unsigned int qp_num)
{
	struct sim_cq *cq = (struct sim_cq *)ibv_cq;
	unsigned int index, kept = cq->polled, visible = cq->polled;

	for (index = cq->polled; index != cq->put; index++) {
		struct sim_completion *entry = &cq->ring[index % cq->capacity];

		if (index == cq->visible)
			visible = kept;
		if (entry->wc.qp_num != qp_num)
			cq->ring[kept++ % cq->capacity] = *entry;
	}
	cq->visible = cq->visible == cq->put ? kept : visible;
	cq->put = kept;
}

/* Remove the completions of a queue pair that were not polled from its queues, as mlx5 does. */
void sim_drop_completions(struct sim_qp *qp)
{
	pthread_mutex_lock(&lock);
	drop(qp->qp.send_cq, qp->qp.qp_num);
	if (qp->qp.recv_cq != qp->qp.send_cq)
		drop(qp->qp.recv_cq, qp->qp.qp_num);
	pthread_mutex_unlock(&lock);
}

void sim_free_qp(struct sim_qp *qp)
{
	pthread_mutex_lock(&lock);
	detach(qp->qp.send_cq, &qp->sends, &qp->receives);
	detach(qp->qp.recv_cq, &qp->sends, &qp->receives);
	free(qp->sends.ring);
	free(qp->receives.ring);
	poison_and_free(qp, sizeof(*qp));
	pthread_mutex_unlock(&lock);
}

void sim_free_srq(struct sim_srq *srq)
{
	free(srq->receives.ring);
	poison_and_free(srq, sizeof(*srq));
}

void sim_free_cq(struct sim_cq *cq)
{
	free(cq->ring);
	poison_and_free(cq, sizeof(*cq));
}

void sim_free_channel(struct sim_channel *channel)
{
	close(channel->channel.fd);
	poison_and_free(channel, sizeof(*channel));
}
