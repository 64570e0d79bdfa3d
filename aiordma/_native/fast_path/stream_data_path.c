/*
 * StreamDataPathCore: the data of a byte stream and its credit updates, by the rsocket protocol.
 *
 * It leaves to Python: messages before the peer's connection data is known, control messages, the
 * mappings of iomap, registered memory, and each message that breaks the rules of the protocol.
 */
#include "fast_path.h"

#include <arpa/inet.h>

PyTypeObject *stream_data_path_type;

/*
 * A request is signaled when the unsignaled ones use one part in this many of the send ring. So a
 * writer that waits for space always waits for a signaled request.
 */
#define RING_PARTS 4
/*
 * The most bytes of one request are such a part, within these limits. So the peer can read them
 * while the rest is copied. Each request has costs of its own.
 */
#define SMALLEST_MAX_CHUNK (1 << 16)
#define LARGEST_MAX_CHUNK (1 << 18)

static int stream_init(PyObject *self, PyObject *args, PyObject *kwargs)
{
	struct stream_data_path *path = (struct stream_data_path *)self;
	PyObject *sends, *receives, *inbound, *outbound, *ring, *received, *copied;
	unsigned long long address;
	int is_iwarp, depth;

	if (!PyArg_ParseTuple(args, "OOOOOOOKIiip", &sends, &receives, &inbound, &outbound, &ring,
			      &received, &copied, &address, &path->send_lkey, &path->max_inline,
			      &depth, &is_iwarp))
		return -1;
	if (!is_instance(send_queue_core_type, sends) ||
	    !is_instance(receive_ring_type, receives) || !is_instance(inbound_type, inbound) ||
	    !is_instance(outbound_type, outbound) || !is_instance(send_ring_type, ring))
		return -1;
	path->sends = (struct send_queue_core *)Py_NewRef(sends);
	path->receives = (struct receive_ring *)Py_NewRef(receives);
	path->inbound = (struct inbound *)Py_NewRef(inbound);
	path->outbound = (struct outbound *)Py_NewRef(outbound);
	path->ring = (struct send_ring *)Py_NewRef(ring);
	path->send_address = address;
	path->is_iwarp = (char)is_iwarp;
	path->parking.polling.budget = -1;
	path->in_flight = PyMem_Calloc(depth > 0 ? depth : 1, sizeof(*path->in_flight));
	if (!path->in_flight) {
		PyErr_NoMemory();
		return -1;
	}
	path->depth = depth;
	if (PyObject_GetBuffer(received, &path->received, PyBUF_SIMPLE) ||
	    PyObject_GetBuffer(copied, &path->copied, PyBUF_WRITABLE))
		return -1;
	if ((uint64_t)path->received.len >= 2 * path->inbound->half &&
	    (uint64_t)path->copied.len >= path->ring->size && depth > 0)
		return 0;
	PyErr_SetString(PyExc_ValueError, "the memory is smaller than its ring");
	return -1;
}

static int stream_traverse(PyObject *self, visitproc visit, void *arg)
{
	struct stream_data_path *path = (struct stream_data_path *)self;
	int visited;

	Py_VISIT(Py_TYPE(self));
	Py_VISIT(path->sends);
	visited = visit_parking(&path->parking, visit, arg);
	if (visited)
		return visited;
	Py_VISIT(path->slow_receive);
	Py_VISIT(path->slow_send);
	Py_VISIT(path->checkpoints);
	return 0;
}

static int stream_clear(PyObject *self)
{
	clear_parking(&((struct stream_data_path *)self)->parking);
	Py_CLEAR(((struct stream_data_path *)self)->slow_receive);
	Py_CLEAR(((struct stream_data_path *)self)->slow_send);
	Py_CLEAR(((struct stream_data_path *)self)->checkpoints);
	return 0;
}

static void stream_dealloc(PyObject *self)
{
	struct stream_data_path *path = (struct stream_data_path *)self;

	PyObject_GC_UnTrack(self);
	stream_clear(self);
	PyBuffer_Release(&path->received);
	PyBuffer_Release(&path->copied);
	PyMem_Free(path->in_flight);
	Py_CLEAR(path->sends);
	Py_CLEAR(path->receives);
	Py_CLEAR(path->inbound);
	Py_CLEAR(path->outbound);
	Py_CLEAR(path->ring);
	simple_dealloc(self);
}

/* --- posting --- */

/* Return the number of work requests that a message needs. */
static int requests_per_message(const struct stream_data_path *self)
{
	return self->is_iwarp ? 2 : 1;
}

static int can_post(const struct stream_data_path *self)
{
	return is_usable(self->sends) && !self->receives->stopped;
}

/* Return the number of bytes that may be posted with one message now. */
static unsigned int room(const struct stream_data_path *self)
{
	/* Data leaves send credits for the control messages. */
	int needed = requests_per_message(self) * (STREAM_CONTROLS + 1);

	if (self->sends->credits < needed || self->count >= self->depth || !can_post(self))
		return 0;
	return outbound_room(self->outbound);
}

static struct stream_request *request_at(struct stream_data_path *self, unsigned int index)
{
	return &self->in_flight[(self->first + index) % self->depth];
}

/*
 * Post a message: as the immediate data of a write, or, on iWARP, as a send behind the write. A
 * message without bytes to write has no target. `copied` bytes of the ring are in use until it has
 * completed. Returns 0 or an errno.
 */
static int post_message(struct stream_data_path *self, const struct stream_message *message,
			uint64_t address, uint32_t copied)
{
	struct send_queue_core *sends = self->sends;
	struct ibv_sge sge = { .addr = address,
			       .length = message->length,
			       .lkey = self->send_lkey };
	struct ibv_sge own = { .addr = (uintptr_t)&message->message, .length = 4 };
	int is_inline = !copied;
	struct ibv_send_wr wr = {
		.sg_list = &sge,
		.num_sge = message->length ? 1 : 0,
		.opcode = self->is_iwarp ? IBV_WR_RDMA_WRITE : IBV_WR_RDMA_WRITE_WITH_IMM,
		.send_flags = is_inline ? IBV_SEND_INLINE : 0,
		.imm_data = htonl(message->message),
		.wr.rdma = { .remote_addr = message->target, .rkey = message->rkey },
	};
	struct ibv_send_wr send = {
		.sg_list = &own,
		.num_sge = 1,
		.opcode = IBV_WR_SEND,
		.send_flags = IBV_SEND_INLINE,
	};
	struct ibv_send_wr *first = &wr, *last = self->is_iwarp ? &send : &wr;
	struct stream_request *request;
	struct send_queue_mark mark = mark_send_queue(sends);
	int error;

	if (self->is_iwarp && message->length)
		wr.next = &send;
	else
		first = last;
	if (wr.next)
		commit_request(sends, &wr, 0);
	commit_copy(sends, last, copied, self->ring->size / RING_PARTS, message->is_control);
	request = request_at(self, self->count++);
	request->number = last->wr_id & NUMBER_MASK;
	request->copied = copied;
	request->is_control = message->is_control;
	error = post_requests(sends, first, !is_inline);
	if (error) {
		/* libsiw keeps a request that it reports as failed: the ring stays in use. */
		self->count--;
		roll_back_requests(sends, mark);
	}
	return error;
}

/* Post the credit updates that the peer needs, as far as credits allow. */
static void post_updates(struct stream_data_path *self)
{
	struct inbound *inbound = self->inbound;

	while (inbound->may_update && inbound_has_update(inbound) && !self->error &&
	       self->count < self->depth && self->sends->credits >= requests_per_message(self) &&
	       can_post(self) && outbound_take_control(self->outbound)) {
		struct stream_message update = inbound_take_update(inbound);

		self->error = post_message(self, &update, (uintptr_t)update.payload, 0);
	}
}

/* Return the most bytes of one request. */
static uint64_t max_chunk(const struct stream_data_path *self)
{
	uint64_t part = self->ring->size / RING_PARTS;

	if (part < SMALLEST_MAX_CHUNK)
		return SMALLEST_MAX_CHUNK;
	return part < LARGEST_MAX_CHUNK ? part : LARGEST_MAX_CHUNK;
}

/*
 * Post the next part of the data. Returns its length, 0 if nothing can be posted now, or a negative
 * errno.
 */
static Py_ssize_t write_part(struct stream_data_path *self, const char *data, Py_ssize_t nbytes)
{
	unsigned int limit = room(self);
	uint64_t start, most = max_chunk(self), length = (uint64_t)nbytes < most ? nbytes : most;
	struct stream_message message = { 0 };
	struct remote_segment target;
	uint32_t copied = 0;
	int error;

	if (limit < length)
		length = limit;
	if (!length)
		return 0;
	if (length > (uint64_t)self->max_inline) {
		length = copied = (uint32_t)reserve_space(self->ring, length, &start);
		if (!length)
			return 0;
		memcpy((char *)self->copied.buf + start, data, length);
	}
	target = outbound_use(self->outbound, (unsigned int)length);
	message.message = STREAM_DATA << STREAM_VALUE_BITS | (uint32_t)length;
	message.length = (uint32_t)length;
	message.target = target.addr;
	message.rkey = target.key;
	error = post_message(self, &message, copied ? self->send_address + start : (uintptr_t)data,
			     copied);
	return error ? -error : (Py_ssize_t)length;
}

/* --- completions --- */

/* Release the parts of the ring whose requests have completed, up to this number. */
void complete_stream_sends(struct stream_data_path *self, unsigned int number)
{
	while (self->count) {
		const struct stream_request *oldest = request_at(self, 0);

		if (((number - oldest->number) & NUMBER_MASK) > NUMBER_MASK >> 1)
			return;
		release_space(self->ring, oldest->copied);
		if (oldest->is_control)
			outbound_release_control(self->outbound);
		self->first = (self->first + 1) % self->depth;
		self->count--;
	}
}

/* Store the message of a completed receive. Returns 0 if the completion contains none. */
static int get_message(const struct stream_data_path *self, const struct ibv_wc *wc,
		       uint32_t *message)
{
	const struct receive_ring *ring = self->receives;
	unsigned int slot = (uint32_t)wc->wr_id & NUMBER_MASK;

	if (wc->wc_flags & IBV_WC_WITH_IMM) {
		*message = ntohl(wc->imm_data);
		return 1;
	}
	if (wc->byte_len != sizeof(*message) || slot >= (unsigned int)ring->slots ||
	    ring->slot_size < (int)sizeof(*message) || !ring->memory.obj)
		return 0;
	memcpy(message, (char *)ring->memory.buf + (size_t)slot * ring->slot_size,
	       sizeof(*message));
	if (self->swaps)
		*message = __builtin_bswap32(*message);
	return 1;
}

/* Process a message of the peer. Returns 1, or 0 if nothing was changed and Python processes it. */
static int process(struct stream_data_path *self, uint32_t message)
{
	uint32_t value = message & STREAM_VALUE_MASK;

	switch (message >> STREAM_VALUE_BITS) {
	case STREAM_DATA:
		if (!self->inbound->takes_data || !inbound_has_room(self->inbound, value))
			return 0;
		inbound_count_data(self->inbound, value);
		return 1;
	case STREAM_CREDIT:
		/* Python finds the target that is not valid again, and ends the connection. */
		return self->outbound->may_send && !outbound_update(self->outbound, value);
	default:
		return 0;
	}
}

/* Handle a completion of a receive. Returns 1, or 0 if Python must handle it instead. */
int take_stream_receive(struct stream_data_path *self, const struct ibv_wc *wc)
{
	uint32_t message;
	int error;

	if (!get_message(self, wc, &message) || !process(self, message))
		return 0;
	complete_receive(self->receives);
	self->messages_received++;
	error = post_slot(self->receives, (int)(wc->wr_id & NUMBER_MASK));
	if (error && !self->receive_error)
		self->receive_error = error;
	return 1;
}

/*
 * Post credit updates after a completion. If there are bytes, they serve the task that waits.
 * Returns 1 if Python must be notified: there is an error, or the owner waits for any completion.
 * Returns -1 with an exception.
 */
int advance_stream(struct stream_data_path *self, struct completion_dispatcher *dispatcher)
{
	int has_bytes = self->inbound->available > 0, is_wanted;

	post_updates(self);
	if (has_bytes && serve_waiter(&self->parking, dispatcher))
		return -1;
	is_wanted = (self->notify && self->messages_received) || self->error ||
		    self->receive_error || self->notify_sendable;
	if (!is_wanted || self->is_notified)
		return 0;
	self->is_notified = 1;
	return 1;
}

/* --- for Python --- */

static int has_bytes(const void *self)
{
	return ((const struct stream_data_path *)self)->inbound->available > 0;
}

/*
 * Poll for bytes if there are none. The caller takes them itself: the future of a transport is not
 * set. Returns 1 if there are some, 0 if not, or -1 with an exception.
 */
static int poll_bytes(struct stream_data_path *self)
{
	PyObject *waiter;
	int failed;

	if (self->parking.has_waiter || self->closed || is_forked_child)
		return 0;
	if (self->inbound->available) {
		self->parking.polling.left = 0; /* of a poll that did not go on */
	} else if (self->inbound->takes_data) {
		waiter = self->parking.waiter;
		self->parking.waiter = NULL;
		failed = poll_within_budget(&self->parking.polling, has_bytes, self);
		Py_XDECREF(self->parking.waiter);
		self->parking.waiter = waiter;
		if (failed)
			return -1;
		note_polled(&self->parking, self->inbound->available > 0);
	}
	return self->inbound->available && !self->closed;
}

/* Copy received bytes to `where`, and count them as read. */
static void take_bytes(struct stream_data_path *self, char *where, uint64_t nbytes)
{
	struct inbound *inbound = self->inbound;

	while (nbytes) {
		uint64_t part = inbound_readable(inbound, nbytes);

		memcpy(where, (const char *)self->received.buf + inbound->start, part);
		inbound_consume(inbound, part);
		where += part;
		nbytes -= part;
	}
	post_updates(self);
}

static PyObject *stream_read(PyObject *self, PyObject *argument)
{
	struct stream_data_path *path = (struct stream_data_path *)self;
	Py_ssize_t limit = PyNumber_AsSsize_t(argument, NULL);
	PyObject *data;
	int result;

	if (limit == -1 && PyErr_Occurred())
		return NULL;
	result = limit > 0 ? poll_bytes(path) : 0;
	if (result <= 0)
		return result ? NULL : Py_NewRef(Py_None);
	if ((uint64_t)limit > path->inbound->available)
		limit = path->inbound->available;
	data = PyBytes_FromStringAndSize(NULL, limit);
	if (data)
		take_bytes(path, PyBytes_AsString(data), limit);
	return data;
}

static PyObject *stream_read_into(PyObject *self, PyObject *memory)
{
	struct stream_data_path *path = (struct stream_data_path *)self;
	Py_buffer view;
	uint64_t nbytes;
	int result;

	if (PyObject_GetBuffer(memory, &view, PyBUF_WRITABLE))
		return NULL;
	result = view.len ? poll_bytes(path) : 0;
	nbytes = path->inbound->available;
	if ((uint64_t)view.len < nbytes)
		nbytes = view.len;
	if (result > 0)
		take_bytes(path, view.buf, nbytes);
	PyBuffer_Release(&view);
	if (result <= 0)
		return result ? NULL : Py_NewRef(Py_None);
	return PyLong_FromUnsignedLongLong(nbytes);
}

/* Return 1 if data can be copied and posted now. */
static int may_copy(const void *self)
{
	const struct stream_data_path *path = (const struct stream_data_path *)self;

	return path->ring->free && room(path);
}

/*
 * Post a part. If there is no room, poll for the completions that make some. `part` becomes what
 * write_part() returns. Returns 0, or -1 with an exception.
 */
static int write_or_poll(struct stream_data_path *self, const char *data, Py_ssize_t nbytes,
			 Py_ssize_t *part)
{
	*part = write_part(self, data, nbytes);
	if (*part || !self->outbound->may_send || !can_post(self))
		return 0;
	if (poll_within_budget(&self->sends->polling, may_copy, self))
		return -1;
	*part = write_part(self, data, nbytes);
	return 0;
}

/*
 * Post the part of the data that may be posted now. `posted` becomes its length, or a negative
 * errno. Returns 0, or -1 with an exception.
 */
static int write_parts(struct stream_data_path *path, const char *data, Py_ssize_t nbytes,
		       Py_ssize_t *posted)
{
	Py_ssize_t part = 1;

	*posted = 0;
	while (*posted < nbytes && part > 0) {
		if (write_or_poll(path, data + *posted, nbytes - *posted, &part))
			return -1;
		*posted = part < 0 ? part : *posted + part;
	}
	return 0;
}

static PyObject *stream_write(PyObject *self, PyObject *data)
{
	Py_ssize_t posted;
	Py_buffer view;
	int failed;

	if (PyObject_GetBuffer(data, &view, PyBUF_SIMPLE))
		return NULL;
	failed = write_parts((struct stream_data_path *)self, view.buf, view.len, &posted);
	PyBuffer_Release(&view);
	return failed ? NULL : PyLong_FromSsize_t(posted);
}

static PyObject *stream_send(PyObject *self, PyObject *data)
{
	if (((struct stream_data_path *)self)->has_writer || !PyBytes_CheckExact(data))
		return PyLong_FromLong(0);
	return stream_write(self, data);
}

/* --- the awaitables of ByteStream --- */

static int try_receive(PyObject *self, PyObject *limit, PyObject **result, int *error)
{
	return unless_none(stream_read(self, limit), result);
}

static struct parking *find_parking(PyObject *self, PyObject *limit)
{
	struct stream_data_path *path = (struct stream_data_path *)self;
	int may = path->inbound->takes_data && !path->inbound->available, overflow;

	if (!may || !may_park(&path->parking) || !PyLong_CheckExact(limit))
		return NULL;
	/* The slow path refuses a bad limit. */
	return PyLong_AsLongAndOverflow(limit, &overflow) > 0 || overflow > 0 ? &path->parking :
										NULL;
}

static PyObject *stream_set_parking(PyObject *self, PyObject *args)
{
	return set_parking(self, &((struct stream_data_path *)self)->parking, args);
}

/* `posted` becomes the length of the part that was posted if not all was, or a negative errno. */
static int try_send(PyObject *self, PyObject *data, PyObject **result, int *posted)
{
	struct stream_data_path *path = (struct stream_data_path *)self;
	Py_ssize_t length, part;

	if (path->has_writer || !PyBytes_CheckExact(data))
		return 0;
	length = PyBytes_Size(data);
	if (!length || length > INT_MAX)
		return 0;
	if (write_parts(path, PyBytes_AsString(data), length, &part))
		return -1;
	if (part != length) {
		*posted = (int)part;
		return 0;
	}
	*result = Py_NewRef(Py_None);
	return 1;
}

static PyObject *stream_start_receive(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
	static const struct attempt_kind kind = { "ByteStream.receive", try_receive, find_parking };
	struct stream_data_path *path = (struct stream_data_path *)self;

	if (count == 2)
		return make_attempt(&kind, self, args[1], args[0], &path->slow_receive,
				    path->checkpoints);
	PyErr_SetString(PyExc_TypeError, "start_receive(owner, limit)");
	return NULL;
}

static PyObject *stream_start_send(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
	static const struct attempt_kind kind = { "ByteStream.send", try_send, NULL };
	struct stream_data_path *path = (struct stream_data_path *)self;

	if (count == 2)
		return make_attempt(&kind, self, args[1], args[0], &path->slow_send,
				    path->checkpoints);
	PyErr_SetString(PyExc_TypeError, "start_send(owner, data)");
	return NULL;
}

static PyObject *stream_set_slow(PyObject *self, PyObject *args)
{
	struct stream_data_path *path = (struct stream_data_path *)self;
	PyObject *receive, *send;

	if (!PyArg_ParseTuple(args, "OO", &receive, &send))
		return NULL;
	replace(&path->slow_receive, receive);
	replace(&path->slow_send, send);
	Py_RETURN_NONE;
}

static PyObject *stream_take_notification(PyObject *self, PyObject *unused)
{
	struct stream_data_path *path = (struct stream_data_path *)self;
	PyObject *errors = Py_BuildValue("ii", path->error, path->receive_error);

	path->notify = path->notify && !path->messages_received;
	path->is_notified = 0;
	path->notify_sendable = 0;
	return errors;
}

static PyObject *stream_wake(PyObject *self, PyObject *unused)
{
	struct stream_data_path *path = (struct stream_data_path *)self;

	wake_waiter(&path->parking);
	return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

static PyObject *stream_set_polling(PyObject *self, PyObject *args)
{
	return set_polling(self, &((struct stream_data_path *)self)->parking.polling, args);
}

static PyObject *stream_post_credit_updates(PyObject *self, PyObject *unused)
{
	post_updates((struct stream_data_path *)self);
	Py_RETURN_NONE;
}

static PyObject *stream_get_room(PyObject *self, void *unused)
{
	return PyLong_FromUnsignedLong(room((struct stream_data_path *)self));
}

static PyObject *stream_may_copy(PyObject *self, void *unused)
{
	return PyBool_FromLong(may_copy(self));
}

static PyMemberDef stream_members[] = {
	{ "messages_received", T_ULONGLONG, offsetof(struct stream_data_path, messages_received),
	  READONLY, "The number of messages that were received here." },
	{ "swaps", T_BOOL, offsetof(struct stream_data_path, swaps), 0,
	  "True if the messages of the peer have the other byte order." },
	{ "checkpoints", T_OBJECT, offsetof(struct stream_data_path, checkpoints), 0,
	  "The two halves of a checkpoint that start_receive() and start_send() execute, or "
	  "None." },
	{ "closed", T_BOOL, offsetof(struct stream_data_path, closed), 0,
	  "True if read() and read_into() return None." },
	{ "waiter", T_OBJECT, offsetof(struct stream_data_path, parking.waiter), 0,
	  "The future of the task or of the transport that waits to read. The next bytes set it." },
	{ "woken_at", T_LONGLONG, offsetof(struct stream_data_path, parking.woken_at), READONLY,
	  "time.monotonic_ns() when the waiter was woken last." },
	{ "waits", T_ULONGLONG, offsetof(struct stream_data_path, parking.count), READONLY,
	  "The number of waits of start_receive() itself." },
	{ "has_reader", T_BOOL, offsetof(struct stream_data_path, parking.has_waiter), 0,
	  "True if a task waits to read: read() and read_into() return None to other tasks." },
	{ "may_park", T_BOOL, offsetof(struct stream_data_path, parking.is_allowed), 0,
	  "True if start_receive() can wait for bytes itself: the stream is open." },
	{ "has_writer", T_BOOL, offsetof(struct stream_data_path, has_writer), 0,
	  "True if a task is in the middle of sending: send() posts nothing for other tasks." },
	{ "notify", T_BOOL, offsetof(struct stream_data_path, notify), 0,
	  "True if the owner is notified of the first message." },
	{ "notify_sendable", T_BOOL, offsetof(struct stream_data_path, notify_sendable), 0,
	  "True if the owner is notified of the next completion." },
	{ "poll_budget", T_LONGLONG, offsetof(struct stream_data_path, parking.polling.budget), 0,
	  "Nanoseconds for which read() polls for bytes. Negative: it does not poll." },
	{ "preempted", T_BOOL, offsetof(struct stream_data_path, parking.polling.preempted),
	  READONLY, "True if the last poll ended early: the loop or another task had work to do." },
	{ NULL, 0, 0, 0, NULL },
};

static PyGetSetDef stream_getset[] = {
	{ "may_copy", stream_may_copy, NULL, "True if write() can copy data now.", NULL },
	{ "room", stream_get_room, NULL,
	  "The number of bytes that may be posted with one message now; 0 if none.", NULL },
	{ NULL, NULL, NULL, NULL, NULL },
};

static PyMethodDef stream_methods[] = {
	{ "read", stream_read, METH_O,
	  "read(limit): return received bytes, at most `limit`. None: the caller takes the slow "
	  "path." },
	{ "read_into", stream_read_into, METH_O,
	  "read_into(buffer): copy received bytes to the buffer, and return their number. None: "
	  "the caller takes the slow path." },
	{ "write", stream_write, METH_O,
	  "write(data): post the part of the data that may be posted now. Return its length in "
	  "bytes, or a negative errno of ibv_post_send(3). If there is no room, poll for it as "
	  "set_polling() of the SendQueueCore allows." },
	{ "send", stream_send, METH_O,
	  "send(data): write(data), but post nothing if the data is not of type bytes, or if "
	  "has_writer is set." },
	{ "start_receive", (PyCFunction)(void (*)(void))stream_start_receive, METH_FASTCALL,
	  "start_receive(owner, limit): return an awaitable that returns received bytes, or awaits "
	  "the `receive(limit)` of set_slow(). It keeps `owner` alive." },
	{ "start_send", (PyCFunction)(void (*)(void))stream_start_send, METH_FASTCALL,
	  "start_send(owner, data): return an awaitable that posts the data, or awaits the "
	  "send(data) of set_slow(); send(data, posted) if a part of these bytes was posted, or "
	  "if posting has failed (a negative errno). It keeps `owner` alive." },
	{ "set_parking", stream_set_parking, METH_VARARGS,
	  "set_parking(make_future, yield_to_loop, policy): have start_receive() await a future "
	  "itself if may_park. The AdaptivePolling `policy` notes how long. It awaits "
	  "yield_to_loop() in the middle of a poll. None: it does not." },
	{ "set_slow", stream_set_slow, METH_VARARGS,
	  "set_slow(receive, send): have the awaitables await these if they cannot finish at "
	  "once." },
	{ "post_updates", stream_post_credit_updates, METH_NOARGS,
	  "Post the credit updates that the peer needs, as far as credits allow." },
	{ "take_notification", stream_take_notification, METH_NOARGS,
	  "Return the errno of a credit update and of a receive that could not be posted, or 0. "
	  "The next notification needs notify_sendable." },
	{ "wake", stream_wake, METH_NOARGS, "Wake the waiter, if there is one." },
	{ "set_polling", stream_set_polling, METH_VARARGS,
	  "set_polling(dispatcher, cq, budget): poll this queue for up to `budget` nanoseconds if "
	  "there are no bytes to read. dispatcher None: do not poll." },
	{ NULL, NULL, 0, NULL },
};

static PyType_Slot stream_slots[] = {
	{ Py_tp_doc,
	  (void *)"StreamDataPathCore(sends, receives, inbound, outbound, ring, received, copied, "
		  "address, lkey, max_inline, depth, is_iwarp): the data of a byte stream. The "
		  "peer writes to the memory `received`. Sent data is copied to the memory "
		  "`copied`, which `ring` divides." },
	{ Py_tp_new, PyType_GenericNew },
	{ Py_tp_init, stream_init },
	{ Py_tp_traverse, stream_traverse },
	{ Py_tp_clear, stream_clear },
	{ Py_tp_dealloc, stream_dealloc },
	{ Py_tp_members, stream_members },
	{ Py_tp_getset, stream_getset },
	{ Py_tp_methods, stream_methods },
	{ 0, NULL },
};

PyType_Spec stream_data_path_spec = {
	.name = "aiordma._native._fast_path.StreamDataPathCore",
	.basicsize = sizeof(struct stream_data_path),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
	.slots = stream_slots,
};
