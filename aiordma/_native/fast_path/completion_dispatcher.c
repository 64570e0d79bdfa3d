/* CompletionDispatcher: dispatches the completions of a device's queues to their queue pairs. */
#include "fast_path.h"

PyTypeObject *completion_dispatcher_type;

/* Return the entry with this key, or a free entry for it, or NULL if there is no table. */
static struct dispatch_entry *find_entry(struct completion_dispatcher *self, uint32_t key)
{
	uint32_t index = key * 2654435769u;

	while (self->capacity) {
		struct dispatch_entry *entry = &self->entries[index++ & (self->capacity - 1)];

		if (entry->key == key || !entry->key)
			return entry;
	}
	return NULL;
}

static int resize(struct completion_dispatcher *self, uint32_t capacity)
{
	struct dispatch_entry *old = self->entries, *end = old + self->capacity, *entry;
	struct dispatch_entry *entries = PyMem_Calloc(capacity, sizeof(*entries));

	if (!entries) {
		PyErr_NoMemory();
		return -1;
	}
	self->entries = entries;
	self->capacity = capacity;
	for (entry = old; entry < end; entry++)
		if (entry->key)
			*find_entry(self, entry->key) = *entry;
	PyMem_Free(old);
	return 0;
}

static PyObject *completion_dispatcher_attach(PyObject *self, PyObject *args)
{
	struct completion_dispatcher *dispatcher = (struct completion_dispatcher *)self;
	PyObject *sends, *receives, **where;
	struct dispatch_entry *entry;
	unsigned int key;
	int is_stream;

	if (!PyArg_ParseTuple(args, "IOO", &key, &sends, &receives))
		return NULL;
	is_stream = PyObject_TypeCheck(receives, stream_data_path_type);
	if (!is_instance(send_queue_core_type, sends) ||
	    (!is_stream && !is_instance(receive_queue_type, receives)))
		return NULL;
	if (!key) {
		PyErr_SetString(PyExc_ValueError, "a key must not be 0");
		return NULL;
	}
	if (2 * (dispatcher->used + 1) > dispatcher->capacity &&
	    resize(dispatcher, dispatcher->capacity ? 2 * dispatcher->capacity : 16))
		return NULL;
	entry = find_entry(dispatcher, key);
	if (!entry->key)
		dispatcher->used++;
	entry->key = key;
	replace((PyObject **)&entry->sends, sends);
	where = is_stream ? (PyObject **)&entry->stream : (PyObject **)&entry->receives;
	replace(where, receives);
	Py_RETURN_NONE;
}

/* Insert the entries from the gap to the next free entry again: the gap might hide them. */
static void close_gap(struct completion_dispatcher *self, struct dispatch_entry *gap)
{
	uint32_t mask = self->capacity - 1;
	uint32_t index = (uint32_t)(gap - self->entries);

	for (;;) {
		struct dispatch_entry moved = self->entries[++index & mask];

		if (!moved.key)
			return;
		self->entries[index & mask] = (struct dispatch_entry){ 0 };
		*find_entry(self, moved.key) = moved;
	}
}

static void release_entry(struct dispatch_entry *removed)
{
	Py_XDECREF((PyObject *)removed->sends);
	Py_XDECREF((PyObject *)removed->receives);
	Py_XDECREF((PyObject *)removed->stream);
}

static PyObject *completion_dispatcher_detach(PyObject *self, PyObject *number)
{
	struct completion_dispatcher *dispatcher = (struct completion_dispatcher *)self;
	unsigned long key = PyLong_AsUnsignedLong(number);
	struct dispatch_entry *entry;
	struct dispatch_entry removed;

	if (PyErr_Occurred())
		return NULL;
	entry = key ? find_entry(dispatcher, (uint32_t)key) : NULL;
	if (entry && entry->key) {
		removed = *entry;
		*entry = (struct dispatch_entry){ 0 };
		dispatcher->used--;
		close_gap(dispatcher, entry);
		release_entry(&removed);
	}
	Py_RETURN_NONE;
}

/* Return the entry of the queue pair that has used a shared receive, or NULL. */
static struct dispatch_entry *find_consumer(struct completion_dispatcher *self, uint32_t qp_num)
{
	PyObject *number = PyLong_FromUnsignedLong(qp_num);
	PyObject *key = number ? PyDict_GetItemWithError(self->consumers, number) : NULL;
	struct dispatch_entry *entry =
		key ? find_entry(self, (uint32_t)PyLong_AsUnsignedLong(key)) : NULL;

	Py_XDECREF(number);
	PyErr_Clear(); /* a lack of memory: Python handles the completion */
	return entry;
}

/* Return the entry that a completion belongs to, or NULL: Python must handle it. */
static struct dispatch_entry *entry_of(struct completion_dispatcher *self, const struct ibv_wc *wc)
{
	struct dispatch_entry *entry = find_entry(self, (uint32_t)(wc->wr_id >> KEY_SHIFT));

	/* The key in a shared receive is that of the shared receive queue. */
	if (entry && !entry->key && wc->wr_id & RECEIVE && wc->status == IBV_WC_SUCCESS)
		entry = find_consumer(self, wc->qp_num);
	return entry && entry->key ? entry : NULL;
}

/* Note that a queue pair has pending work for Python. */
static int notify(struct completion_dispatcher *self, uint32_t number)
{
	PyObject *key = PyLong_FromUnsignedLong(number);
	int result = key ? PyList_Append(self->notified, key) : -1;

	Py_XDECREF(key);
	return result;
}

/* Handle a completion of a send queue. Returns 1, or 0 if Python must handle it, too. */
static int take_send(struct completion_dispatcher *self, struct dispatch_entry *entry,
		     const struct ibv_wc *wc)
{
	if (entry->stream)
		complete_stream_sends(entry->stream, (uint32_t)wc->wr_id & NUMBER_MASK);
	return complete_request(entry->sends, wc, &self->ended);
}

/* Handle a completion of a receive that has succeeded. Returns 1, or -1 with an exception. */
static int take_receive(struct completion_dispatcher *self, struct dispatch_entry *entry,
			const struct ibv_wc *wc)
{
	struct receive_queue *receives = entry->receives;
	uint32_t key = entry->key;
	int result;
	struct received message = {
		.slot = (uint32_t)wc->wr_id & NUMBER_MASK,
		/* The bytes of a write with immediate data are not in the slot: it is empty. */
		.length = wc->opcode == IBV_WC_RECV_RDMA_WITH_IMM ? 0 : wc->byte_len,
		.flags = wc->wc_flags,
		.imm_data = wc->imm_data,
	};

	Py_INCREF((PyObject *)receives);
	complete_receive(receives->ring);
	result = append_received(receives, &message) || serve_waiter(&receives->parking, self);
	if (!result && receives->notify) {
		receives->notify = 0;
		result = notify(self, key);
	}
	Py_DECREF((PyObject *)receives);
	return result ? -1 : 1;
}

/* Handle a completion of a stream. Returns 1, or 0 if Python must handle it, too, or -1. */
static int take_of_stream(struct completion_dispatcher *self, struct dispatch_entry *entry,
			  const struct ibv_wc *wc)
{
	struct stream_data_path *stream = entry->stream;
	uint32_t key = entry->key;
	int advanced = 0;
	int done =
		wc->wr_id & RECEIVE ? take_stream_receive(stream, wc) : take_send(self, entry, wc);

	if (done > 0)
		advanced = advance_stream(stream, self);
	if (advanced > 0)
		advanced = notify(self, key);
	return advanced ? -1 : done;
}

/* Count a receive that has failed. Returns 1, or 0 if Python must handle it, too. */
static int take_failed_receive(const struct dispatch_entry *entry, const struct ibv_wc *wc)
{
	const int is_flush = wc->status == IBV_WC_WR_FLUSH_ERR;

	if (entry->stream)
		return count_failed_receive(entry->stream->receives, is_flush, 0);
	return count_failed_receive(entry->receives->ring, is_flush, entry->receives->closed);
}

/*
 * Handle a batch. Move the completions that are for Python to its beginning. An exception of one
 * completion, which is a lack of memory, does not keep the others from being handled.
 */
static void handle_batch(struct completion_dispatcher *self, int count, struct failure *failure)
{
	int index;

	self->pending = 0;
	for (index = 0; index < count; index++) {
		struct ibv_wc *wc = &self->batch[index];
		struct dispatch_entry *entry = entry_of(self, wc);
		int done = 0;

		if (entry && wc->wr_id & RECEIVE && wc->status != IBV_WC_SUCCESS)
			done = take_failed_receive(entry, wc);
		else if (entry && entry->stream)
			done = take_of_stream(self, entry, wc);
		else if (entry)
			done = wc->wr_id & RECEIVE ? take_receive(self, entry, wc) :
						     take_send(self, entry, wc);
		if (done < 0)
			note_failure(failure);
		else if (!done)
			self->batch[self->pending++] = *wc;
	}
}

/* Wake the tasks that wait for what the batch contained. */
static void wake_all(struct completion_dispatcher *self)
{
	struct failure failure = { NULL, NULL, NULL };
	Py_ssize_t count = PyList_Size(self->woken), index;
	PyObject *futures;

	if (count <= 0)
		return;
	if (count == 1) {
		futures = Py_NewRef(PyList_GetItem(self->woken, 0));
		if (!PyList_SetSlice(self->woken, 0, 1, NULL))
			wake(futures);
		Py_DECREF(futures);
		return;
	}
	futures = PyList_GetSlice(self->woken, 0, count);
	if (!futures || PyList_SetSlice(self->woken, 0, count, NULL))
		note_failure(&failure);
	for (index = 0; futures && index < count; index++) {
		wake(PyList_GetItem(futures, index));
		note_failure(&failure);
	}
	Py_XDECREF(futures);
	restore_failure(&failure);
}

/*
 * Handle a batch of `count` completions. Python code runs after all of them were handled, and
 * cannot poll before the last function has returned. Call on_pending if there is work for Python.
 * Returns 1 if a task has work to do now, 0 if none has, or -1 with an exception.
 */
int take_batch(struct completion_dispatcher *self, int count)
{
	struct failure failure = { NULL, NULL, NULL };
	int notified;

	if (count > 0) {
		self->took_some = 1;
		self->unarmed_iterations = 0;
		handle_batch(self, count, &failure);
	}
	self->is_dispatching = 1;
	notified = self->ended.first != NULL || PyList_Size(self->woken) > 0 || self->served_poller;
	self->served_poller = 0;
	end_transfers(&self->ended);
	note_failure(&failure);
	wake_all(self);
	note_failure(&failure);
	if (self->pending || PyList_Size(self->notified)) {
		notified = 1;
		Py_XDECREF(PyObject_CallNoArgs(self->on_pending));
		note_failure(&failure);
		self->pending = 0;
	}
	self->is_dispatching = 0;
	return restore_failure(&failure) ? -1 : notified;
}

static PyObject *count_or_error(struct completion_dispatcher *self, int count)
{
	return take_batch(self, count) < 0 ? NULL : PyLong_FromLong(count);
}

/* Return 1 with RuntimeError if the batch is in use. */
static int refuses_to_poll(const struct completion_dispatcher *self)
{
	if (self->is_dispatching)
		PyErr_SetString(PyExc_RuntimeError, "a batch of completions is being dispatched");
	return self->is_dispatching;
}

static struct ibv_cq *cq_of(PyObject *address)
{
	return (struct ibv_cq *)(uintptr_t)PyLong_AsUnsignedLongLong(address);
}

static PyObject *completion_dispatcher_poll(PyObject *self, PyObject *address)
{
	struct completion_dispatcher *dispatcher = (struct completion_dispatcher *)self;
	struct ibv_cq *cq = cq_of(address);

	if (PyErr_Occurred())
		return NULL;
	if (refuses_to_poll(dispatcher))
		return NULL;
	if (!cq)
		return PyLong_FromLong(0);
	return count_or_error(dispatcher, ibv_poll_cq(cq, BATCH, dispatcher->batch));
}

static PyObject *completion_dispatcher_poll_for(PyObject *self, PyObject *args)
{
	struct completion_dispatcher *dispatcher = (struct completion_dispatcher *)self;
	unsigned long long address, nanoseconds;

	if (!PyArg_ParseTuple(args, "KK", &address, &nanoseconds))
		return NULL;
	if (refuses_to_poll(dispatcher))
		return NULL;
	if (!address)
		return PyLong_FromLong(0);
	return count_or_error(dispatcher,
			      poll_until(dispatcher, (struct ibv_cq *)(uintptr_t)address,
					 now_ns() + nanoseconds));
}

static int completion_dispatcher_init(PyObject *self, PyObject *args, PyObject *kwargs)
{
	struct completion_dispatcher *dispatcher = (struct completion_dispatcher *)self;
	PyObject *on_pending, *on_failure = NULL, *on_full = NULL;

	if (!PyArg_ParseTuple(args, "O|OO", &on_pending, &on_failure, &on_full))
		return -1;
	dispatcher->budget = LOOP_BUDGET_NS;
	dispatcher->shortest = dispatcher->usual = MAX_LOOP_BUDGET_NS;
	dispatcher->on_pending = Py_NewRef(on_pending);
	dispatcher->on_failure = Py_XNewRef(on_failure);
	dispatcher->on_full = Py_XNewRef(on_full);
	dispatcher->notified = PyList_New(0);
	dispatcher->woken = PyList_New(0);
	dispatcher->queues = PyDict_New();
	dispatcher->consumers = PyDict_New();
	return dispatcher->notified && dispatcher->woken && dispatcher->queues &&
			       dispatcher->consumers ?
		       0 :
		       -1;
}

static int completion_dispatcher_traverse(PyObject *self, visitproc visit, void *arg)
{
	struct completion_dispatcher *dispatcher = (struct completion_dispatcher *)self;
	uint32_t index;
	int visited;

	Py_VISIT(Py_TYPE(self));
	Py_VISIT(dispatcher->on_pending);
	Py_VISIT(dispatcher->notified);
	Py_VISIT(dispatcher->woken);
	Py_VISIT(dispatcher->queues);
	Py_VISIT(dispatcher->consumers);
	Py_VISIT(dispatcher->on_failure);
	Py_VISIT(dispatcher->on_full);
	Py_VISIT(dispatcher->on_wait);
	if ((visited = visit_transfers(&dispatcher->ended, visit, arg)))
		return visited;
	for (index = 0; index < dispatcher->capacity; index++) {
		Py_VISIT(dispatcher->entries[index].sends);
		Py_VISIT(dispatcher->entries[index].receives);
		Py_VISIT(dispatcher->entries[index].stream);
	}
	return 0;
}

static int completion_dispatcher_clear(PyObject *self)
{
	struct completion_dispatcher *dispatcher = (struct completion_dispatcher *)self;
	struct dispatch_entry *entries = dispatcher->entries;
	uint32_t index, capacity = dispatcher->capacity;

	dispatcher->entries = NULL;
	dispatcher->capacity = dispatcher->used = 0;
	for (index = 0; index < capacity; index++)
		release_entry(&entries[index]);
	PyMem_Free(entries);
	clear_transfers(&dispatcher->ended);
	Py_CLEAR(dispatcher->on_pending);
	Py_CLEAR(dispatcher->on_failure);
	Py_CLEAR(dispatcher->on_full);
	Py_CLEAR(dispatcher->on_wait);
	return 0;
}

static void completion_dispatcher_dealloc(PyObject *self)
{
	PyObject_GC_UnTrack(self);
	completion_dispatcher_clear(self);
	Py_CLEAR(((struct completion_dispatcher *)self)->notified);
	Py_CLEAR(((struct completion_dispatcher *)self)->woken);
	Py_CLEAR(((struct completion_dispatcher *)self)->queues);
	Py_CLEAR(((struct completion_dispatcher *)self)->consumers);
	simple_dealloc(self);
}

static PyObject *completion_dispatcher_end_yield(PyObject *self, PyObject *args)
{
	struct loop_yield yield;
	long long now;

	if (!PyArg_ParseTuple(args, "LLL", &yield.began, &yield.budget_start, &now))
		return NULL;
	end_loop_yield((struct completion_dispatcher *)self, &yield, now);
	Py_RETURN_NONE;
}

static PyObject *completion_dispatcher_address(PyObject *self, void *unused)
{
	return PyLong_FromUnsignedLongLong(
		(uintptr_t)((struct completion_dispatcher *)self)->batch);
}

static PyMemberDef completion_dispatcher_members[] = {
	{ "pending", T_UINT, offsetof(struct completion_dispatcher, pending), READONLY,
	  "The number of completions for Python, at the beginning of the last batch." },
	{ "notified", T_OBJECT, offsetof(struct completion_dispatcher, notified), READONLY,
	  "Keys of queue pairs with pending work. The reader empties the list." },
	{ "budget_start", T_LONGLONG, offsetof(struct completion_dispatcher, budget_start), 0,
	  "time.monotonic_ns() when a polling task last resumed from the event loop." },
	{ "budget", T_LONGLONG, offsetof(struct completion_dispatcher, budget), 0,
	  "Nanoseconds of polling per iteration of the event loop." },
	{ "notified_at", T_LONGLONG, offsetof(struct completion_dispatcher, notified_at), 0,
	  "time.monotonic_ns() when polling last produced work for other tasks." },
	{ "last_event_at", T_LONGLONG, offsetof(struct completion_dispatcher, last_event_at),
	  READONLY, "time.monotonic_ns() of the last call of handle_event()." },
	{ "queues", T_OBJECT, offsetof(struct completion_dispatcher, queues), READONLY,
	  "A dict: the PolledQueues by the address of their queue." },
	{ "consumers", T_OBJECT, offsetof(struct completion_dispatcher, consumers), READONLY,
	  "A dict: the keys of the queue pairs that use shared receives, by their numbers." },
	{ "on_wait", T_OBJECT, offsetof(struct completion_dispatcher, on_wait), 0,
	  "Called before the loop waits if a queue is not armed. None: handle_event() arms it." },
	{ "has_unarmed", T_BOOL, offsetof(struct completion_dispatcher, has_unarmed), 0,
	  "True if a queue is left unarmed until the loop waits." },
	{ "is_reading", T_BOOL, offsetof(struct completion_dispatcher, is_reading), READONLY,
	  "True if watch() was called." },
	{ "open_post_lists", T_INT, offsetof(struct completion_dispatcher, open_post_lists), 0,
	  "The number of queue pairs with an open post list. Tasks do not poll while there are "
	  "any." },
	{ NULL, 0, 0, 0, NULL },
};

static PyGetSetDef completion_dispatcher_getset[] = {
	{ "batch", completion_dispatcher_address, NULL,
	  "The address of the batch of struct ibv_wc.", NULL },
	{ NULL, NULL, NULL, NULL, NULL },
};

static PyMethodDef completion_dispatcher_methods[] = {
	{ "attach", completion_dispatcher_attach, METH_VARARGS,
	  "attach(key, sends, receives): dispatch the completions with this key to these queues. "
	  "`receives` is a ReceiveQueue, or the StreamDataPathCore of a stream." },
	{ "detach", completion_dispatcher_detach, METH_O,
	  "detach(key): handle no more completions with this key." },
	{ "watch", completion_dispatcher_watch, METH_O,
	  "watch(channel): read the events of the channel at this address. 0: read no more." },
	{ "handle_event", completion_dispatcher_handle_event, METH_NOARGS,
	  "Take a batch, and run the tasks that wait for it. Read and acknowledge one event of "
	  "the channel, and arm its queue again, now or before the loop waits." },
	{ "before_wait", completion_dispatcher_before_wait, METH_O,
	  "before_wait(timeout): call on_wait() if a queue is not armed, and the loop waits now or "
	  "has taken no completion for some iterations." },
	{ "arm_again", completion_dispatcher_arm_again, METH_O,
	  "arm_again(queue): arm a PolledQueue, unless it is armed or polled. Then take a batch, "
	  "so that a completion between the two is not missed. Return True if there was one." },
	{ "end_yield", completion_dispatcher_end_yield, METH_VARARGS,
	  "end_yield(began, budget_start, now): the loop has run since `began`, when budget_start "
	  "was this. Start a new budget, unless another task has." },
	{ "poll", completion_dispatcher_poll, METH_O,
	  "poll(cq): handle a batch from the queue at this address. Return its size; negative on "
	  "failure." },
	{ "poll_for", completion_dispatcher_poll_for, METH_VARARGS,
	  "poll_for(cq, nanoseconds): poll() until there is a completion, or for this time." },
	{ NULL, NULL, 0, NULL },
};

static PyType_Slot completion_dispatcher_slots[] = {
	{ Py_tp_doc,
	  (void *)"CompletionDispatcher(on_pending, on_failure, on_full): dispatches the "
		  "completions of a device's queues to their queue pairs. handle_event() calls "
		  "on_failure(errno, function), and on_full(queue) if a queue might have more "
		  "completions." },
	{ Py_tp_new, PyType_GenericNew },
	{ Py_tp_init, completion_dispatcher_init },
	{ Py_tp_traverse, completion_dispatcher_traverse },
	{ Py_tp_clear, completion_dispatcher_clear },
	{ Py_tp_dealloc, completion_dispatcher_dealloc },
	{ Py_tp_members, completion_dispatcher_members },
	{ Py_tp_getset, completion_dispatcher_getset },
	{ Py_tp_methods, completion_dispatcher_methods },
	{ 0, NULL },
};

PyType_Spec completion_dispatcher_spec = {
	.name = "aiordma._native._fast_path.CompletionDispatcher",
	.basicsize = sizeof(struct completion_dispatcher),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
	.slots = completion_dispatcher_slots,
};
