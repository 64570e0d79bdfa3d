/* Completions: from the completion queues of a device to their owners. */
#include "fast_path.h"

static struct lane *find_lane(struct completions *self, uint32_t key)
{
	uint32_t index = key * 2654435769u;

	while (self->capacity) {
		struct lane *lane = &self->lanes[index++ & (self->capacity - 1)];

		if (lane->key == key || !lane->key)
			return lane;
	}
	return NULL;
}

static int resize(struct completions *self, uint32_t capacity)
{
	struct lane *old = self->lanes, *end = old + self->capacity, *lane;
	struct lane *lanes = PyMem_Calloc(capacity, sizeof(*lanes));

	if (!lanes) {
		PyErr_NoMemory();
		return -1;
	}
	self->lanes = lanes;
	self->capacity = capacity;
	for (lane = old; lane < end; lane++)
		if (lane->key)
			*find_lane(self, lane->key) = *lane;
	PyMem_Free(old);
	return 0;
}

static PyObject *completions_attach(PyObject *self, PyObject *args)
{
	struct completions *completions = (struct completions *)self;
	PyObject *sends, *arrivals;
	struct lane *lane;
	unsigned int key;

	if (!PyArg_ParseTuple(args, "IOO", &key, &sends, &arrivals))
		return NULL;
	if (!is_instance(self, "SendLane", sends) || !is_instance(self, "Arrivals", arrivals))
		return NULL;
	if (!key) {
		PyErr_SetString(PyExc_ValueError, "a key is not 0");
		return NULL;
	}
	if (2 * (completions->used + 1) > completions->capacity &&
	    resize(completions, completions->capacity ? 2 * completions->capacity : 16))
		return NULL;
	lane = find_lane(completions, key);
	if (!lane->key)
		completions->used++;
	lane->key = key;
	replace((PyObject **)&lane->sends, sends);
	replace((PyObject **)&lane->arrivals, arrivals);
	Py_RETURN_NONE;
}

/* What stands behind a gap, up to the next one, may have been meant to stand in it. */
static void close_gap(struct completions *self, struct lane *gap)
{
	uint32_t mask = self->capacity - 1;
	uint32_t index = (uint32_t)(gap - self->lanes);

	for (;;) {
		struct lane moved = self->lanes[++index & mask];

		if (!moved.key)
			return;
		self->lanes[index & mask] = (struct lane){ 0 };
		*find_lane(self, moved.key) = moved;
	}
}

static PyObject *completions_detach(PyObject *self, PyObject *number)
{
	struct completions *completions = (struct completions *)self;
	unsigned long key = PyLong_AsUnsignedLong(number);
	struct lane *lane;
	struct lane gone;

	if (PyErr_Occurred())
		return NULL;
	lane = key ? find_lane(completions, (uint32_t)key) : NULL;
	if (lane && lane->key) {
		gone = *lane;
		*lane = (struct lane){ 0 };
		completions->used--;
		close_gap(completions, lane);
		Py_DECREF(gone.sends);
		Py_DECREF(gone.arrivals);
	}
	Py_RETURN_NONE;
}

/* Have the owner look, at the end of the batch. */
static int tell(struct completions *self, uint32_t number)
{
	PyObject *key = PyLong_FromUnsignedLong(number);
	int result = key ? PyList_Append(self->told, key) : -1;

	Py_XDECREF(key);
	return result;
}

/* 1: done with; 0: for Python. */
static int take_send(struct completions *self, struct lane *lane, const struct ibv_wc *wc)
{
	struct send_lane *sends = lane->sends;
	struct transfer *transfer;

	sends_ended(sends, (uint32_t)wc->wr_id);
	if (wc->status != IBV_WC_SUCCESS)
		return 0;
	transfer = find_transfer(&sends->under_way, (uint32_t)wc->wr_id & NUMBER_MASK);
	if (transfer) {
		transfer->succeeded = 1;
		append_transfer(&self->ended, unlink_transfer(&sends->under_way, transfer));
		Py_DECREF((PyObject *)transfer);
	}
	return !sends->lent && !sends->waiting && !(sends->queued.first && sends->turns > 0);
}

static int take_receive(struct completions *self, struct lane *lane, const struct ibv_wc *wc)
{
	struct arrivals *arrivals = lane->arrivals;
	uint32_t key = lane->key;
	int result;
	struct arrival arrival = {
		.slot = (uint32_t)wc->wr_id & NUMBER_MASK,
		/* The bytes of a write with immediate data went elsewhere: the message is empty. */
		.length = wc->opcode == IBV_WC_RECV_RDMA_WITH_IMM ? 0 : wc->byte_len,
		.flags = wc->wc_flags,
		.imm_data = wc->imm_data,
	};

	if (wc->status != IBV_WC_SUCCESS)
		return 0;
	Py_INCREF((PyObject *)arrivals);
	arrivals->ring->posted--;
	result = add_arrival(arrivals, &arrival);
	if (!result && arrivals->tell) {
		arrivals->tell = 0;
		result = tell(self, key);
	}
	Py_DECREF((PyObject *)arrivals);
	return result ? -1 : 1;
}

/* Take a batch. What is for Python moves to its beginning. */
static int sort(struct completions *self, int count)
{
	int index;

	self->left = 0;
	for (index = 0; index < count; index++) {
		struct ibv_wc *wc = &self->batch[index];
		struct lane *lane = find_lane(self, (uint32_t)(wc->wr_id >> KEY_SHIFT));
		int done = 0;

		if (lane && lane->key)
			done = wc->wr_id & RECEIVE ? take_receive(self, lane, wc) :
						     take_send(self, lane, wc);
		if (done < 0)
			return -1;
		if (!done)
			self->batch[self->left++] = *wc;
	}
	return 0;
}

/* 1: somebody was told something; 0: nobody; -1 with an exception. */
int take_batch(struct completions *self, int count)
{
	struct failure failure = { NULL, NULL, NULL };
	int told;

	if (count > 0 && sort(self, count))
		return -1;
	told = self->ended.first != NULL;
	end_transfers(&self->ended);
	note_failure(&failure);
	if (self->left || PyList_Size(self->told)) {
		told = 1;
		Py_XDECREF(PyObject_CallNoArgs(self->deliver));
		note_failure(&failure);
		self->left = 0;
	}
	return restore_failure(&failure) ? -1 : told;
}

static PyObject *taken(struct completions *self, int count)
{
	return take_batch(self, count) < 0 ? NULL : PyLong_FromLong(count);
}

static struct ibv_cq *cq_of(PyObject *address)
{
	return (struct ibv_cq *)(uintptr_t)PyLong_AsUnsignedLongLong(address);
}

static PyObject *completions_poll(PyObject *self, PyObject *address)
{
	struct completions *completions = (struct completions *)self;
	struct ibv_cq *cq = cq_of(address);

	if (PyErr_Occurred())
		return NULL;
	if (!cq)
		return PyLong_FromLong(0);
	return taken(completions, ibv_poll_cq(cq, BATCH, completions->batch));
}

static PyObject *completions_spin(PyObject *self, PyObject *args)
{
	struct completions *completions = (struct completions *)self;
	unsigned long long address, nanoseconds;
	int count, told;

	if (!PyArg_ParseTuple(args, "KK", &address, &nanoseconds))
		return NULL;
	if (!address)
		return PyLong_FromLong(0);
	count = spin_until(completions, (struct ibv_cq *)(uintptr_t)address,
			   now_ns() + nanoseconds);
	told = take_batch(completions, count);
	if (told > 0)
		completions->told_at = now_ns();
	return told < 0 ? NULL : PyLong_FromLong(count);
}

/* One event a call: a queue has no other until it is armed again. */
static PyObject *completions_event(PyObject *self, PyObject *address)
{
	struct completions *completions = (struct completions *)self;
	struct ibv_comp_channel *channel =
		(struct ibv_comp_channel *)(uintptr_t)PyLong_AsUnsignedLongLong(address);
	struct ibv_cq *cq;
	void *context;

	if (PyErr_Occurred())
		return NULL;
	completions->event_came = now_ns();
	if (!channel)
		return PyLong_FromLong(0);
	while (ibv_get_cq_event(channel, &cq, &context)) {
		if (errno == EAGAIN || errno == EWOULDBLOCK)
			return PyLong_FromLong(0);
		if (errno != EINTR)
			return PyLong_FromLong(-errno);
	}
	ibv_ack_cq_events(cq, 1);
	return PyLong_FromUnsignedLongLong((uintptr_t)cq);
}

static PyObject *completions_arm(PyObject *self, PyObject *address)
{
	struct ibv_cq *cq = cq_of(address);

	if (PyErr_Occurred())
		return NULL;
	if (!cq)
		return PyLong_FromLong(0);
	return PyLong_FromLong(abs(ibv_req_notify_cq(cq, 0)));
}

static int completions_init(PyObject *self, PyObject *args, PyObject *kwargs)
{
	struct completions *completions = (struct completions *)self;
	PyObject *deliver;

	if (!PyArg_ParseTuple(args, "O", &deliver))
		return -1;
	completions->turn_length = TURN_NANOSECONDS;
	completions->deliver = Py_NewRef(deliver);
	completions->told = PyList_New(0);
	return completions->told ? 0 : -1;
}

static int completions_traverse(PyObject *self, visitproc visit, void *arg)
{
	struct completions *completions = (struct completions *)self;
	uint32_t index;
	int visited;

	Py_VISIT(Py_TYPE(self));
	Py_VISIT(completions->deliver);
	Py_VISIT(completions->told);
	if ((visited = visit_transfers(&completions->ended, visit, arg)))
		return visited;
	for (index = 0; index < completions->capacity; index++) {
		Py_VISIT(completions->lanes[index].sends);
		Py_VISIT(completions->lanes[index].arrivals);
	}
	return 0;
}

static int completions_clear(PyObject *self)
{
	struct completions *completions = (struct completions *)self;
	struct lane *lanes = completions->lanes;
	uint32_t index, capacity = completions->capacity;

	completions->lanes = NULL;
	completions->capacity = completions->used = 0;
	for (index = 0; index < capacity; index++) {
		Py_XDECREF((PyObject *)lanes[index].sends);
		Py_XDECREF((PyObject *)lanes[index].arrivals);
	}
	PyMem_Free(lanes);
	clear_transfers(&completions->ended);
	Py_CLEAR(completions->deliver);
	return 0;
}

static void completions_dealloc(PyObject *self)
{
	PyObject_GC_UnTrack(self);
	completions_clear(self);
	Py_CLEAR(((struct completions *)self)->told);
	simple_dealloc(self);
}

static PyObject *completions_address(PyObject *self, void *unused)
{
	return PyLong_FromUnsignedLongLong((uintptr_t)((struct completions *)self)->batch);
}

static PyMemberDef completions_members[] = {
	{ "left", T_UINT, offsetof(struct completions, left), READONLY,
	  "Completions of the last batch that are for Python, at its beginning." },
	{ "told", T_OBJECT, offsetof(struct completions, told), READONLY,
	  "Keys of those who are to look; whoever reads the list empties it." },
	{ "turn_began", T_LONGLONG, offsetof(struct completions, turn_began), 0,
	  "When a task that polls last came from the loop: time.monotonic_ns()." },
	{ "turn_length", T_LONGLONG, offsetof(struct completions, turn_length), 0,
	  "So many nanoseconds of a turn may be spent on polling." },
	{ "told_at", T_LONGLONG, offsetof(struct completions, told_at), 0,
	  "When a task that polls found something for others, which wait for the loop." },
	{ "event_came", T_LONGLONG, offsetof(struct completions, event_came), READONLY,
	  "When event() was called last: time.monotonic_ns()." },
	{ "held", T_INT, offsetof(struct completions, held), 0,
	  "Queue pairs with requests that are not posted yet: until they are, nobody polls." },
	{ NULL, 0, 0, 0, NULL },
};

static PyGetSetDef completions_getset[] = {
	{ "batch", completions_address, NULL, "The address of the batch.", NULL },
	{ NULL, NULL, NULL, NULL, NULL },
};

static PyMethodDef completions_methods[] = {
	{ "attach", completions_attach, METH_VARARGS,
	  "attach(key, sends, arrivals): take the completions with this key, as far as possible." },
	{ "detach", completions_detach, METH_O, "Take no more of this key." },
	{ "event", completions_event, METH_O,
	  "Read and acknowledge: the address of the queue, 0 (none), or a negative errno." },
	{ "arm", completions_arm, METH_O,
	  "Have the next completion of the queue at this address raise an event: 0, or an errno." },
	{ "poll", completions_poll, METH_O,
	  "Take a batch from the queue at this address: how many there were, negative on failure." },
	{ "spin", completions_spin, METH_VARARGS,
	  "spin(address, nanoseconds): poll() until there is one, or for so long." },
	{ NULL, NULL, 0, NULL },
};

static PyType_Slot completions_slots[] = {
	{ Py_tp_doc, (void *)"Completions(deliver): from the completion queues of a device to their owners." },
	{ Py_tp_new, PyType_GenericNew },
	{ Py_tp_init, completions_init },
	{ Py_tp_traverse, completions_traverse },
	{ Py_tp_clear, completions_clear },
	{ Py_tp_dealloc, completions_dealloc },
	{ Py_tp_members, completions_members },
	{ Py_tp_getset, completions_getset },
	{ Py_tp_methods, completions_methods },
	{ 0, NULL },
};

PyType_Spec completions_spec = {
	.name = "aiordma._native._fast_path.Completions",
	.basicsize = sizeof(struct completions),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
	.slots = completions_slots,
};
