/*
 * Messages that are not registered memory: they are sent inline, or copied to a free buffer, and
 * posted at once. What must wait is left to Python.
 */
#include "fast_path.h"

/* Longer messages are copied by Python, without the interpreter's lock. */
#define LARGEST_COPY 65536
/* Longer messages are posted without that lock: see post_requests(). */
#define SMALL_COPY 4096
/*
 * A request is signaled when the buffers of the unsignaled ones have this number of bytes. The
 * device may have sent them long ago, but they stay in flight until a later request has completed.
 */
#define UNSIGNALED_COPIES 65536
/* The most bytes of a message with a header that is sent inline. */
#define MAX_INLINE_WIRE 512

static int has_credit(const void *core)
{
	return ((const struct send_queue_core *)core)->credits > 0;
}

/*
 * Post a message of `nbytes` at `address`: in a buffer, or inline if `buffer` is NULL. Returns 0 or
 * an errno.
 */
static int post_message(struct send_queue_core *core, const char *address, Py_ssize_t nbytes,
			const struct pooled_buffer *buffer)
{
	struct send_queue_mark mark = mark_send_queue(core);
	struct ibv_sge sge = {
		.addr = (uintptr_t)address,
		.length = (uint32_t)nbytes,
		.lkey = buffer ? buffer->lkey : 0,
	};
	struct ibv_send_wr wr;
	int error;

	/* A send does not use the other members. rdma_verbs.h does not set them either. */
	wr.next = NULL;
	wr.sg_list = &sge;
	wr.num_sge = nbytes ? 1 : 0;
	wr.opcode = IBV_WR_SEND;
	wr.send_flags = buffer ? 0 : IBV_SEND_INLINE;
	commit_copy(core, &wr, buffer ? buffer_size(buffer) : 0, UNSIGNALED_COPIES, 0);
	error = post_requests(core, &wr, nbytes > SMALL_COPY);
	if (error) {
		roll_back_requests(core, mark);
		return error;
	}
	core->messages++;
	core->nbytes += nbytes;
	return 0;
}

static char *join_message(const struct message *message, char *where)
{
	memcpy(where, message->header, message->header_length);
	if (message->length) /* else its address can be NULL */
		memcpy(where + message->header_length, message->data, message->length);
	return where;
}

/* Post a message with a header inline. It is not inlined: a message without one needs no `wire`. */
__attribute__((noinline)) static int post_joined(struct send_queue_core *core,
						 const struct message *message)
{
	char wire[MAX_INLINE_WIRE];

	return post_message(core, join_message(message, wire),
			    message->header_length + message->length, NULL);
}

static int post_inline(struct send_queue_core *core, const struct message *message)
{
	if (message->header_length)
		return post_joined(core, message);
	return post_message(core, message->data, message->length, NULL);
}

/*
 * Keep the buffer of the request that was refused until the queue pair is destroyed: libsiw keeps a
 * request that it reports as failed, so that the device can still read the buffer.
 */
static void keep_refused(struct send_queue_core *core)
{
	PyObject *buffer = take_newest_in_flight(core);

	if (!core->refused)
		core->refused = PyList_New(0);
	if (!core->refused || PyList_Append(core->refused, buffer)) {
		PyErr_Clear();
		return; /* the buffer stays taken until the pool is closed */
	}
	Py_DECREF(buffer);
}

/* Copy a message to a free buffer and post it. Returns 1, or 0 with an errno or without. */
static int post_copy(struct send_queue_core *core, const struct message *message, Py_ssize_t nbytes,
		     int *error)
{
	struct pooled_buffer *buffer = take_buffer(core->buffers, nbytes);

	if (!buffer)
		return 0;
	if (make_room_in_flight(core)) {
		release_buffer(buffer);
		return -1;
	}
	join_message(message, (char *)(uintptr_t)buffer->address);
	add_in_flight(core, (PyObject *)buffer);
	*error = post_message(core, (char *)(uintptr_t)buffer->address, nbytes, buffer);
	if (*error)
		keep_refused(core);
	return !*error;
}

/* Return true if a message must wait for others: for tasks without a credit, or for a batch. */
static int must_wait(const struct send_queue_core *core)
{
	return core->waiters || core->batching || core->chain.count;
}

/*
 * Post a message now. It is copied if it cannot be inline. Returns 1 if it was posted, or 0 if the
 * caller must take the slow path; `error` is then the errno if posting has failed. Returns -1 with
 * an exception.
 */
static inline int post_now(struct send_queue_core *core, const struct message *message, int *error)
{
	Py_ssize_t nbytes = message->header_length + message->length;
	int is_inline = nbytes <= core->max_inline &&
			(!message->header_length || nbytes <= MAX_INLINE_WIRE);

	if (must_wait(core) || (!is_inline && (!core->buffers || nbytes > LARGEST_COPY ||
					       nbytes > core->max_message_size)))
		return 0;
	if (core->credits <= 0 && poll_within_budget(&core->polling, has_credit, core))
		return -1;
	/* Polling runs callbacks, which might have closed or destroyed the queue. */
	if (core->credits <= 0 || !is_usable(core))
		return 0;
	if (!is_inline)
		return post_copy(core, message, nbytes, error);
	*error = post_inline(core, message);
	return !*error;
}

/* See post_now(). */
int try_post_message(struct send_queue_core *core, const struct message *message, int *error)
{
	return post_now(core, message, error);
}

static int try_send(PyObject *self, PyObject *data, PyObject **result, int *error)
{
	struct send_queue_core *core = (struct send_queue_core *)self;
	struct message message = { "", 0, "", 0 };
	Py_buffer view;
	int posted;

	if (!PyBytes_CheckExact(data) && !PyByteArray_CheckExact(data) && !PyMemoryView_Check(data))
		return try_awaited_transfer(core, IBV_WR_SEND, data, NULL, result);
	if (!get_bytes(data, &view))
		return 0;
	message.data = view.buf;
	message.length = view.len;
	posted = post_now(core, &message, error);
	release_bytes(&view);
	if (posted > 0)
		*result = Py_NewRef(Py_None);
	return posted;
}

PyObject *send_queue_core_send(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
	static const struct attempt_kind kind = { "Connection.send", try_send, NULL };
	struct send_queue_core *core = (struct send_queue_core *)self;

	if (count == 2)
		return make_attempt(&kind, self, args[1], args[0], &core->slow_send,
				    core->checkpoints);
	PyErr_SetString(PyExc_TypeError, "send(owner, data)");
	return NULL;
}
