/*
 * EagerPath: the small messages of a message stream. It posts EAGER, takes EAGER out of the
 * ReceiveQueue, and returns credits, without a Python frame. All other wire messages are left to
 * Python: see aiordma/message_streams/wire.py, whose formats are repeated here.
 */
#include "fast_path.h"

#include <endian.h>

#define KIND_EAGER 1
#define KIND_CREDIT 5
#define HEADER_SIZE 8
#define SIZE_SIZE 8
#define EAGER_OVERHEAD (HEADER_SIZE + SIZE_SIZE)

static int eager_path_init(PyObject *self, PyObject *args, PyObject *kwargs)
{
	struct eager_path *path = (struct eager_path *)self;
	PyObject *credits, *sends, *queue;

	if (!PyArg_ParseTuple(args, "OOO", &credits, &sends, &queue) ||
	    !is_instance(message_credits_type, credits) ||
	    !is_instance(send_queue_core_type, sends) || !is_instance(receive_queue_type, queue))
		return -1;
	path->credits = (struct message_credits *)Py_NewRef(credits);
	path->sends = (struct send_queue_core *)Py_NewRef(sends);
	path->queue = (struct receive_queue *)Py_NewRef(queue);
	return 0;
}

static int eager_path_traverse(PyObject *self, visitproc visit, void *arg)
{
	struct eager_path *path = (struct eager_path *)self;

	Py_VISIT(Py_TYPE(self));
	Py_VISIT((PyObject *)path->credits);
	Py_VISIT((PyObject *)path->sends);
	Py_VISIT((PyObject *)path->queue);
	Py_VISIT(path->slow_send);
	Py_VISIT(path->slow_recv);
	Py_VISIT(path->slow_next);
	Py_VISIT(path->on_received);
	Py_VISIT(path->checkpoints);
	return 0;
}

static int eager_path_clear(PyObject *self)
{
	struct eager_path *path = (struct eager_path *)self;

	Py_CLEAR(path->slow_send);
	Py_CLEAR(path->slow_recv);
	Py_CLEAR(path->slow_next);
	Py_CLEAR(path->on_received);
	Py_CLEAR(path->checkpoints);
	return 0;
}

static void eager_path_dealloc(PyObject *self)
{
	struct eager_path *path = (struct eager_path *)self;

	PyObject_GC_UnTrack(self);
	eager_path_clear(self);
	Py_CLEAR(path->credits);
	Py_CLEAR(path->sends);
	Py_CLEAR(path->queue);
	simple_dealloc(self);
}

/* --- big-endian numbers of 64 bits: a size, or a header --- */

static void put(char *where, uint64_t value)
{
	value = htobe64(value);
	memcpy(where, &value, sizeof(value));
}

static uint64_t get(const char *where)
{
	uint64_t value;

	memcpy(&value, where, sizeof(value));
	return be64toh(value);
}

/* A header: the kind, a byte that is 0, the returned credits in 16 bits, a number of 32 bits. */
static uint64_t header_of(int kind, unsigned int returned, uint32_t number)
{
	return (uint64_t)kind << 56 | (uint64_t)returned << 32 | number;
}

static int kind_of(uint64_t header)
{
	return (int)(header >> 56);
}

static unsigned int returned_by(uint64_t header)
{
	return (unsigned int)(header >> 32) & 0xffff;
}

/* Take a wire message if it is CREDIT. Returns 1 if it was taken. */
static int take_credit_update(struct eager_path *path, const char *wire, unsigned int length)
{
	uint64_t header;

	if (length != HEADER_SIZE)
		return 0;
	header = get(wire);
	if (kind_of(header) != KIND_CREDIT || (uint32_t)header ||
	    !add_credits(path->credits, returned_by(header)))
		return 0;
	drop_oldest_and_repost(path->queue);
	return 1;
}

/* True if this side has a credit. Takes CREDIT that has arrived. */
static int find_credit(struct eager_path *path)
{
	unsigned int length;
	const char *data;

	while (!path->credits->credits && peek_oldest(path->queue, &data, &length) &&
	       take_credit_update(path, data, length))
		;
	return path->credits->credits > 0;
}

/* --- sending --- */

/* Post a whole wire message. Returns as an attempt_function. */
static int post_wire(struct eager_path *path, const char *wire, Py_ssize_t length, int *error)
{
	struct message message = { "", 0, wire, length };

	return try_post_message(path->sends, &message, error);
}

/*
 * Post `data` as EAGER with one frame. Returns as an attempt_function. What it takes and returns of
 * the credits is noted before: other tasks can run while it polls.
 */
static int post_eager(struct eager_path *path, const void *data, Py_ssize_t length, int *error)
{
	struct message_credits *credits = path->credits;
	char header[EAGER_OVERHEAD];
	struct message wire = { header, EAGER_OVERHEAD, data, length };
	unsigned int returned;
	int posted;

	if (length > path->eager_limit || !take_credit(credits))
		return 0;
	returned = return_credits(credits);
	put(header, header_of(KIND_EAGER, returned, 1));
	put(header + HEADER_SIZE, length);
	posted = try_post_message(path->sends, &wire, error);
	if (posted > 0) {
		path->messages_sent++;
		path->bytes_sent += length;
	} else {
		put_back_credit(credits);
		take_back_credits(credits, returned);
	}
	return posted;
}

static int try_send(PyObject *self, PyObject *data, PyObject **result, int *error)
{
	struct eager_path *path = (struct eager_path *)self;
	Py_buffer view;
	int posted;

	if (!path->may_send || !find_credit(path))
		return 0;
	if (!get_bytes(data, &view))
		return 0;
	posted = post_eager(path, view.buf, view.len, error);
	release_bytes(&view);
	if (posted > 0)
		*result = Py_NewRef(Py_None);
	return posted;
}

static PyObject *eager_path_try_send(PyObject *self, PyObject *data)
{
	PyObject *result = NULL;
	int error = 0; /* of a queue that has failed: the slow path notes it */
	int posted = try_send(self, data, &result, &error);

	Py_XDECREF(result);
	return posted < 0 ? NULL : PyBool_FromLong(posted);
}

static PyObject *eager_path_try_post(PyObject *self, PyObject *wire)
{
	int error = 0; /* of a queue that has failed: the task that posts the rest notes it */
	int posted;

	if (!PyBytes_CheckExact(wire)) {
		PyErr_SetString(PyExc_TypeError, "bytes expected");
		return NULL;
	}
	posted = post_wire(((struct eager_path *)self), PyBytes_AsString(wire), PyBytes_Size(wire),
			   &error);
	return posted < 0 ? NULL : PyBool_FromLong(posted);
}

static PyObject *eager_path_send(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
	static const struct attempt_kind kind = { "MessageStream.send", try_send, NULL };
	struct eager_path *path = (struct eager_path *)self;

	if (count == 2)
		return make_attempt(&kind, self, args[1], args[0], &path->slow_send,
				    path->checkpoints);
	PyErr_SetString(PyExc_TypeError, "send(owner, message)");
	return NULL;
}

/* --- receiving --- */

/*
 * Return the bytes of EAGER, or NULL if the wire message is another one, or breaks the protocol.
 * Python then looks at it again.
 */
static const char *eager_bytes(const struct eager_path *path, const char *wire, size_t length,
			       size_t *nbytes)
{
	const struct message_credits *credits = path->credits;
	uint64_t header, count, rest, index;

	if (length < HEADER_SIZE)
		return NULL;
	header = get(wire);
	count = (uint32_t)header;
	rest = length - HEADER_SIZE;
	if (kind_of(header) != KIND_EAGER || count > path->max_frames || count > rest / SIZE_SIZE ||
	    !credits->granted || returned_by(header) > credits->peer_window - credits->credits)
		return NULL;
	rest -= count * SIZE_SIZE;
	if (rest > path->max_nbytes)
		return NULL;
	*nbytes = rest;
	for (index = 0; index < count; index++) {
		uint64_t size = get(wire + HEADER_SIZE + index * SIZE_SIZE);

		if (size > rest)
			return NULL;
		rest -= size;
	}
	return rest ? NULL : wire + HEADER_SIZE + count * SIZE_SIZE;
}

/* Return credits if enough are free. Returns 0 if Python must do it, or -1 with an exception. */
static int post_credit_update(struct eager_path *path)
{
	char wire[HEADER_SIZE];
	unsigned int returned;
	int error = 0, posted;

	if (!is_credit_update_due(path->credits))
		return 1;
	returned = return_credits(path->credits);
	put(wire, header_of(KIND_CREDIT, returned, 0));
	posted = post_wire(path, wire, HEADER_SIZE, &error);
	if (posted <= 0)
		take_back_credits(path->credits, returned);
	return posted;
}

/* Have Python return credits, and wake the tasks that follow. Returns 0 or -1. */
static int call_on_received(struct eager_path *path)
{
	PyObject *result =
		path->on_received ? PyObject_CallNoArgs(path->on_received) : Py_NewRef(Py_None);

	Py_XDECREF(result);
	return result ? 0 : -1;
}

/* Do what follows when a wire message was taken. Returns 0, or -1 with an exception. */
static int after_taking(struct eager_path *path)
{
	int posted = post_credit_update(path);

	if (posted < 0)
		return -1;
	return posted && !path->followers && !path->has_queued ? 0 : call_on_received(path);
}

/*
 * Keep an exception from the user, who gets the message that was taken. A Ctrl-C is raised at the
 * next opportunity.
 */
static void report_exception(struct eager_path *path)
{
	if (PyErr_ExceptionMatches(PyExc_KeyboardInterrupt)) {
		PyErr_Clear();
		PyErr_SetInterrupt();
	} else {
		PyErr_WriteUnraisable((PyObject *)path);
	}
}

/* Find the oldest wire message that is not CREDIT. Returns as find_oldest() does. */
static int find_message(struct eager_path *path, const char **data, unsigned int *length)
{
	int found = find_oldest(path->queue, data, length);

	while (found > 0 && take_credit_update(path, *data, *length))
		found = after_taking(path) ? -1 : find_oldest(path->queue, data, length);
	return found;
}

/* Take the bytes of the oldest message, if it is EAGER. Returns as an attempt_function. */
static int try_recv(PyObject *self, PyObject *unused, PyObject **result, int *error)
{
	struct eager_path *path = (struct eager_path *)self;
	struct message_credits *credits = path->credits;
	const char *wire, *data;
	unsigned int length;
	size_t nbytes;
	int found;

	if (!path->may_receive)
		return 0;
	found = find_message(path, &wire, &length);
	if (found <= 0)
		return found;
	data = eager_bytes(path, wire, length, &nbytes);
	if (!data || !path->may_receive)
		return 0;
	*result = PyBytes_FromStringAndSize(data, (Py_ssize_t)nbytes);
	if (!*result)
		return -1;
	add_credits(credits, returned_by(get(wire)));
	free_granted(credits);
	drop_oldest_and_repost(path->queue);
	path->messages_received++;
	path->bytes_received += nbytes;
	if (after_taking(path))
		report_exception(path);
	return 1;
}

static PyObject *eager_path_try_recv(PyObject *self, PyObject *unused)
{
	PyObject *result = NULL;
	int error = 0, taken = try_recv(self, NULL, &result, &error);

	return taken ? result : Py_NewRef(Py_None);
}

static PyObject *eager_path_take_other(PyObject *self, PyObject *unused)
{
	struct eager_path *path = (struct eager_path *)self;
	unsigned int length;
	const char *data;
	PyObject *wire;

	if (!peek_oldest(path->queue, &data, &length) || (length && data[0] == KIND_EAGER))
		Py_RETURN_NONE;
	wire = PyBytes_FromStringAndSize(data, length);
	if (wire)
		drop_oldest_and_repost(path->queue);
	return wire;
}

/* A task that waits in Python wants another task to wait there for all. */
static struct parking *find_eager_parking(PyObject *self, PyObject *unused)
{
	struct eager_path *path = (struct eager_path *)self;

	if (!path->may_receive || path->followers)
		return NULL;
	return find_receive_parking(path->queue);
}

/* A task that follows waits for this one to take wire messages: it must know of its end. */
static void wake_followers(PyObject *self)
{
	struct eager_path *path = (struct eager_path *)self;
	struct failure failure = { NULL, NULL, NULL };

	if (!path->followers)
		return;
	note_failure(&failure);
	if (call_on_received(path))
		report_exception(path);
	restore_failure(&failure);
}

static PyObject *eager_path_recv(PyObject *self, PyObject *owner)
{
	static const struct attempt_kind kind = { "MessageStream.recv", try_recv,
						  find_eager_parking, 0, wake_followers };
	struct eager_path *path = (struct eager_path *)self;

	return make_attempt(&kind, self, NULL, owner, &path->slow_recv, path->checkpoints);
}

static PyObject *eager_path_next(PyObject *self, PyObject *owner)
{
	static const struct attempt_kind kind = { "MessageStream.__anext__", try_recv,
						  find_eager_parking, 0, wake_followers };
	struct eager_path *path = (struct eager_path *)self;

	return make_attempt(&kind, self, NULL, owner, &path->slow_next, path->checkpoints);
}

/* --- settings --- */

static PyObject *eager_path_set_limits(PyObject *self, PyObject *args)
{
	struct eager_path *path = (struct eager_path *)self;

	if (!PyArg_ParseTuple(args, "LIK", &path->eager_limit, &path->max_frames,
			      &path->max_nbytes))
		return NULL;
	Py_RETURN_NONE;
}

static PyObject *eager_path_set_slow(PyObject *self, PyObject *args)
{
	struct eager_path *path = (struct eager_path *)self;
	PyObject *send, *recv, *next, *on_received;

	if (!PyArg_ParseTuple(args, "OOOO", &send, &recv, &next, &on_received))
		return NULL;
	replace(&path->slow_send, send);
	replace(&path->slow_recv, recv);
	replace(&path->slow_next, next);
	replace(&path->on_received, on_received);
	Py_RETURN_NONE;
}

static PyMemberDef eager_path_members[] = {
	{ "may_send", T_BOOL, offsetof(struct eager_path, may_send), 0,
	  "True if no message waits to be posted before the next one." },
	{ "may_receive", T_BOOL, offsetof(struct eager_path, may_receive), 0,
	  "True if the next wire message begins a message, and none waits to be received." },
	{ "has_queued", T_BOOL, offsetof(struct eager_path, has_queued), 0,
	  "True if messages wait in Python, for example for credits." },
	{ "followers", T_INT, offsetof(struct eager_path, followers), 0,
	  "The number of tasks that wait in Python for another task to take wire messages." },
	{ "checkpoints", T_OBJECT, offsetof(struct eager_path, checkpoints), 0,
	  "The two halves of a checkpoint that the awaitables execute, or None." },
	{ "messages_sent", T_ULONGLONG, offsetof(struct eager_path, messages_sent), READONLY,
	  "The number of messages that were sent." },
	{ "bytes_sent", T_ULONGLONG, offsetof(struct eager_path, bytes_sent), READONLY,
	  "The number of bytes in these messages." },
	{ "messages_received", T_ULONGLONG, offsetof(struct eager_path, messages_received),
	  READONLY, "The number of messages that were received." },
	{ "bytes_received", T_ULONGLONG, offsetof(struct eager_path, bytes_received), READONLY,
	  "The number of bytes in these messages." },
	{ NULL, 0, 0, 0, NULL },
};

static PyMethodDef eager_path_methods[] = {
	{ "send", (PyCFunction)(void (*)(void))eager_path_send, METH_FASTCALL,
	  "send(owner, message): return an awaitable that posts a message, or awaits "
	  "send(message) of set_slow(). It keeps `owner` alive." },
	{ "try_send", eager_path_try_send, METH_O,
	  "try_send(message): post a message now. Returns False if that is not possible." },
	{ "try_post", eager_path_try_post, METH_O,
	  "try_post(wire): post a whole wire message now. Returns False if that is not possible." },
	{ "try_recv", eager_path_try_recv, METH_NOARGS,
	  "Return the bytes of the oldest message, or None if it is not there or not EAGER." },
	{ "take_other", eager_path_take_other, METH_NOARGS,
	  "Return a copy of the oldest wire message, and post its receive again. Return None if "
	  "there is none, or it is EAGER." },
	{ "recv", eager_path_recv, METH_O,
	  "recv(owner): return an awaitable that takes the bytes of the oldest message, or awaits "
	  "recv() of set_slow(). It keeps `owner` alive." },
	{ "next", eager_path_next, METH_O,
	  "next(owner): return an awaitable like recv(), which awaits the `next()` of "
	  "set_slow()." },
	{ "set_limits", eager_path_set_limits, METH_VARARGS,
	  "set_limits(eager_limit, max_frames, max_nbytes): post messages of up to `eager_limit` "
	  "bytes, and take messages of up to `max_frames` frames and `max_nbytes` bytes." },
	{ "set_slow", eager_path_set_slow, METH_VARARGS,
	  "set_slow(send, recv, next, on_received): have the awaitables await these if they cannot "
	  "finish at once; `send(message, errno)` if posting has failed. on_received() is called "
	  "after a message was taken, if there are followers, if messages are queued, or if "
	  "credits are due that could not be returned; and when a task that waited to receive has "
	  "ended, if there are followers." },
	{ NULL, NULL, 0, NULL },
};

static PyType_Slot eager_path_slots[] = {
	{ Py_tp_doc, (void *)"EagerPath(credits, sends, queue): the small messages of a message "
			     "stream." },
	{ Py_tp_new, PyType_GenericNew },
	{ Py_tp_init, eager_path_init },
	{ Py_tp_traverse, eager_path_traverse },
	{ Py_tp_clear, eager_path_clear },
	{ Py_tp_dealloc, eager_path_dealloc },
	{ Py_tp_members, eager_path_members },
	{ Py_tp_methods, eager_path_methods },
	{ 0, NULL },
};

PyType_Spec eager_path_spec = {
	.name = "aiordma._native._fast_path.EagerPath",
	.basicsize = sizeof(struct eager_path),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
	.slots = eager_path_slots,
};
