/*
 * An RDMA device without hardware, and a peer that is connected to it. It is loaded before
 * libibverbs and librdmacm (LD_PRELOAD), so that aiordma itself is not changed. There is one device,
 * with one connection at a time.
 *
 * Every work request completes as soon as it is posted. A message arrives when the program calls
 * device_arrive(), or when the event loop waits for events: the loop is then woken by an event.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#include <valgrind/callgrind.h>

#undef ibv_reg_mr
#undef ibv_query_port

#define LIMIT 65536 /* of work requests and completions; a power of two */
#define DEPTH 16 /* of reads in flight */
#define KEY 77
#define TICK 1000 /* nanoseconds */

struct completion_channel {
	struct ibv_comp_channel channel;
	int write_fd;
};

struct event_channel {
	struct rdma_event_channel channel;
	int write_fd;
};

struct receive {
	uint64_t wr_id;
	uint64_t address;
	uint32_t length;
};

static struct ibv_device device = { .node_type = IBV_NODE_CA,
				    .transport_type = IBV_TRANSPORT_IB,
				    .name = "counted0" };
static struct verbs_context verbs;
static struct ibv_context *const context = &verbs.context;

static struct ibv_wc completions[LIMIT];
static unsigned int completed, polled;
static struct receive receives[LIMIT];
static unsigned int posted, filled;
static struct ibv_cq *queue;
static int is_armed;
static unsigned int arrivals, arrival_length; /* at the next calls of epoll_wait() */
static int signaled = -1; /* an eventfd or a socket that they signal instead, or -1 */
static int with_immediate; /* they are writes, and this is in their immediate data: */
static uint32_t immediate;
static unsigned char answer[256]; /* the private data of the peer that accepts */
static unsigned int answer_length;
static int is_counted;
static struct timespec counted_time;

static int make_pipe(int *read_fd, int *write_fd)
{
	int ends[2];

	if (pipe2(ends, O_CLOEXEC | O_NONBLOCK))
		return -1;
	*read_fd = ends[0];
	*write_fd = ends[1];
	return 0;
}

/* The pipes are read often enough that none gets full. */
static void send_event(int write_fd, void *event)
{
	if (write(write_fd, &event, sizeof(event)) != sizeof(event))
		abort();
}

static void complete(struct ibv_wc completion)
{
	completions[completed++ % LIMIT] = completion;
	if (is_armed) {
		is_armed = 0;
		send_event(((struct completion_channel *)queue->channel)->write_fd, queue);
	}
}

/* --- functions that the inline functions of verbs.h call through the context --- */

static int post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
	for (; wr; wr = wr->next) {
		enum ibv_wc_opcode opcode =
			wr->opcode == IBV_WR_RDMA_WRITE ? IBV_WC_RDMA_WRITE : IBV_WC_SEND;

		if (wr->send_flags & IBV_SEND_SIGNALED)
			complete((struct ibv_wc){ .wr_id = wr->wr_id, .opcode = opcode });
	}
	return 0;
}

static int post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
	receives[posted++ % LIMIT] = (struct receive){
		.wr_id = wr->wr_id,
		.address = wr->sg_list->addr,
		.length = wr->sg_list->length,
	};
	return 0;
}

static int poll_cq(struct ibv_cq *cq, int entries, struct ibv_wc *batch)
{
	int count = 0;

	while (count < entries && polled != completed)
		batch[count++] = completions[polled++ % LIMIT];
	return count;
}

static int req_notify_cq(struct ibv_cq *cq, int solicited_only)
{
	is_armed = 1;
	return 0;
}

__attribute__((constructor)) static void open_device(void)
{
	context->device = &device;
	context->ops.post_send = post_send;
	context->ops.post_recv = post_recv;
	context->ops.poll_cq = poll_cq;
	context->ops.req_notify_cq = req_notify_cq;
	context->cmd_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	context->async_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	context->num_comp_vectors = 1;
}

/* --- libibverbs --- */

int ibv_query_device(struct ibv_context *of, struct ibv_device_attr *attr)
{
	*attr = (struct ibv_device_attr){
		.max_qp_wr = LIMIT / 4,
		.max_sge = 4,
		.max_sge_rd = 4,
		.max_cqe = LIMIT,
		.max_mr_size = 1ull << 40,
		.max_qp_rd_atom = DEPTH,
		.max_qp_init_rd_atom = DEPTH,
		.phys_port_cnt = 1,
	};
	return 0;
}

int ibv_query_port(struct ibv_context *of, uint8_t port_num, struct _compat_ibv_port_attr *attr)
{
	((struct ibv_port_attr *)attr)->max_msg_sz = 1 << 30;
	return 0;
}

struct ibv_pd *ibv_alloc_pd(struct ibv_context *of)
{
	struct ibv_pd *pd = calloc(1, sizeof(*pd));

	pd->context = of;
	return pd;
}

int ibv_dealloc_pd(struct ibv_pd *pd)
{
	free(pd);
	return 0;
}

struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *pd, void *addr, size_t length, uint64_t iova,
				unsigned int access)
{
	struct ibv_mr *mr = calloc(1, sizeof(*mr));

	*mr = (struct ibv_mr){ .context = pd->context, .pd = pd, .addr = addr, .length = length,
			       .lkey = KEY, .rkey = KEY };
	return mr;
}

struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *addr, size_t length, int access)
{
	return ibv_reg_mr_iova2(pd, addr, length, (uintptr_t)addr, access);
}

int ibv_dereg_mr(struct ibv_mr *mr)
{
	free(mr);
	return 0;
}

struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *of)
{
	struct completion_channel *made = calloc(1, sizeof(*made));

	made->channel.context = of;
	if (!make_pipe(&made->channel.fd, &made->write_fd))
		return &made->channel;
	free(made);
	return NULL;
}

int ibv_destroy_comp_channel(struct ibv_comp_channel *channel)
{
	close(channel->fd);
	close(((struct completion_channel *)channel)->write_fd);
	free(channel);
	return 0;
}

struct ibv_cq *ibv_create_cq(struct ibv_context *of, int cqe, void *cq_context,
			     struct ibv_comp_channel *channel, int comp_vector)
{
	queue = calloc(1, sizeof(*queue));
	*queue = (struct ibv_cq){ .context = of, .channel = channel, .cq_context = cq_context, .cqe = cqe };
	return queue;
}

int ibv_destroy_cq(struct ibv_cq *cq)
{
	is_armed = 0;
	free(cq);
	return 0;
}

int ibv_get_cq_event(struct ibv_comp_channel *channel, struct ibv_cq **cq, void **cq_context)
{
	if (read(channel->fd, cq, sizeof(*cq)) != sizeof(*cq))
		return -1;
	*cq_context = (*cq)->cq_context;
	return 0;
}

void ibv_ack_cq_events(struct ibv_cq *cq, unsigned int count)
{
}

int ibv_get_async_event(struct ibv_context *of, struct ibv_async_event *event)
{
	errno = EAGAIN;
	return -1;
}

int ibv_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask)
{
	return 0;
}

int ibv_destroy_qp(struct ibv_qp *qp)
{
	free(qp);
	return 0;
}

/* --- librdmacm --- */

struct ibv_context **rdma_get_devices(int *count)
{
	struct ibv_context **list = calloc(2, sizeof(*list));

	list[0] = context;
	*count = 1;
	return list;
}

void rdma_free_devices(struct ibv_context **list)
{
	free(list);
}

struct rdma_event_channel *rdma_create_event_channel(void)
{
	struct event_channel *made = calloc(1, sizeof(*made));

	if (!make_pipe(&made->channel.fd, &made->write_fd))
		return &made->channel;
	free(made);
	return NULL;
}

void rdma_destroy_event_channel(struct rdma_event_channel *channel)
{
	close(channel->fd);
	close(((struct event_channel *)channel)->write_fd);
	free(channel);
}

static int report_event(struct rdma_cm_id *id, enum rdma_cm_event_type type)
{
	struct rdma_cm_event *event = calloc(1, sizeof(*event));

	event->id = id;
	event->event = type;
	event->param.conn.initiator_depth = event->param.conn.responder_resources = DEPTH;
	event->param.conn.private_data = answer;
	event->param.conn.private_data_len = answer_length;
	send_event(((struct event_channel *)id->channel)->write_fd, event);
	return 0;
}

int rdma_get_cm_event(struct rdma_event_channel *channel, struct rdma_cm_event **event)
{
	return read(channel->fd, event, sizeof(*event)) == sizeof(*event) ? 0 : -1;
}

int rdma_ack_cm_event(struct rdma_cm_event *event)
{
	free(event);
	return 0;
}

int rdma_create_id(struct rdma_event_channel *channel, struct rdma_cm_id **id, void *of,
		   enum rdma_port_space ps)
{
	*id = calloc(1, sizeof(**id));
	**id = (struct rdma_cm_id){ .channel = channel, .context = of, .ps = ps, .qp_type = IBV_QPT_RC };
	return 0;
}

int rdma_destroy_id(struct rdma_cm_id *id)
{
	free(id);
	return 0;
}

int rdma_resolve_addr(struct rdma_cm_id *id, struct sockaddr *from, struct sockaddr *to, int timeout)
{
	id->verbs = context;
	id->port_num = 1;
	memcpy(&id->route.addr.dst_sin, to, sizeof(struct sockaddr_in));
	memcpy(&id->route.addr.src_sin, to, sizeof(struct sockaddr_in));
	return report_event(id, RDMA_CM_EVENT_ADDR_RESOLVED);
}

int rdma_resolve_route(struct rdma_cm_id *id, int timeout)
{
	return report_event(id, RDMA_CM_EVENT_ROUTE_RESOLVED);
}

int rdma_create_qp(struct rdma_cm_id *id, struct ibv_pd *pd, struct ibv_qp_init_attr *attr)
{
	id->qp = calloc(1, sizeof(*id->qp));
	id->qp->context = context;
	id->qp->qp_num = 1;
	posted = filled = 0;
	return 0;
}

int rdma_connect(struct rdma_cm_id *id, struct rdma_conn_param *parameters)
{
	return report_event(id, RDMA_CM_EVENT_ESTABLISHED);
}

int rdma_disconnect(struct rdma_cm_id *id)
{
	return report_event(id, RDMA_CM_EVENT_DISCONNECTED);
}

/* --- called by the program that is counted --- */

/* Return the next posted receive, or NULL if there is none for this number of bytes. */
static struct receive *take_receive(unsigned int length)
{
	if (filled == posted || length > receives[filled % LIMIT].length)
		return NULL;
	return &receives[filled++ % LIMIT];
}

/*
 * Let a message arrive. Its bytes are those that are in the receive buffer. Return -1 if there is no
 * buffer for it.
 */
int device_arrive(unsigned int length)
{
	struct receive *receive = take_receive(length);

	if (!receive)
		return -1;
	complete((struct ibv_wc){ .wr_id = receive->wr_id, .opcode = IBV_WC_RECV, .byte_len = length });
	return 0;
}

/* Let a write of `length` bytes arrive. Return -1 if there is no receive for its immediate data. */
static int arrive_write(unsigned int length)
{
	struct receive *receive = take_receive(0); /* the bytes are not in its buffer */

	if (!receive)
		return -1;
	complete((struct ibv_wc){
		.wr_id = receive->wr_id,
		.opcode = IBV_WC_RECV_RDMA_WITH_IMM,
		.byte_len = length,
		.wc_flags = IBV_WC_WITH_IMM,
		.imm_data = htonl(immediate),
	});
	return 0;
}

/* Let a message arrive at each of the next `count` calls of epoll_wait() that can block. */
void device_arrive_on_wait(unsigned int count, unsigned int length)
{
	arrivals = count;
	arrival_length = length;
	with_immediate = 0;
	signaled = -1;
}

/* The same with writes and their immediate data. The program's memory is not changed. */
void device_write_on_wait(unsigned int count, unsigned int length, uint32_t immediate_data)
{
	device_arrive_on_wait(count, length);
	with_immediate = 1;
	immediate = immediate_data;
}

/* Connections that are made from now on are accepted with this private data. */
void device_accept_with(const void *data, unsigned int length)
{
	answer_length = length < sizeof(answer) ? length : sizeof(answer);
	memcpy(answer, data, answer_length);
}

/*
 * Write 8 bytes to an eventfd or a socket at each of the next `count` calls of epoll_wait() that can
 * block.
 */
void device_signal_on_wait(unsigned int count, int fd)
{
	arrivals = count;
	signaled = fd;
}

static int bring_event(void)
{
	if (signaled >= 0)
		return eventfd_write(signaled, 1);
	return with_immediate ? arrive_write(arrival_length) : device_arrive(arrival_length);
}

int epoll_wait(int epfd, struct epoll_event *events, int maxevents, int timeout)
{
	if (arrivals && timeout) {
		arrivals--;
		if (bring_event())
			abort();
	}
	return epoll_pwait(epfd, events, maxevents, timeout, NULL);
}

/*
 * While a program is counted, each call advances the clock by one tick. With the real clock, the number
 * of polls and the end of a time budget would depend on callgrind's speed.
 */
int clock_gettime(clockid_t clock, struct timespec *now)
{
	if (!is_counted || clock != CLOCK_MONOTONIC)
		return syscall(SYS_clock_gettime, clock, now);
	counted_time.tv_nsec += TICK;
	if (counted_time.tv_nsec >= 1000000000) {
		counted_time.tv_nsec -= 1000000000;
		counted_time.tv_sec++;
	}
	*now = counted_time;
	return 0;
}

void device_start_counting(void)
{
	clock_gettime(CLOCK_MONOTONIC, &counted_time);
	counted_time.tv_sec++; /* times that were read before are now long past */
	is_counted = 1;
	CALLGRIND_START_INSTRUMENTATION;
	CALLGRIND_ZERO_STATS;
}

/* Let callgrind write a dump of its counts with this name. */
void device_stop_counting(const char *name)
{
	CALLGRIND_DUMP_STATS_AT(name);
	CALLGRIND_STOP_INSTRUMENTATION;
	is_counted = 0;
}
