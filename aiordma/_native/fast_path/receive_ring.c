/* ReceiveRingCore: the buffers that messages arrive in. */
#include "fast_path.h"

PyTypeObject *receive_ring_type;

static int receive_ring_init(PyObject *self, PyObject *args, PyObject *kwargs)
{
	struct receive_ring *ring = (struct receive_ring *)self;

	if (!PyArg_ParseTuple(args, "ii", &ring->slots, &ring->slot_size))
		return -1;
	if (ring->slots >= 0 && ring->slot_size >= 0)
		return 0;
	PyErr_SetString(PyExc_ValueError, "slots and slot_size must not be negative");
	return -1;
}

static void receive_ring_dealloc(PyObject *self)
{
	struct receive_ring *ring = (struct receive_ring *)self;

	Py_CLEAR(ring->queue);
	PyBuffer_Release(&ring->memory);
	simple_dealloc(self);
}

static PyObject *receive_ring_use(PyObject *self, PyObject *args)
{
	struct receive_ring *ring = (struct receive_ring *)self;
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

static PyObject *receive_ring_open(PyObject *self, PyObject *args)
{
	struct receive_ring *ring = (struct receive_ring *)self;
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

/* Return 0 or an errno. */
static int post_receive(struct receive_ring *ring, int slot, uint64_t address)
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
	return *ring->srq ? positive(ibv_post_srq_recv(*ring->srq, &wr, &bad)) : EINVAL;
}

/* Post a slot, unless posting is stopped. Returns 0 or an errno. */
int post_slot(struct receive_ring *ring, int slot)
{
	int error;

	if (ring->stopped || is_forked_child)
		return 0;
	if (slot < 0 || slot >= ring->slots || !ring->queue)
		return EINVAL;
	error = post_receive(ring, slot, ring->address + (uint64_t)slot * ring->slot_size);
	if (!error)
		ring->posted++;
	return error;
}

/* Count a receive as completed. */
void complete_receive(struct receive_ring *ring)
{
	ring->posted--;
}

/*
 * Count a receive that has failed. Returns 1, or 0 if Python must handle it: the first one, which
 * can have the cause of the connection's end, the last one, after which nothing can arrive, each
 * one that was not just flushed, and each one of a shared queue, whose slot is posted again. If
 * this side has closed the connection (`is_closed`), only the last reason holds.
 */
int count_failed_receive(struct receive_ring *ring, int is_flush, int is_closed)
{
	int is_first = !ring->failed++;

	if (ring->srq || (!is_closed && (is_first || !is_flush || ring->posted <= 1)))
		return 0;
	complete_receive(ring);
	return 1;
}

static PyObject *receive_ring_post_slot(PyObject *self, PyObject *number)
{
	long slot = PyLong_AsLong(number);

	if (slot == -1 && PyErr_Occurred())
		return NULL;
	return PyLong_FromLong(
		post_slot((struct receive_ring *)self, slot == (int)slot ? (int)slot : -1));
}

static PyObject *receive_ring_post_all(PyObject *self, PyObject *unused)
{
	struct receive_ring *ring = (struct receive_ring *)self;
	int slot, error = 0;

	(void)unused;
	for (slot = 0; slot < ring->slots && !error; slot++)
		error = post_slot(ring, slot);
	return PyLong_FromLong(error);
}

static PyMemberDef receive_ring_members[] = {
	{ "slots", T_INT, offsetof(struct receive_ring, slots), READONLY, "The number of slots." },
	{ "slot_size", T_INT, offsetof(struct receive_ring, slot_size), READONLY,
	  "The number of bytes in each slot." },
	{ "posted", T_INT, offsetof(struct receive_ring, posted), 0,
	  "The number of receives that are posted and not completed or flushed." },
	{ "failed", T_UINT, offsetof(struct receive_ring, failed), READONLY,
	  "The number of receives that have failed or were flushed." },
	{ "stopped", T_BOOL, offsetof(struct receive_ring, stopped), 0,
	  "True if slots are not posted any more." },
	{ NULL, 0, 0, 0, NULL },
};

static PyMethodDef receive_ring_methods[] = {
	{ "_use", receive_ring_use, METH_VARARGS,
	  "_use(memory, address, lkey): put the slots into this memory." },
	{ "_open", receive_ring_open, METH_VARARGS,
	  "_open(queue, cells, first_wr_id): post receives to the queue in one of these cells. The "
	  "other one is 0." },
	{ "_post", receive_ring_post_slot, METH_O,
	  "_post(slot): post a slot, unless posting is stopped. Return 0 or an errno." },
	{ "_post_all", receive_ring_post_all, METH_NOARGS,
	  "_post_all(): post every slot, until one is refused. Return 0 or an errno." },
	{ NULL, NULL, 0, NULL },
};

static PyType_Slot receive_ring_slots[] = {
	{ Py_tp_doc,
	  (void *)"ReceiveRingCore(slots, slot_size): the buffers that messages arrive in." },
	{ Py_tp_new, PyType_GenericNew },
	{ Py_tp_init, receive_ring_init },
	{ Py_tp_dealloc, receive_ring_dealloc },
	{ Py_tp_members, receive_ring_members },
	{ Py_tp_methods, receive_ring_methods },
	{ 0, NULL },
};

PyType_Spec receive_ring_spec = {
	.name = "aiordma._native._fast_path.ReceiveRingCore",
	.basicsize = sizeof(struct receive_ring),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
	.slots = receive_ring_slots,
};
