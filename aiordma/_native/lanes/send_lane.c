/* SendLane: the sends of one queue pair. */
#include "lanes.h"

static int send_lane_init(PyObject *self, PyObject *args, PyObject *kwargs)
{
	struct send_lane *lane = (struct send_lane *)self;

	return PyArg_ParseTuple(args, "Lii", &lane->free, &lane->interval, &lane->max_inline) ? 0 : -1;
}

static int send_lane_traverse(PyObject *self, visitproc visit, void *arg)
{
	Py_VISIT(Py_TYPE(self));
	Py_VISIT(((struct send_lane *)self)->keeper);
	Py_VISIT(((struct send_lane *)self)->outlook.completions);
	return 0;
}

static int send_lane_clear(PyObject *self)
{
	Py_CLEAR(((struct send_lane *)self)->keeper);
	Py_CLEAR(((struct send_lane *)self)->outlook.completions);
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

	if (!PyBytes_CheckExact(data) || !lane->is_open || lanes_is_forked_child)
		return PyLong_FromLong(-1);
	length = PyBytes_Size(data);
	if (length > lane->max_inline || lane->waiting)
		return PyLong_FromLong(-1);
	if (lane->free <= 0 && look_out(&lane->outlook, has_place, lane))
		return NULL;
	/* Anything may have happened meanwhile. */
	if (lane->free <= 0 || !lane->is_open || !lane->qp || !*lane->qp)
		return PyLong_FromLong(-1);
	return PyLong_FromLong(post_inline(lane, PyBytes_AsString(data), length));
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
	{ "messages", T_ULONGLONG, offsetof(struct send_lane, messages), READONLY, "Sent by send()." },
	{ "nbytes", T_ULONGLONG, offsetof(struct send_lane, nbytes), READONLY, "In these messages." },
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
	.name = "aiordma._native._lanes.SendLane",
	.basicsize = sizeof(struct send_lane),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
	.slots = send_lane_slots,
};
