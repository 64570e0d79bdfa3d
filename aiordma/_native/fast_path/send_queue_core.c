/* SendLane: the sends of one queue pair. */
#include "fast_path.h"

static int send_lane_init(PyObject *self, PyObject *args, PyObject *kwargs)
{
	struct send_lane *lane = (struct send_lane *)self;

	return PyArg_ParseTuple(args, "Lii", &lane->free, &lane->interval, &lane->max_inline) ? 0 : -1;
}

static int send_lane_traverse(PyObject *self, visitproc visit, void *arg)
{
	struct send_lane *lane = (struct send_lane *)self;
	int result;

	Py_VISIT(Py_TYPE(self));
	Py_VISIT(lane->keeper);
	Py_VISIT(lane->outlook.completions);
	Py_VISIT(lane->make_future);
	Py_VISIT(lane->domain);
	Py_VISIT(lane->join);
	Py_VISIT(lane->on_turn);
	Py_VISIT(lane->chain_keeper);
	result = visit_transfers(&lane->under_way, visit, arg);
	return result ? result : visit_transfers(&lane->queued, visit, arg);
}

static int send_lane_clear(PyObject *self)
{
	struct send_lane *lane = (struct send_lane *)self;

	Py_CLEAR(lane->outlook.completions);
	Py_CLEAR(lane->make_future);
	Py_CLEAR(lane->domain);
	Py_CLEAR(lane->join);
	Py_CLEAR(lane->on_turn);
	lane->chain = NULL;
	Py_CLEAR(lane->chain_keeper);
	lane->qp = NULL;
	Py_CLEAR(lane->keeper);
	clear_transfers(&lane->under_way);
	clear_transfers(&lane->queued);
	return 0;
}

static void send_lane_dealloc(PyObject *self)
{
	PyObject_GC_UnTrack(self);
	send_lane_clear(self);
	simple_dealloc(self);
}

static PyObject *send_lane_look_out(PyObject *self, PyObject *args)
{
	return set_outlook(self, &((struct send_lane *)self)->outlook, args);
}

static PyObject *send_lane_resumed(PyObject *self, PyObject *unused)
{
	note_turn(&((struct send_lane *)self)->outlook);
	Py_RETURN_NONE;
}

static int has_place(const void *lane)
{
	return ((const struct send_lane *)lane)->free > 0;
}

static PyObject *send_lane_open(PyObject *self, PyObject *args)
{
	struct send_lane *lane = (struct send_lane *)self;
	unsigned long long cell, first_wr_id;
	PyObject *keeper;

	if (!PyArg_ParseTuple(args, "OKK", &keeper, &cell, &first_wr_id))
		return NULL;
	replace(&lane->keeper, keeper);
	lane->qp = (struct ibv_qp **)(uintptr_t)cell;
	lane->first_wr_id = first_wr_id;
	lane->is_open = 1;
	Py_RETURN_NONE;
}

static int post_inline(struct send_lane *lane, char *data, Py_ssize_t length)
{
	int is_signalled = lane->unsignalled + 1 >= lane->interval;
	struct ibv_sge sge = { .addr = (uintptr_t)data, .length = (uint32_t)length };
	struct ibv_send_wr *bad, wr = {
		.wr_id = lane->first_wr_id + lane->number,
		.sg_list = &sge,
		.num_sge = length ? 1 : 0,
		.opcode = IBV_WR_SEND,
		.send_flags = lane->order | IBV_SEND_INLINE | (is_signalled ? IBV_SEND_SIGNALED : 0),
	};
	int error;

	errno = 0;
	error = positive(ibv_post_send(*lane->qp, &wr, &bad));
	if (error)
		return error;
	lane->number = (lane->number + 1) & NUMBER_MASK;
	lane->unsignalled = is_signalled ? 0 : lane->unsignalled + 1;
	lane->free--;
	lane->messages++;
	lane->nbytes += length;
	return 0;
}

static PyObject *send_lane_send(PyObject *self, PyObject *data)
{
	struct send_lane *lane = (struct send_lane *)self;
	Py_ssize_t length;
	int error;

	if (!PyBytes_CheckExact(data) || !lane->is_open || lanes_is_forked_child)
		return PyLong_FromLong(-1);
	length = PyBytes_Size(data);
	if (length > lane->max_inline || lane->waiting || lane->gathering || lane->is_due)
		return PyLong_FromLong(-1);
	if (lane->free <= 0 && look_out(&lane->outlook, has_place, lane))
		return NULL;
	/* Anything may have happened meanwhile. */
	if (lane->free <= 0 || !lane->is_open || !lane->qp || !*lane->qp)
		return PyLong_FromLong(-1);
	error = post_inline(lane, PyBytes_AsString(data), length);
	return error ? PyLong_FromLong(error) : Py_NewRef(Py_False); /* a 0 that is quickly found out */
}

/* All requests up to this number have ended. Others may have been told of already. */
void sends_ended(struct send_lane *lane, unsigned int number)
{
	unsigned int count = (number + 1 - lane->ended) & NUMBER_MASK;

	if (count <= ((lane->number - lane->ended) & NUMBER_MASK)) {
		lane->ended = (number + 1) & NUMBER_MASK;
		lane->free += count;
	}
}

static PyObject *send_lane_completed(PyObject *self, PyObject *number)
{
	unsigned long value = PyLong_AsUnsignedLong(number);

	if (PyErr_Occurred())
		return NULL;
	sends_ended((struct send_lane *)self, value);
	Py_RETURN_NONE;
}

static PyObject *send_lane_use_chain(PyObject *self, PyObject *args)
{
	struct send_lane *lane = (struct send_lane *)self;
	unsigned long long address;
	PyObject *keeper;

	if (!PyArg_ParseTuple(args, "OK", &keeper, &address))
		return NULL;
	replace(&lane->chain_keeper, keeper);
	lane->chain = (struct aiordma_chain *)(uintptr_t)address;
	Py_RETURN_NONE;
}

static PyObject *send_lane_failed(PyObject *self, PyObject *number)
{
	struct send_lane *lane = (struct send_lane *)self;
	unsigned long value = PyLong_AsUnsignedLong(number);
	struct transfer *transfer;

	if (PyErr_Occurred())
		return NULL;
	transfer = find_transfer(&lane->under_way, value & NUMBER_MASK);
	if (!transfer)
		Py_RETURN_NONE;
	unlink_transfer(&lane->under_way, transfer);
	lane->turns += transfer->reads;
	if (release_transfer(transfer) || (transfer->reads && hand_out_turns(lane))) {
		Py_DECREF((PyObject *)transfer);
		return NULL;
	}
	return (PyObject *)transfer;
}

static PyObject *none_unless(int failed)
{
	return failed ? NULL : Py_NewRef(Py_None);
}

static PyObject *send_lane_stop_waiting(PyObject *self, PyObject *count)
{
	unsigned long value = PyLong_AsUnsignedLong(count);

	if (PyErr_Occurred())
		return NULL;
	return none_unless(stop_waiting_for((struct send_lane *)self, value, 0));
}

static PyObject *send_lane_hand_out_turns(PyObject *self, PyObject *unused)
{
	return none_unless(hand_out_turns((struct send_lane *)self));
}

static PyObject *send_lane_drop_queued(PyObject *self, PyObject *unused)
{
	return none_unless(release_transfers(&((struct send_lane *)self)->queued));
}

static PyObject *send_lane_abandon(PyObject *self, PyObject *unused)
{
	struct send_lane *lane = (struct send_lane *)self;
	struct failure failure = { NULL, NULL, NULL };

	release_transfers(&lane->queued);
	note_failure(&failure);
	release_transfers(&lane->under_way);
	note_failure(&failure);
	return none_unless(restore_failure(&failure));
}

static PyMemberDef send_lane_members[] = {
	{ "number", T_UINT, offsetof(struct send_lane, number), 0, "Of the next request." },
	{ "ended", T_UINT, offsetof(struct send_lane, ended), 0, "Of the first that has not ended." },
	{ "free", T_LONGLONG, offsetof(struct send_lane, free), 0, "Places that nobody has taken." },
	{ "unsignalled", T_INT, offsetof(struct send_lane, unsignalled), 0,
	  "Requests since the last signalled one." },
	{ "interval", T_INT, offsetof(struct send_lane, interval), READONLY,
	  "One in so many is signalled." },
	{ "order", T_INT, offsetof(struct send_lane, order), 0, "Flags of every request: a fence." },
	{ "lent", T_INT, offsetof(struct send_lane, lent), 0, "Requests that lend memory." },
	{ "waiting", T_INT, offsetof(struct send_lane, waiting), 0,
	  "Those who are to be told of every end." },
	{ "is_open", T_BOOL, offsetof(struct send_lane, is_open), 0, "Whether send() may post." },
	{ "messages", T_ULONGLONG, offsetof(struct send_lane, messages), READONLY,
	  "Sent by send() and transfer()." },
	{ "nbytes", T_ULONGLONG, offsetof(struct send_lane, nbytes), READONLY, "In these messages." },
	{ "under_way", T_UINT, offsetof(struct send_lane, under_way.count), READONLY,
	  "Transfers that the device has." },
	{ "queued", T_UINT, offsetof(struct send_lane, queued.count), READONLY,
	  "Reads that wait for their turn." },
	{ "make_future", T_OBJECT, offsetof(struct send_lane, make_future), 0,
	  "Called: a wake-up for who waits for a transfer. None: there are none." },
	{ "domain", T_OBJECT, offsetof(struct send_lane, domain), 0,
	  "The protection domain in which memory is to be registered." },
	{ "join", T_OBJECT, offsetof(struct send_lane, join), 0,
	  "Called: whether requests are to go together now. None: never." },
	{ "on_turn", T_OBJECT, offsetof(struct send_lane, on_turn), 0,
	  "Called when there are turns for those who wait for one." },
	{ "turns", T_LONGLONG, offsetof(struct send_lane, turns), 0,
	  "Reads and atomics that may begin." },
	{ "turn_waiters", T_INT, offsetof(struct send_lane, turn_waiters), 0,
	  "Those who wait for a turn, elsewhere than in the queue." },
	{ "read_access", T_INT, offsetof(struct send_lane, read_access), 0,
	  "AccessFlags that are needed of what is read into; 0: nothing can be read." },
	{ "max_message", T_UINT, offsetof(struct send_lane, max_message), 0,
	  "Bytes that one message may have." },
	{ "gathering", T_BOOL, offsetof(struct send_lane, gathering), 0,
	  "Requests go together now." },
	{ "is_due", T_BOOL, offsetof(struct send_lane, is_due), 0,
	  "Some of them wait to be posted, which nothing else may be before them." },
	{ "reads", T_ULONGLONG, offsetof(struct send_lane, reads), READONLY, "By transfer()." },
	{ "bytes_read", T_ULONGLONG, offsetof(struct send_lane, bytes_read), READONLY, "Of these." },
	{ "writes", T_ULONGLONG, offsetof(struct send_lane, writes), READONLY, "By transfer()." },
	{ "bytes_written", T_ULONGLONG, offsetof(struct send_lane, bytes_written), READONLY,
	  "Of these." },
	{ "turn_waits", T_ULONGLONG, offsetof(struct send_lane, turn_waits), READONLY,
	  "Times that a read was queued." },
	{ NULL, 0, 0, 0, NULL },
};

static PyMethodDef send_lane_methods[] = {
	{ "open", send_lane_open, METH_VARARGS,
	  "open(keeper, cell, first_wr_id): use the queue pair whose pointer is in the cell." },
	{ "send", send_lane_send, METH_O,
	  "Post a short message at once: 0, or an errno; -1: that needs the long way." },
	{ "look_out", send_lane_look_out, METH_VARARGS,
	  "look_out(completions, cq, patience): when all places are taken, poll for so long." },
	{ "resumed", send_lane_resumed, METH_NOARGS,
	  "A task that waited for a place goes on: it comes from the loop." },
	{ "completed", send_lane_completed, METH_O,
	  "The request with this number ended, and all before it." },
	{ "transfer", (PyCFunction)(void (*)(void))send_lane_transfer, METH_FASTCALL,
	  "transfer(opcode, memory, remote): send, write or read registered memory in one piece. "
	  "None: that needs the long way." },
	{ "use_chain", send_lane_use_chain, METH_VARARGS,
	  "use_chain(keeper, address): an aiordma_chain for requests that go together." },
	{ "failed", send_lane_failed, METH_O,
	  "The request with this number failed: its transfer, if it is one." },
	{ "stop_waiting", send_lane_stop_waiting, METH_O,
	  "stop_waiting(count): nobody will hear of the ends of so many newest requests." },
	{ "hand_out_turns", send_lane_hand_out_turns, METH_NOARGS,
	  "Let begin what waits for turns, as far as there are some." },
	{ "drop_queued", send_lane_drop_queued, METH_NOARGS, "Nothing more will begin." },
	{ "abandon", send_lane_abandon, METH_NOARGS,
	  "The queue pair is gone, and with it all transfers." },
	{ NULL, NULL, 0, NULL },
};

static PyType_Slot send_lane_slots[] = {
	{ Py_tp_doc, (void *)"SendLane(depth, interval, max_inline): the sends of one queue pair." },
	{ Py_tp_new, PyType_GenericNew },
	{ Py_tp_init, send_lane_init },
	{ Py_tp_traverse, send_lane_traverse },
	{ Py_tp_clear, send_lane_clear },
	{ Py_tp_dealloc, send_lane_dealloc },
	{ Py_tp_members, send_lane_members },
	{ Py_tp_methods, send_lane_methods },
	{ 0, NULL },
};

PyType_Spec send_lane_spec = {
	.name = "aiordma._native._fast_path.SendLane",
	.basicsize = sizeof(struct send_lane),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
	.slots = send_lane_slots,
};
