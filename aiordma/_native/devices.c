/* Completion events, asynchronous events of devices, and functions for macros of verbs.h. */
#include "helpers.h"

#include <stdlib.h>
#include <string.h>

/*
 * Read all events of a non-blocking completion channel, acknowledge them and arm their queues
 * again. The queues are stored in `ready`, and the caller polls them. They are armed before they
 * are polled: a completion that comes in between raises a new event, so none is missed.
 *
 * Returns the number of queues, or a negative errno. If the array is full, call again.
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

/*
 * Read and acknowledge one event of a non-blocking channel, and store its queue in `cq` unless that
 * is NULL. Returns 0, or a positive errno.
 */
int aiordma_comp_event(struct ibv_comp_channel *channel, struct ibv_cq **cq)
{
	struct ibv_cq *ready;
	void *context;

	if (ibv_get_cq_event(channel, &ready, &context))
		return errno;
	ibv_ack_cq_events(ready, 1);
	if (cq)
		*cq = ready;
	return 0;
}

/*
 * Store which queue or queue pair the event is of: the number that aiordma gave it as its context,
 * or 0. An address can belong to another queue pair by the time the event is dispatched. Until the
 * event is acknowledged, its queue pair exists.
 */
static void store_element(const struct ibv_async_event *event, struct aiordma_async_event *copy)
{
	switch (event->event_type) {
	case IBV_EVENT_CQ_ERR:
		copy->element = (uintptr_t)event->element.cq->cq_context;
		break;
	case IBV_EVENT_QP_FATAL:
	case IBV_EVENT_QP_REQ_ERR:
	case IBV_EVENT_QP_ACCESS_ERR:
	case IBV_EVENT_QP_LAST_WQE_REACHED:
	case IBV_EVENT_COMM_EST:
	case IBV_EVENT_SQ_DRAINED:
	case IBV_EVENT_PATH_MIG:
	case IBV_EVENT_PATH_MIG_ERR:
		copy->element = (uintptr_t)event->element.qp->qp_context;
		break;
	case IBV_EVENT_SRQ_ERR:
	case IBV_EVENT_SRQ_LIMIT_REACHED:
	case IBV_EVENT_WQ_FATAL:
		break;
	default:
		copy->port_num = event->element.port_num;
	}
}

/*
 * Read up to `capacity` events of a device whose async_fd is non-blocking. Each event is
 * acknowledged at once, because destroying a queue pair waits for that. Returns the number of
 * events, or a negative errno (EIO: the device is removed).
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
		events[count] = (struct aiordma_async_event){ .event_type = event.event_type };
		store_element(&event, &events[count]);
		count++;
		ibv_ack_async_event(&event);
	}
	return count;
}

/* Call ibv_query_port(), which is a macro. */
int aiordma_query_port(struct ibv_context *context, uint8_t port_num, struct ibv_port_attr *attr)
{
	return ibv_query_port(context, port_num, attr);
}

/*
 * Store the route back to the sender of a datagram in `attr`. `grh` is the 40 bytes before the
 * datagram. Returns 0 or an errno.
 */
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

/* Return the device's on-demand paging capabilities: `enum ibv_odp_general_caps`, 0 if none. */
uint64_t aiordma_odp_caps(struct ibv_context *context)
{
	struct ibv_device_attr_ex attr;

	memset(&attr, 0, sizeof(attr));
	if (ibv_query_device_ex(context, NULL, &attr))
		return 0;
	return attr.odp_caps.general_caps;
}
