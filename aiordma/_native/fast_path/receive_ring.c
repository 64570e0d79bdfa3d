/* SlotRing: the buffers that messages arrive in. */
#include "fast_path.h"

static int slot_ring_init(PyObject *self, PyObject *args, PyObject *kwargs)
{
	struct slot_ring *ring = (struct slot_ring *)self;

	if (!PyArg_ParseTuple(args, "ii", &ring->slots, &ring->slot_size))
		return -1;
	if (ring->slots >= 0 && ring->slot_size >= 0)
		return 0;
	PyErr_SetString(PyExc_ValueError, "a ring has no fewer than 0 slots of 0 bytes");
	return -1;
}

static void slot_ring_dealloc(PyObject *self)
{
	struct slot_ring *ring = (struct slot_ring *)self;

	Py_CLEAR(ring->queue);
	PyBuffer_Release(&ring->memory);
	simple_dealloc(self);
}

static PyObject *slot_ring_use(PyObject *self, PyObject *args)
{
	struct slot_ring *ring = (struct slot_ring *)self;
	unsigned long long address;
	unsigned int lkey;
	PyObject *memory;

	if (!PyArg_ParseTuple(args, "OKI", &memory, &address, &lkey))
		return NULL;
	PyBuffer_Release(&ring->memory);
	if (PyObject_GetBuffer(memory, &ring->memory, PyBUF_WRITABLE))
		return NULL;
	if (ring->memory.len < (Py_ssize_t)ring->slots * ring->slot_size) {
		PyBuffer_Release(&ring->memory);
		PyErr_SetString(PyExc_ValueError, "the memory is smaller than the slots");
		return NULL;
	}
	ring->address = address;
	ring->lkey = lkey;
	Py_RETURN_NONE;
}

static PyObject *slot_ring_open(PyObject *self, PyObject *args)
{
	struct slot_ring *ring = (struct slot_ring *)self;
	unsigned long long qp, srq, first_wr_id;
	PyObject *queue;

	if (!PyArg_ParseTuple(args, "O(KK)K", &queue, &qp, &srq, &first_wr_id))
		return NULL;
	replace(&ring->queue, queue);
	ring->qp = (struct ibv_qp **)(uintptr_t)qp;
	ring->srq = (struct ibv_srq **)(uintptr_t)srq;
	ring->first_wr_id = first_wr_id;
	ring->posted = 0;
	ring->stopped = 0;
	Py_RETURN_NONE;
}

/* The errno of the OSError that is being raised, which is then raised no more; -1: it is another. */
static int caught_errno(void)
{
	PyObject *type, *value, *traceback, *number;
	long error = -1;

	if (!PyErr_ExceptionMatches(PyExc_OSError))
		return -1;
	PyErr_Fetch(&type, &value, &traceback);
	PyErr_NormalizeException(&type, &value, &traceback);
	number = PyObject_GetAttrString(value, "errno");
	if (number)
		error = PyLong_AsLong(number);
	PyErr_Clear();
	Py_XDECREF(number);
	Py_XDECREF(type);
	Py_XDECREF(value);
	Py_XDECREF(traceback);
	return error > 0 ? (int)error : EINVAL;
}

/* By way of a Python method: 0, an errno, or -1 with an exception. */
static int post_by_method(struct slot_ring *ring, int slot, uint64_t address)
{
	PyObject *result = PyObject_CallMethod(ring->queue, "post_recv", "KKiI",
					       (unsigned long long)(ring->first_wr_id + slot),
					       (unsigned long long)address, ring->slot_size,
					       ring->lkey);

	Py_XDECREF(result);
	return result ? 0 : caught_errno();
}

static int post_receive(struct slot_ring *ring, int slot, uint64_t address)
{
	struct ibv_sge sge = { .addr = address, .length = ring->slot_size, .lkey = ring->lkey };
	struct ibv_recv_wr *bad, wr = {
		.wr_id = ring->first_wr_id + slot,
		.sg_list = &sge,
		.num_sge = 1,
	};

	errno = 0;
	if (ring->qp)
		return *ring->qp ? positive(ibv_post_recv(*ring->qp, &wr, &bad)) : EINVAL;
	if (ring->srq)
		return *ring->srq ? positive(ibv_post_srq_recv(*ring->srq, &wr, &bad)) : EINVAL;
	return post_by_method(ring, slot, address);
}

/* Give a slot to the device, unless that is stopped: 0, an errno, or -1 with an exception. */
int post_slot(struct slot_ring *ring, int slot)
{
	int error;

	if (ring->stopped || lanes_is_forked_child)
		return 0;
	if (slot < 0 || slot >= ring->slots || !ring->queue)
		return EINVAL;
	/* Counted first: in tests the device may give it back before this returns. */
	ring->posted++;
	error = post_receive(ring, slot, ring->address + (uint64_t)slot * ring->slot_size);
	if (error)
		ring->posted--;
	return error;
}

static PyObject *slot_ring_post_slot(PyObject *self, PyObject *number)
{
	long slot = PyLong_AsLong(number);
	int error;

	if (slot == -1 && PyErr_Occurred())
		return NULL;
	error = post_slot((struct slot_ring *)self, slot == (int)slot ? (int)slot : -1);
	return error < 0 ? NULL : PyLong_FromLong(error);
}

static PyMemberDef slot_ring_members[] = {
	{ "slots", T_INT, offsetof(struct slot_ring, slots), READONLY, "How many there are." },
	{ "slot_size", T_INT, offsetof(struct slot_ring, slot_size), READONLY, "Bytes in each." },
	{ "posted", T_INT, offsetof(struct slot_ring, posted), 0,
	  "Receives that the device has not completed, or flushed, yet." },
	{ "stopped", T_BOOL, offsetof(struct slot_ring, stopped), 0,
	  "Whether the device is given no more." },
	{ NULL, 0, 0, 0, NULL },
};

static PyMethodDef slot_ring_methods[] = {
	{ "_use", slot_ring_use, METH_VARARGS, "_use(memory, address, lkey): the slots are there." },
	{ "_open", slot_ring_open, METH_VARARGS,
	  "_open(queue, cells, first_wr_id): post to this queue from now on." },
	{ "_post", slot_ring_post_slot, METH_O, "Give a slot to the device: 0, or an errno." },
	{ NULL, NULL, 0, NULL },
};

static PyType_Slot slot_ring_slots[] = {
	{ Py_tp_doc, (void *)"SlotRing(slots, slot_size): the buffers that messages arrive in." },
	{ Py_tp_new, PyType_GenericNew },
	{ Py_tp_init, slot_ring_init },
	{ Py_tp_dealloc, slot_ring_dealloc },
	{ Py_tp_members, slot_ring_members },
	{ Py_tp_methods, slot_ring_methods },
	{ 0, NULL },
};

PyType_Spec slot_ring_spec = {
	.name = "aiordma._native._fast_path.SlotRing",
	.basicsize = sizeof(struct slot_ring),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
	.slots = slot_ring_slots,
};
