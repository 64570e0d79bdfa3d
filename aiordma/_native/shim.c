#define _GNU_SOURCE
#include "shim.h"

#include <arpa/inet.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

int aiordma_set_nonblocking(int fd)
{
	int flags = fcntl(fd, F_GETFL);

	if (flags < 0)
		return -1;
	return fcntl(fd, F_SETFL, flags | O_NONBLOCK);
}

/* --- rdma_cm events ------------------------------------------------------------------------- */

static void copy_private_data(struct aiordma_cm_event *out, const void *data, uint8_t length)
{
	if (!data || !length)
		return;
	out->private_data_len = length;
	memcpy(out->private_data, data, length);
}

static void copy_conn_param(struct aiordma_cm_event *out, const struct rdma_conn_param *conn)
{
	out->qp_num = conn->qp_num;
	out->responder_resources = conn->responder_resources;
	out->initiator_depth = conn->initiator_depth;
	out->flow_control = conn->flow_control;
	out->retry_count = conn->retry_count;
	out->rnr_retry_count = conn->rnr_retry_count;
	out->srq = conn->srq;
	copy_private_data(out, conn->private_data, conn->private_data_len);
}

static void copy_ud_address(struct aiordma_cm_event *out, const struct rdma_ud_param *ud)
{
	out->ah_attr = ud->ah_attr;
	out->qp_num = ud->qp_num;
	out->qkey = ud->qkey;
}

static void copy_param(struct aiordma_cm_event *out, const struct rdma_cm_event *event)
{
	const struct rdma_ud_param *ud = &event->param.ud;

	switch ((int)event->event) {
	case RDMA_CM_EVENT_CONNECT_REQUEST:
	case RDMA_CM_EVENT_CONNECT_RESPONSE:
	case RDMA_CM_EVENT_CONNECT_ERROR:
	case RDMA_CM_EVENT_UNREACHABLE:
	case RDMA_CM_EVENT_REJECTED:
	case RDMA_CM_EVENT_ESTABLISHED:
	case RDMA_CM_EVENT_DISCONNECTED:
		if (event->id->qp_type != IBV_QPT_UD) {
			copy_conn_param(out, &event->param.conn);
			return;
		}
		copy_ud_address(out, ud);
		copy_private_data(out, ud->private_data, ud->private_data_len);
		return;
	case RDMA_CM_EVENT_MULTICAST_JOIN:
	case RDMA_CM_EVENT_MULTICAST_ERROR:
		copy_ud_address(out, ud);
		out->context = (uintptr_t)ud->private_data; /* no bytes here, in spite of its name */
		return;
	case AIORDMA_CM_EVENT_ADDRINFO_RESOLVED:
	case AIORDMA_CM_EVENT_ADDRINFO_ERROR:
	case AIORDMA_CM_EVENT_USER:
		memcpy(&out->arg, &event->param, sizeof(out->arg));
		return;
	}
}

static void copy_event(struct aiordma_cm_event *out, const struct rdma_cm_event *event, int error)
{
	memset(out, 0, offsetof(struct aiordma_cm_event, private_data));
	out->id = (uintptr_t)event->id;
	out->listen_id = (uintptr_t)event->listen_id;
	out->event = event->event;
	out->status = event->status;
	out->error = event->status == -1 ? error : 0;
	copy_param(out, event);
}

/*
 * Read up to `capacity` events from a non-blocking channel. Each is copied and acknowledged before
 * the next is read, so that no caller ever holds one: rdma_destroy_id(), rdma_migrate_id() and
 * rdma_leave_multicast() wait for acknowledgements.
 *
 * Returns the number read (0: nothing pending), or -1 with errno.
 */
int aiordma_get_cm_events(struct rdma_event_channel *channel, struct aiordma_cm_event *events,
			  int capacity)
{
	struct rdma_cm_event *event;
	int count = 0;

	while (count < capacity) {
		errno = 0;
		if (rdma_get_cm_event(channel, &event)) {
			if (errno == EINTR)
				continue;
			if (errno == EAGAIN || errno == EWOULDBLOCK)
				return count;
			return count ? count : -1;
		}
		copy_event(&events[count++], event, errno);
		rdma_ack_cm_event(event);
	}
	return count;
}

/*
 * Copy and acknowledge the event that the last call on a synchronous id left in it. Returns whether
 * there was one. Left unacknowledged, it would make rdma_destroy_id() of the listener it is counted
 * on, and rdma_leave_multicast(), wait for ever.
 */
int aiordma_take_event(struct rdma_cm_id *id, struct aiordma_cm_event *out)
{
	struct rdma_cm_event *event = id->event;

	if (!event)
		return 0;
	copy_event(out, event, errno);
	id->event = NULL;
	rdma_ack_cm_event(event);
	return 1;
}

/*
 * What rdma-core 60 brought. Looked up when called: a direct reference would keep this module from
 * loading on an older one. Return -1 with errno; ENOSYS: this rdma-core does not have it.
 */

static void *newer_function(const char *name)
{
	void *function = dlsym(RTLD_DEFAULT, name);

	if (!function)
		errno = ENOSYS;
	return function;
}

int aiordma_resolve_addrinfo(struct rdma_cm_id *id, const char *node, const char *service,
			     const struct rdma_addrinfo *hints)
{
	int (*resolve)(struct rdma_cm_id *, const char *, const char *,
		       const struct rdma_addrinfo *) = newer_function("rdma_resolve_addrinfo");

	int result = resolve ? resolve(id, node, service, hints) : -1;

	if (result && errno < 0) /* it mistakes its own result for an errno */
		errno = EINVAL;
	return result;
}

int aiordma_query_addrinfo(struct rdma_cm_id *id, struct rdma_addrinfo **info)
{
	int (*query)(struct rdma_cm_id *, struct rdma_addrinfo **) =
		newer_function("rdma_query_addrinfo");

	return query ? query(id, info) : -1;
}

int aiordma_write_cm_event(struct rdma_cm_id *id, int event, int status, uint64_t arg)
{
	int (*write_event)(struct rdma_cm_id *, int, int, uint64_t) =
		newer_function("rdma_write_cm_event");

	return write_event ? write_event(id, event, status, arg) : -1;
}

/* --- completions ---------------------------------------------------------------------------- */

/*
 * Read every event of a non-blocking completion channel, acknowledge it and arm its queue again;
 * the queues are left in `ready` to be polled. Armed before polled: a completion that comes between
 * the two raises a new event, and none is missed.
 *
 * Returns the number of queues (a full array: call again), or a negative errno.
 */
int aiordma_comp_events(struct ibv_comp_channel *channel, struct ibv_cq **ready, int capacity)
{
	struct ibv_cq *cq;
	void *context;
	int count = 0;
	int error;

	while (count < capacity) {
		if (ibv_get_cq_event(channel, &cq, &context)) {
			if (errno == EINTR)
				continue;
			if (errno == EAGAIN || errno == EWOULDBLOCK)
				break;
			return -errno;
		}
		ibv_ack_cq_events(cq, 1);
		error = ibv_req_notify_cq(cq, 0);
		if (error)
			return -abs(error);
		ready[count++] = cq;
	}
	return count;
}

/* Read and acknowledge one event of a non-blocking channel. Returns 0, or a positive errno. */
int aiordma_comp_event(struct ibv_comp_channel *channel)
{
	struct ibv_cq *cq;
	void *context;

	if (ibv_get_cq_event(channel, &cq, &context))
		return errno;
	ibv_ack_cq_events(cq, 1);
	return 0;
}

/* --- devices -------------------------------------------------------------------------------- */

static uintptr_t event_element(const struct ibv_async_event *event)
{
	switch (event->event_type) {
	case IBV_EVENT_CQ_ERR:
		return (uintptr_t)event->element.cq;
	case IBV_EVENT_SRQ_ERR:
	case IBV_EVENT_SRQ_LIMIT_REACHED:
		return (uintptr_t)event->element.srq;
	case IBV_EVENT_QP_FATAL:
	case IBV_EVENT_QP_REQ_ERR:
	case IBV_EVENT_QP_ACCESS_ERR:
	case IBV_EVENT_QP_LAST_WQE_REACHED:
	case IBV_EVENT_COMM_EST:
	case IBV_EVENT_SQ_DRAINED:
	case IBV_EVENT_PATH_MIG:
	case IBV_EVENT_PATH_MIG_ERR:
		return (uintptr_t)event->element.qp;
	case IBV_EVENT_WQ_FATAL:
		return (uintptr_t)event->element.wq;
	default:
		return 0;
	}
}

/*
 * Read up to `capacity` events of a device whose async_fd is non-blocking, each acknowledged at
 * once: destroying a queue pair waits for that. Returns how many, or a negative errno (EIO: the
 * device is gone).
 */
int aiordma_async_events(struct ibv_context *context, struct aiordma_async_event *events,
			 int capacity)
{
	struct ibv_async_event event;
	int count = 0;

	while (count < capacity) {
		if (ibv_get_async_event(context, &event)) {
			if (errno == EINTR)
				continue;
			if (errno == EAGAIN || errno == EWOULDBLOCK || count)
				break;
			return -errno;
		}
		events[count].element = event_element(&event);
		events[count].port_num = events[count].element ? 0 : event.element.port_num;
		events[count].event_type = event.event_type;
		count++;
		ibv_ack_async_event(&event);
	}
	return count;
}

/* ibv_query_port() is a macro. */
int aiordma_query_port(struct ibv_context *context, uint8_t port_num, struct ibv_port_attr *attr)
{
	return ibv_query_port(context, port_num, attr);
}

/* The way back to who sent a datagram; `grh` is the 40 bytes before it. Returns an errno. */
int aiordma_ah_from_wc(struct ibv_context *context, uint8_t port_num, struct ibv_wc *wc,
		       const char *grh, struct ibv_ah_attr *attr)
{
	struct ibv_grh header;

	memcpy(&header, grh, sizeof(header));
	errno = 0;
	if (ibv_init_ah_from_wc(context, port_num, wc, &header, attr))
		return errno ? abs(errno) : EINVAL;
	return 0;
}

/* --- work requests -------------------------------------------------------------------------- */

/* Some providers return a negative errno from the posting calls; these return it positive. A queue
 * pair that is destroyed is NULL. */

int aiordma_post_recv(struct ibv_qp *qp, uint64_t wr_id, uintptr_t addr, uint32_t length,
		      uint32_t lkey)
{
	struct ibv_sge sge = { .addr = addr, .length = length, .lkey = lkey };
	struct ibv_recv_wr wr = { .wr_id = wr_id, .sg_list = &sge, .num_sge = 1 };
	struct ibv_recv_wr *bad;

	if (!qp)
		return EINVAL;
	return abs(ibv_post_recv(qp, &wr, &bad));
}

/* Post every slot of a ring: slot n has the work request id first_wr_id + n. */
int aiordma_post_recvs(struct ibv_qp *qp, uint64_t first_wr_id, uintptr_t addr, uint32_t slot_size,
		       uint32_t count, uint32_t lkey)
{
	uint32_t slot;
	int error;

	for (slot = 0; slot < count; slot++) {
		error = aiordma_post_recv(qp, first_wr_id + slot, addr + (uintptr_t)slot * slot_size,
					  slot_size, lkey);
		if (error)
			return error;
	}
	return 0;
}

/* Send registered memory. `imm` is in host byte order; negative: none. */
int aiordma_post_send(struct ibv_qp *qp, uint64_t wr_id, uintptr_t addr, uint32_t length,
		      uint32_t lkey, uint32_t flags, int64_t imm)
{
	struct ibv_sge sge = { .addr = addr, .length = length, .lkey = lkey };
	struct ibv_send_wr wr = {
		.wr_id = wr_id,
		.sg_list = &sge,
		.num_sge = length ? 1 : 0,
		.opcode = imm < 0 ? IBV_WR_SEND : IBV_WR_SEND_WITH_IMM,
		.send_flags = flags,
	};
	struct ibv_send_wr *bad;

	if (!qp)
		return EINVAL;
	if (imm >= 0)
		wr.imm_data = htonl((uint32_t)imm);
	return abs(ibv_post_send(qp, &wr, &bad));
}

int aiordma_post_srq_recv(struct ibv_srq *srq, uint64_t wr_id, uintptr_t addr, uint32_t length,
			  uint32_t lkey)
{
	struct ibv_sge sge = { .addr = addr, .length = length, .lkey = lkey };
	struct ibv_recv_wr wr = { .wr_id = wr_id, .sg_list = &sge, .num_sge = 1 };
	struct ibv_recv_wr *bad;

	if (!srq)
		return EINVAL;
	return abs(ibv_post_srq_recv(srq, &wr, &bad));
}

/* Send a datagram. `imm` as above. */
int aiordma_post_ud_send(struct ibv_qp *qp, uint64_t wr_id, uintptr_t addr, uint32_t length,
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
	struct ibv_send_wr *bad;

	if (!qp || !ah)
		return EINVAL;
	if (imm >= 0)
		wr.imm_data = htonl((uint32_t)imm);
	return abs(ibv_post_send(qp, &wr, &bad));
}

/* Copy `data` into registered memory and send that. */
int aiordma_post_send_copy(struct ibv_qp *qp, uint64_t wr_id, uintptr_t addr, const char *data,
			   uint32_t length, uint32_t lkey, int64_t imm)
{
	memcpy((void *)addr, data, length);
	return aiordma_post_send(qp, wr_id, addr, length, lkey, IBV_SEND_SIGNALED, imm);
}

/* Send bytes that travel in the request itself: `data` may be reused on return. */
int aiordma_post_send_inline(struct ibv_qp *qp, uint64_t wr_id, const char *data, uint32_t length,
			     int64_t imm)
{
	return aiordma_post_send(qp, wr_id, (uintptr_t)data, length, 0,
				 IBV_SEND_SIGNALED | IBV_SEND_INLINE, imm);
}

/* Read or write the peer's memory. `imm` as above, for writes. */
int aiordma_post_rdma(struct ibv_qp *qp, uint64_t wr_id, int opcode, uintptr_t addr,
		      uint32_t length, uint32_t lkey, uint32_t flags, int64_t imm,
		      uint64_t remote_addr, uint32_t rkey)
{
	struct ibv_sge sge = { .addr = addr, .length = length, .lkey = lkey };
	struct ibv_send_wr wr = {
		.wr_id = wr_id,
		.sg_list = &sge,
		.num_sge = length ? 1 : 0,
		.opcode = opcode,
		.send_flags = flags,
		.wr.rdma = { .remote_addr = remote_addr, .rkey = rkey },
	};
	struct ibv_send_wr *bad;

	if (!qp)
		return EINVAL;
	if (imm >= 0)
		wr.imm_data = htonl((uint32_t)imm);
	return abs(ibv_post_send(qp, &wr, &bad));
}

/* An atomic operation on 8 bytes of the peer's memory; what was there before comes to `addr`. */
int aiordma_post_atomic(struct ibv_qp *qp, uint64_t wr_id, int opcode, uintptr_t addr,
			uint32_t lkey, uint64_t remote_addr, uint32_t rkey, uint64_t compare_add,
			uint64_t swap)
{
	struct ibv_sge sge = { .addr = addr, .length = 8, .lkey = lkey };
	struct ibv_send_wr wr = {
		.wr_id = wr_id,
		.sg_list = &sge,
		.num_sge = 1,
		.opcode = opcode,
		.send_flags = IBV_SEND_SIGNALED,
		.wr.atomic = {
			.remote_addr = remote_addr,
			.compare_add = compare_add,
			.swap = swap,
			.rkey = rkey,
		},
	};
	struct ibv_send_wr *bad;

	if (!qp)
		return EINVAL;
	return abs(ibv_post_send(qp, &wr, &bad));
}

/* How long the peer waits before it repeats a send that found no receive posted here. */
int aiordma_set_min_rnr_timer(struct ibv_qp *qp, uint8_t timer)
{
	struct ibv_qp_attr attr = { .min_rnr_timer = timer };

	if (!qp)
		return EINVAL;
	return abs(ibv_modify_qp(qp, &attr, IBV_QP_MIN_RNR_TIMER));
}

/* --- addresses ------------------------------------------------------------------------------ */

/*
 * The addresses of every interface that is up, one a line, "interface address\n" (link-local IPv6
 * ones with their scope). Returns the length written, or -1 with errno (ENOSPC: `size` too small).
 */
int aiordma_ifaddrs(char *text, size_t size)
{
	struct ifaddrs *list, *entry;
	char host[NI_MAXHOST];
	size_t used = 0;
	int length;

	if (getifaddrs(&list))
		return -1;
	for (entry = list; entry; entry = entry->ifa_next) {
		if (!entry->ifa_addr || !(entry->ifa_flags & IFF_UP))
			continue;
		if (entry->ifa_addr->sa_family != AF_INET && entry->ifa_addr->sa_family != AF_INET6)
			continue;
		if (getnameinfo(entry->ifa_addr,
				entry->ifa_addr->sa_family == AF_INET ? sizeof(struct sockaddr_in)
								      : sizeof(struct sockaddr_in6),
				host, sizeof(host), NULL, 0, NI_NUMERICHOST))
			continue;
		length = snprintf(text + used, size - used, "%s %s\n", entry->ifa_name, host);
		if (length < 0 || (size_t)length >= size - used) {
			freeifaddrs(list);
			errno = ENOSPC;
			return -1;
		}
		used += length;
	}
	freeifaddrs(list);
	return (int)used;
}
