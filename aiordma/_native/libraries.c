/*
 * Late binding: each function of librdmacm and libibverbs that aiordma calls is defined here, and
 * calls the library's function. The compiled modules are not linked with the libraries. So they
 * can be imported on a machine without the libraries, and on one whose rdma-core is older.
 *
 * The first call loads librdmacm with dlopen(3), which loads libibverbs too. Where a library or a
 * function is missing, the call fails like any other: it returns -1 or NULL and sets errno.
 *
 * The functions that a message needs (ibv_post_send(), ibv_poll_cq() and ibv_req_notify_cq()) are
 * not here: verbs.h defines them inline, and they call the device's driver.
 */
#include "helpers.h"

#include <dlfcn.h>
#include <stdio.h>

/* Macros of verbs.h have the names of these functions. */
#undef ibv_reg_mr
#undef ibv_query_port

static void *load(void)
{
	return dlopen("librdmacm.so.1", RTLD_NOW | RTLD_LOCAL);
}

/*
 * Return the function of the library, or NULL with errno: ELIBACC if the library cannot be loaded,
 * ENOSYS if it does not have the function. A library that was loaded before and has the function,
 * for example a preloaded one, comes first, as it does for programs that are linked.
 */
static void *find(const char *name)
{
	void *function = dlsym(RTLD_DEFAULT, name);
	void *library;

	if (function)
		return function;
	library = load();
	if (!library) {
		errno = ELIBACC;
		return NULL;
	}
	function = dlsym(library, name);
	if (!function)
		errno = ENOSYS;
	return function;
}

/*
 * Try to load the library. If that fails, write the reason into `text`: dlerror(3). Write "" if the
 * library can be loaded now. The text is cut if it is longer than `size`.
 */
void aiordma_load_error(char *text, size_t size)
{
	const char *reason = load() ? NULL : dlerror();

	snprintf(text, size, "%s", reason ? reason : "");
}

/* Define a function. `failure` is its value if the library does not have it. */
#define FUNCTION(type, failure, name, parameters, arguments)                                       \
	type name parameters                                                                       \
	{                                                                                          \
		static __typeof__(name) *found;                                                    \
		__typeof__(name) *function = __atomic_load_n(&found, __ATOMIC_RELAXED);            \
                                                                                                   \
		if (!function) {                                                                   \
			function = find(#name);                                                    \
			__atomic_store_n(&found, function, __ATOMIC_RELAXED);                      \
		}                                                                                  \
		return function ? function arguments : failure;                                    \
	}

#define INT(name, parameters, arguments) FUNCTION(int, -1, name, parameters, arguments)
#define PORT(name, parameters, arguments) FUNCTION(__be16, 0, name, parameters, arguments)
#define VOID(name, parameters, arguments) FUNCTION(void, (void)0, name, parameters, arguments)
#define TEXT(name, parameters, arguments) FUNCTION(const char *, "", name, parameters, arguments)
#define POINTER(type, name, parameters, arguments) FUNCTION(type, NULL, name, parameters, arguments)

/* GCOVR_EXCL_BR_START: each function has the same branches; tests take those of a few. */
/* clang-format takes the "*" of a parameter for a multiplication. */
/* clang-format off */

INT(rdma_accept, (struct rdma_cm_id *id, struct rdma_conn_param *param), (id, param))
INT(rdma_ack_cm_event, (struct rdma_cm_event *event), (event))
INT(rdma_bind_addr, (struct rdma_cm_id *id, struct sockaddr *addr), (id, addr))
INT(rdma_connect, (struct rdma_cm_id *id, struct rdma_conn_param *param), (id, param))
INT(rdma_create_ep,
    (struct rdma_cm_id **id, struct rdma_addrinfo *res, struct ibv_pd *pd,
     struct ibv_qp_init_attr *attr),
    (id, res, pd, attr))
POINTER(struct rdma_event_channel *, rdma_create_event_channel, (void), ())
INT(rdma_create_id,
    (struct rdma_event_channel *channel, struct rdma_cm_id **id, void *context,
     enum rdma_port_space ps),
    (channel, id, context, ps))
INT(rdma_create_qp, (struct rdma_cm_id *id, struct ibv_pd *pd, struct ibv_qp_init_attr *attr),
    (id, pd, attr))
INT(rdma_create_qp_ex, (struct rdma_cm_id *id, struct ibv_qp_init_attr_ex *attr), (id, attr))
INT(rdma_create_srq, (struct rdma_cm_id *id, struct ibv_pd *pd, struct ibv_srq_init_attr *attr),
    (id, pd, attr))
INT(rdma_create_srq_ex, (struct rdma_cm_id *id, struct ibv_srq_init_attr_ex *attr), (id, attr))
VOID(rdma_destroy_ep, (struct rdma_cm_id *id), (id))
VOID(rdma_destroy_event_channel, (struct rdma_event_channel *channel), (channel))
INT(rdma_destroy_id, (struct rdma_cm_id *id), (id))
VOID(rdma_destroy_qp, (struct rdma_cm_id *id), (id))
VOID(rdma_destroy_srq, (struct rdma_cm_id *id), (id))
INT(rdma_disconnect, (struct rdma_cm_id *id), (id))
INT(rdma_establish, (struct rdma_cm_id *id), (id))
TEXT(rdma_event_str, (enum rdma_cm_event_type event), (event))
VOID(rdma_free_devices, (struct ibv_context **list), (list))
VOID(rdma_freeaddrinfo, (struct rdma_addrinfo *res), (res))
INT(rdma_get_cm_event, (struct rdma_event_channel *channel, struct rdma_cm_event **event),
    (channel, event))
POINTER(struct ibv_context **, rdma_get_devices, (int *num_devices), (num_devices))
PORT(rdma_get_dst_port, (struct rdma_cm_id *id), (id))
INT(rdma_get_remote_ece, (struct rdma_cm_id *id, struct ibv_ece *ece), (id, ece))
INT(rdma_get_request, (struct rdma_cm_id *listen, struct rdma_cm_id **id), (listen, id))
PORT(rdma_get_src_port, (struct rdma_cm_id *id), (id))
INT(rdma_getaddrinfo,
    (const char *node, const char *service, const struct rdma_addrinfo *hints,
     struct rdma_addrinfo **res),
    (node, service, hints, res))
INT(rdma_init_qp_attr, (struct rdma_cm_id *id, struct ibv_qp_attr *attr, int *mask),
    (id, attr, mask))
INT(rdma_join_multicast, (struct rdma_cm_id *id, struct sockaddr *addr, void *context),
    (id, addr, context))
INT(rdma_join_multicast_ex,
    (struct rdma_cm_id *id, struct rdma_cm_join_mc_attr_ex *attr, void *context),
    (id, attr, context))
INT(rdma_leave_multicast, (struct rdma_cm_id *id, struct sockaddr *addr), (id, addr))
INT(rdma_listen, (struct rdma_cm_id *id, int backlog), (id, backlog))
INT(rdma_migrate_id, (struct rdma_cm_id *id, struct rdma_event_channel *channel), (id, channel))
INT(rdma_notify, (struct rdma_cm_id *id, enum ibv_event_type event), (id, event))
INT(rdma_reject, (struct rdma_cm_id *id, const void *private_data, uint8_t private_data_len),
    (id, private_data, private_data_len))
INT(rdma_reject_ece, (struct rdma_cm_id *id, const void *private_data, uint8_t private_data_len),
    (id, private_data, private_data_len))
INT(rdma_resolve_addr,
    (struct rdma_cm_id *id, struct sockaddr *src, struct sockaddr *dst, int timeout_ms),
    (id, src, dst, timeout_ms))
INT(rdma_resolve_route, (struct rdma_cm_id *id, int timeout_ms), (id, timeout_ms))
INT(rdma_set_local_ece, (struct rdma_cm_id *id, struct ibv_ece *ece), (id, ece))
INT(rdma_set_option, (struct rdma_cm_id *id, int level, int optname, void *optval, size_t optlen),
    (id, level, optname, optval, optlen))

/* New in rdma-core 60. */
INT(rdma_resolve_addrinfo,
    (struct rdma_cm_id *id, const char *node, const char *service,
     const struct rdma_addrinfo *hints),
    (id, node, service, hints))
INT(rdma_query_addrinfo, (struct rdma_cm_id *id, struct rdma_addrinfo **info), (id, info))
INT(rdma_write_cm_event,
    (struct rdma_cm_id *id, enum rdma_cm_event_type event, int status, uint64_t arg),
    (id, event, status, arg))

VOID(ibv_ack_async_event, (struct ibv_async_event *event), (event))
VOID(ibv_ack_cq_events, (struct ibv_cq *cq, unsigned int count), (cq, count))
POINTER(struct ibv_pd *, ibv_alloc_pd, (struct ibv_context *context), (context))
INT(ibv_attach_mcast, (struct ibv_qp *qp, const union ibv_gid *gid, uint16_t lid), (qp, gid, lid))
POINTER(struct ibv_ah *, ibv_create_ah, (struct ibv_pd *pd, struct ibv_ah_attr *attr), (pd, attr))
POINTER(struct ibv_comp_channel *, ibv_create_comp_channel, (struct ibv_context *context),
	(context))
POINTER(struct ibv_cq *, ibv_create_cq,
	(struct ibv_context *context, int cqe, void *cq_context, struct ibv_comp_channel *channel,
	 int comp_vector),
	(context, cqe, cq_context, channel, comp_vector))
POINTER(struct ibv_qp *, ibv_create_qp, (struct ibv_pd *pd, struct ibv_qp_init_attr *attr),
	(pd, attr))
POINTER(struct ibv_srq *, ibv_create_srq, (struct ibv_pd *pd, struct ibv_srq_init_attr *attr),
	(pd, attr))
INT(ibv_dealloc_pd, (struct ibv_pd *pd), (pd))
INT(ibv_dereg_mr, (struct ibv_mr *mr), (mr))
INT(ibv_destroy_ah, (struct ibv_ah *ah), (ah))
INT(ibv_destroy_comp_channel, (struct ibv_comp_channel *channel), (channel))
INT(ibv_destroy_cq, (struct ibv_cq *cq), (cq))
INT(ibv_destroy_qp, (struct ibv_qp *qp), (qp))
INT(ibv_destroy_srq, (struct ibv_srq *srq), (srq))
INT(ibv_detach_mcast, (struct ibv_qp *qp, const union ibv_gid *gid, uint16_t lid), (qp, gid, lid))
TEXT(ibv_event_type_str, (enum ibv_event_type event), (event))
INT(ibv_get_async_event, (struct ibv_context *context, struct ibv_async_event *event),
    (context, event))
INT(ibv_get_cq_event, (struct ibv_comp_channel *channel, struct ibv_cq **cq, void **cq_context),
    (channel, cq, cq_context))
TEXT(ibv_get_device_name, (struct ibv_device *device), (device))
INT(ibv_init_ah_from_wc,
    (struct ibv_context *context, uint8_t port_num, struct ibv_wc *wc, struct ibv_grh *grh,
     struct ibv_ah_attr *attr),
    (context, port_num, wc, grh, attr))
INT(ibv_modify_qp, (struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask), (qp, attr, mask))
INT(ibv_modify_srq, (struct ibv_srq *srq, struct ibv_srq_attr *attr, int mask), (srq, attr, mask))
INT(ibv_query_device, (struct ibv_context *context, struct ibv_device_attr *attr), (context, attr))
INT(ibv_query_gid, (struct ibv_context *context, uint8_t port_num, int index, union ibv_gid *gid),
    (context, port_num, index, gid))
INT(ibv_query_port,
    (struct ibv_context *context, uint8_t port_num, struct _compat_ibv_port_attr *attr),
    (context, port_num, attr))
INT(ibv_query_qp,
    (struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask, struct ibv_qp_init_attr *init),
    (qp, attr, mask, init))
INT(ibv_query_srq, (struct ibv_srq *srq, struct ibv_srq_attr *attr), (srq, attr))
POINTER(struct ibv_mr *, ibv_reg_dmabuf_mr,
	(struct ibv_pd *pd, uint64_t offset, size_t length, uint64_t iova, int fd, int access),
	(pd, offset, length, iova, fd, access))
POINTER(struct ibv_mr *, ibv_reg_mr, (struct ibv_pd *pd, void *addr, size_t length, int access),
	(pd, addr, length, access))
POINTER(struct ibv_mr *, ibv_reg_mr_iova2,
	(struct ibv_pd *pd, void *addr, size_t length, uint64_t iova, unsigned int access),
	(pd, addr, length, iova, access))
TEXT(ibv_wc_status_str, (enum ibv_wc_status status), (status))
/* GCOVR_EXCL_BR_STOP */
