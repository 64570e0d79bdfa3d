/* ReceiveQueue: messages that have arrived and that no task has taken. */
#include "fast_path.h"

PyTypeObject *receive_queue_type;

/* Return the message at this position. The oldest one has index 0. */
static struct received *received_at(struct receive_queue *self, unsigned int index)
{
	return &self->fifo[(self->first + index) & (self->capacity - 1)];
}

static int receive_queue_init(PyObject *self, PyObject *args, PyObject *kwargs)
{
	struct receive_queue *queue = (struct receive_queue *)self;
	PyObject *ring;

	if (!PyArg_ParseTuple(args, "O", &ring) || !is_instance(receive_ring_type, ring))
		return -1;
	queue->ring = (struct receive_ring *)Py_NewRef(ring);
	queue->backlog = -1;
	return 0;
}

static int receive_queue_traverse(PyObject *self, visitproc visit, void *arg)
{
	Py_VISIT(Py_TYPE(self));
	Py_VISIT(((struct receive_queue *)self)->ring);
	Py_VISIT(((struct receive_queue *)self)->slow_recv);
	Py_VISIT(((struct receive_queue *)self)->slow_next);
	Py_VISIT(((struct receive_queue *)self)->checkpoints);
	return visit_parking(&((struct receive_queue *)self)->parking, visit, arg);
}

static int receive_queue_clear(PyObject *self)
{
	clear_parking(&((struct receive_queue *)self)->parking);
	Py_CLEAR(((struct receive_queue *)self)->slow_recv);
	Py_CLEAR(((struct receive_queue *)self)->slow_next);
	Py_CLEAR(((struct receive_queue *)self)->checkpoints);
	return 0;
}

static void receive_queue_dealloc(PyObject *self)
{
	struct receive_queue *queue = (struct receive_queue *)self;
	unsigned int index;

	PyObject_GC_UnTrack(self);
	for (index = 0; index < queue->count; index++)
		Py_CLEAR(received_at(queue, index)->copy);
	PyMem_Free(queue->fifo);
	Py_CLEAR(queue->ring);
	receive_queue_clear(self);
	simple_dealloc(self);
}

static PyObject *receive_queue_set_polling(PyObject *self, PyObject *args)
{
	return set_polling(self, &((struct receive_queue *)self)->parking.polling, args);
}

static int has_message(const void *queue)
{
	return ((const struct receive_queue *)queue)->count > 0;
}

/* Make room for one more message. Returns 0, or -1 with an exception. */
static int make_room(struct receive_queue *self)
{
	unsigned int capacity = self->capacity ? 2 * self->capacity : 8;
	struct received *fifo;
	unsigned int index;

	if (self->count < self->capacity)
		return 0;
	fifo = PyMem_Malloc(capacity * sizeof(*fifo));
	if (!fifo) {
		PyErr_NoMemory();
		return -1;
	}
	for (index = 0; index < self->count; index++)
		fifo[index] = *received_at(self, index);
	PyMem_Free(self->fifo);
	self->fifo = fifo;
	self->capacity = capacity;
	self->first = 0;
	return 0;
}

static char *slot_memory(struct receive_ring *ring, int slot)
{
	return (char *)ring->memory.buf + (size_t)slot * ring->slot_size;
}

/* Return the message as bytes. */
static PyObject *copied(struct receive_queue *self, struct received *message)
{
	if (message->copy)
		return Py_NewRef(message->copy);
	return PyBytes_FromStringAndSize(slot_memory(self->ring, message->slot), message->length);
}

/* Post a slot again, if there is one. The owner is notified of an errno. */
static void repost_slot(struct receive_queue *self, int slot)
{
	int error = slot < 0 ? 0 : post_slot(self->ring, slot);

	if (error && !self->error) {
		self->error = error;
		self->notify = 1;
	}
}

/* Copy a message out of its slot, and post the slot again. Returns 0, or -1 with an exception. */
static int spill(struct receive_queue *self, struct received *message)
{
	message->copy = copied(self, message);
	if (!message->copy)
		return -1;
	repost_slot(self, message->slot);
	message->slot = -1;
	self->spilled++;
	return 0;
}

/* Append a message. Returns 0, or -1 with an exception. */
int append_received(struct receive_queue *self, const struct received *arrived)
{
	struct receive_ring *ring = self->ring;
	struct received *message;

	if (arrived->slot < 0 || arrived->slot >= ring->slots ||
	    arrived->length > (unsigned int)ring->slot_size || !ring->memory.obj) {
		PyErr_SetString(PyExc_ValueError,
				"the slot does not exist, or the message is longer than a slot");
		return -1;
	}
	if (make_room(self))
		return -1;
	message = received_at(self, self->count);
	*message = *arrived;
	self->messages++;
	self->nbytes += arrived->length;
	self->count++;
	if (self->backlog >= 0 && ring->posted < (ring->slots + 1) / 2 && spill(self, message))
		return -1;
	if (self->backlog >= 0 && self->count > (unsigned int)self->backlog)
		self->notify = 1;
	return 0;
}

static PyObject *receive_queue_append(PyObject *self, PyObject *args)
{
	struct received message = { 0 };

	if (!PyArg_ParseTuple(args, "iIII", &message.slot, &message.length, &message.flags,
			      &message.imm_data))
		return NULL;
	if (append_received((struct receive_queue *)self, &message))
		return NULL;
	Py_RETURN_NONE;
}

static PyObject *receive_queue_copy_out(PyObject *self, PyObject *unused)
{
	struct receive_queue *queue = (struct receive_queue *)self;
	unsigned int index;

	for (index = 0; index < queue->count; index++) {
		struct received *message = received_at(queue, index);

		if (message->slot >= 0 && spill(queue, message))
			return NULL;
	}
	Py_RETURN_NONE;
}

/* Remove the oldest message. Returns its entry, which is valid until the next one is appended. */
static inline const struct received *remove_first(struct receive_queue *self)
{
	const struct received *message = received_at(self, 0);

	self->first = (self->first + 1) & (self->capacity - 1);
	self->count--;
	return message;
}

/*
 * Poll for a message if there is none. Returns 1 if the oldest one can be taken, 0 if the caller
 * must take the slow path, or -1 with an exception.
 */
static inline int has_oldest(struct receive_queue *queue)
{
	if (queue->parking.has_waiter || queue->closed || is_forked_child)
		return 0;
	if (queue->count) {
		queue->parking.polling.left = 0; /* of a poll that did not go on */
	} else {
		if (poll_within_budget(&queue->parking.polling, has_message, queue))
			return -1;
		note_polled(&queue->parking, queue->count > 0);
	}
	return queue->count && !queue->closed;
}

/* Remove the oldest message, and post its slot again. */
static inline void drop_oldest(struct receive_queue *queue)
{
	const struct received *oldest = remove_first(queue);

	Py_XDECREF(oldest->copy);
	repost_slot(queue, oldest->slot);
}

/* Find the oldest message that has arrived. Returns 1 with its bytes, or 0. */
int peek_oldest(struct receive_queue *queue, const char **data, unsigned int *length)
{
	struct received *oldest;

	if (!queue->count || queue->closed)
		return 0;
	oldest = received_at(queue, 0);
	*length = oldest->length;
	*data = oldest->copy ? PyBytes_AsString(oldest->copy) :
			       slot_memory(queue->ring, oldest->slot);
	return 1;
}

/* Find the oldest message, with polling. Returns as has_oldest() does, with its bytes. */
int find_oldest(struct receive_queue *queue, const char **data, unsigned int *length)
{
	int found = has_oldest(queue);

	return found > 0 ? peek_oldest(queue, data, length) : found;
}

void drop_oldest_and_repost(struct receive_queue *queue)
{
	drop_oldest(queue);
}

/* Return the oldest message as bytes, or NULL without an exception: take the slow path. */
static inline PyObject *take_oldest(struct receive_queue *queue)
{
	PyObject *message;

	if (has_oldest(queue) <= 0)
		return NULL;
	message = copied(queue, received_at(queue, 0));
	if (message)
		drop_oldest(queue);
	return message;
}

static PyObject *receive_queue_take_bytes(PyObject *self, PyObject *unused)
{
	PyObject *message = take_oldest((struct receive_queue *)self);

	return message || PyErr_Occurred() ? message : Py_NewRef(Py_None);
}

static int try_take(PyObject *self, PyObject *unused, PyObject **result, int *error)
{
	*result = take_oldest((struct receive_queue *)self);
	if (*result)
		return 1;
	return PyErr_Occurred() ? -1 : 0;
}

/* Return where a task can wait for a message, or NULL. */
struct parking *find_receive_parking(struct receive_queue *queue)
{
	if (queue->count || queue->error || !may_park(&queue->parking))
		return NULL;
	return &queue->parking;
}

static struct parking *find_parking(PyObject *self, PyObject *unused)
{
	return find_receive_parking((struct receive_queue *)self);
}

static PyObject *receive_queue_set_parking(PyObject *self, PyObject *args)
{
	return set_parking(self, &((struct receive_queue *)self)->parking, args);
}

static PyObject *receive_queue_recv(PyObject *self, PyObject *owner)
{
	static const struct attempt_kind kind = { "Connection.recv", try_take, find_parking };
	struct receive_queue *queue = (struct receive_queue *)self;

	return make_attempt(&kind, self, NULL, owner, &queue->slow_recv, queue->checkpoints);
}

static PyObject *receive_queue_next(PyObject *self, PyObject *owner)
{
	static const struct attempt_kind kind = { "Connection.__anext__", try_take, find_parking };
	struct receive_queue *queue = (struct receive_queue *)self;

	return make_attempt(&kind, self, NULL, owner, &queue->slow_next, queue->checkpoints);
}

/* The functions are methods of an object that refers to this one. */
static PyObject *receive_queue_unlink(PyObject *self, PyObject *unused)
{
	Py_CLEAR(((struct receive_queue *)self)->slow_recv);
	Py_CLEAR(((struct receive_queue *)self)->slow_next);
	Py_RETURN_NONE;
}

static PyObject *receive_queue_set_slow(PyObject *self, PyObject *args)
{
	struct receive_queue *queue = (struct receive_queue *)self;
	PyObject *recv, *next;

	if (!PyArg_ParseTuple(args, "OO", &recv, &next))
		return NULL;
	replace(&queue->slow_recv, recv);
	replace(&queue->slow_next, next);
	Py_RETURN_NONE;
}

static PyObject *receive_queue_peek(PyObject *self, PyObject *unused)
{
	struct receive_queue *queue = (struct receive_queue *)self;
	struct received *message;

	if (!queue->count)
		Py_RETURN_NONE;
	message = received_at(queue, 0);
	return Py_BuildValue("iIIIO", message->slot, message->length, message->flags,
			     message->imm_data, message->copy ? message->copy : Py_None);
}

static PyObject *receive_queue_drop_oldest(PyObject *self, PyObject *unused)
{
	struct receive_queue *queue = (struct receive_queue *)self;

	if (queue->count)
		Py_XDECREF(remove_first(queue)->copy);
	Py_RETURN_NONE;
}

static PyObject *receive_queue_wake(PyObject *self, PyObject *unused)
{
	struct receive_queue *queue = (struct receive_queue *)self;

	wake_waiter(&queue->parking);
	return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

static Py_ssize_t receive_queue_length(PyObject *self)
{
	return ((struct receive_queue *)self)->count;
}

static PyMemberDef receive_queue_members[] = {
	{ "backlog", T_INT, offsetof(struct receive_queue, backlog), 0,
	  "The number of messages that can wait. New ones are copied out of their slots while "
	  "less than half of the slots are posted. -1: no limit and no copies." },
	{ "error", T_INT, offsetof(struct receive_queue, error), READONLY,
	  "The errno of a slot that could not be posted again, or 0." },
	{ "notify", T_BOOL, offsetof(struct receive_queue, notify), 0,
	  "True if the owner is notified of the next message." },
	{ "waiter", T_OBJECT, offsetof(struct receive_queue, parking.waiter), 0,
	  "The future of the task that waits for a message. The next message sets it." },
	{ "woken_at", T_LONGLONG, offsetof(struct receive_queue, parking.woken_at), READONLY,
	  "time.monotonic_ns() when the waiter was woken last." },
	{ "has_waiter", T_BOOL, offsetof(struct receive_queue, parking.has_waiter), 0,
	  "True if a task waits for a message." },
	{ "may_park", T_BOOL, offsetof(struct receive_queue, parking.is_allowed), 0,
	  "True if recv() and next() can wait for a message themselves: the connection is open." },
	{ "waits", T_ULONGLONG, offsetof(struct receive_queue, parking.count), READONLY,
	  "The number of waits of recv() and next() themselves." },
	{ "checkpoints", T_OBJECT, offsetof(struct receive_queue, checkpoints), 0,
	  "The two halves of a checkpoint that recv() and next() execute, or None." },
	{ "closed", T_BOOL, offsetof(struct receive_queue, closed), 0,
	  "True if take_bytes() returns None." },
	{ "poll_budget", T_LONGLONG, offsetof(struct receive_queue, parking.polling.budget), 0,
	  "Nanoseconds for which take_bytes() polls for a message. Negative: it does not poll." },
	{ "preempted", T_BOOL, offsetof(struct receive_queue, parking.polling.preempted), READONLY,
	  "True if the last poll ended early: the loop or another task had work to do." },
	{ "messages", T_ULONGLONG, offsetof(struct receive_queue, messages), READONLY,
	  "The number of messages that have arrived." },
	{ "nbytes", T_ULONGLONG, offsetof(struct receive_queue, nbytes), READONLY,
	  "The number of bytes in these messages." },
	{ "spilled", T_ULONGLONG, offsetof(struct receive_queue, spilled), READONLY,
	  "The number of messages that were copied out of their slots." },
	{ NULL, 0, 0, 0, NULL },
};

static PyMethodDef receive_queue_methods[] = {
	{ "append", receive_queue_append, METH_VARARGS,
	  "append(slot, length, flags, imm_data): append the message in this slot." },
	{ "copy_out", receive_queue_copy_out, METH_NOARGS,
	  "Copy all messages out of their slots, and post the slots again." },
	{ "take_bytes", receive_queue_take_bytes, METH_NOARGS,
	  "Return the oldest message as bytes, and post its slot again. None: the caller takes the "
	  "slow path." },
	{ "recv", receive_queue_recv, METH_O,
	  "recv(owner): return an awaitable that takes the oldest message, or awaits recv() of "
	  "set_slow(). It keeps `owner` alive." },
	{ "next", receive_queue_next, METH_O,
	  "next(owner): return an awaitable like recv(), which awaits the `next()` of "
	  "set_slow()." },
	{ "set_slow", receive_queue_set_slow, METH_VARARGS,
	  "set_slow(recv, next): have the awaitables of recv() and next() await these if they "
	  "cannot take a message at once." },
	{ "unlink", receive_queue_unlink, METH_NOARGS,
	  "Drop the functions of Python: the queue has no user any more." },
	{ "set_parking", receive_queue_set_parking, METH_VARARGS,
	  "set_parking(make_future, yield_to_loop, policy): have recv() and next() await a future "
	  "themselves if may_park. The AdaptivePolling `policy` notes how long. They await "
	  "yield_to_loop() in the middle of a poll. None: they do not." },
	{ "set_polling", receive_queue_set_polling, METH_VARARGS,
	  "set_polling(dispatcher, cq, budget): poll this queue for up to `budget` nanoseconds if "
	  "there is no message. dispatcher None: do not poll." },
	{ "peek", receive_queue_peek, METH_NOARGS,
	  "Return (slot, length, flags, imm_data, copy) of the oldest message, or None. "
	  "slot is -1 if the message was copied." },
	{ "wake", receive_queue_wake, METH_NOARGS, "Wake the waiter, if there is one." },
	{ "drop_oldest", receive_queue_drop_oldest, METH_NOARGS,
	  "Remove the oldest message. The caller posts its slot." },
	{ NULL, NULL, 0, NULL },
};

static PyType_Slot receive_queue_slots[] = {
	{ Py_tp_doc,
	  (void *)"ReceiveQueue(ring): messages that have arrived and that no task has taken." },
	{ Py_tp_new, PyType_GenericNew },
	{ Py_tp_init, receive_queue_init },
	{ Py_tp_traverse, receive_queue_traverse },
	{ Py_tp_clear, receive_queue_clear },
	{ Py_tp_dealloc, receive_queue_dealloc },
	{ Py_sq_length, receive_queue_length },
	{ Py_tp_members, receive_queue_members },
	{ Py_tp_methods, receive_queue_methods },
	{ 0, NULL },
};

PyType_Spec receive_queue_spec = {
	.name = "aiordma._native._fast_path.ReceiveQueue",
	.basicsize = sizeof(struct receive_queue),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
	.slots = receive_queue_slots,
};
