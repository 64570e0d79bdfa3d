/* Events of the connection manager. */
#include "helpers.h"

#include <string.h>

static void copy_private_data(struct aiordma_cm_event *out, const void *data, uint8_t length)
{
	if (!data || !length)
		return;
	out->private_data_len = length;
	memcpy(out->private_data, data, length);
}

/* Parameters that are all 0, as those of most events, are left out. */
static int has_parameters(const struct rdma_conn_param *conn)
{
	return conn->qp_num || conn->responder_resources || conn->initiator_depth ||
	       conn->flow_control || conn->retry_count || conn->rnr_retry_count || conn->srq ||
	       conn->private_data_len;
}

static void copy_conn_param(struct aiordma_cm_event *out, const struct rdma_conn_param *conn)
{
	if (!has_parameters(conn))
		return;
	out->parameters = AIORDMA_CONNECTION_PARAMETERS;
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
	out->parameters = AIORDMA_OTHER_PARAMETERS;
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
		out->context = (uintptr_t)ud->private_data; /* the context, in spite of its name */
		return;
	case AIORDMA_CM_EVENT_ADDRINFO_RESOLVED:
	case AIORDMA_CM_EVENT_ADDRINFO_ERROR:
	case AIORDMA_CM_EVENT_USER:
		out->parameters = AIORDMA_OTHER_PARAMETERS;
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
 * Read up to `capacity` events from a non-blocking channel. Each event is copied and acknowledged
 * before the next is read. So no caller has an unacknowledged event: rdma_destroy_id(),
 * rdma_migrate_id() and rdma_leave_multicast() wait for acknowledgements.
 *
 * An id that connects when its route is resolved does that here: see `struct aiordma_id_calls`.
 *
 * Returns the number of events read (0: there are none), or -1 with errno.
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
		if (event->event == RDMA_CM_EVENT_ROUTE_ERROR)
			aiordma_forget_route(event->id);
		if (event->event != RDMA_CM_EVENT_ROUTE_RESOLVED ||
		    !aiordma_connect_resolved(event->id))
			copy_event(&events[count++], event, errno);
		rdma_ack_cm_event(event);
	}
	return count;
}

/*
 * Copy and acknowledge the event that the last call on a synchronous id stored in `id->event`.
 * Returns 1 if there was one, else 0. While it is not acknowledged, rdma_leave_multicast() and
 * rdma_destroy_id() of the listener that counts it would wait for ever.
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

/* Call rdma_resolve_addrinfo(), which stores its own result in errno: replace that by EINVAL. */
int aiordma_resolve_addrinfo(struct rdma_cm_id *id, const char *node, const char *service,
			     const struct rdma_addrinfo *hints)
{
	int result = rdma_resolve_addrinfo(id, node, service, hints);

	if (result && errno < 0)
		errno = EINVAL;
	return result;
}
