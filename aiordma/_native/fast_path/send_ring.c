/* SendRing: the free and used parts of the memory that a stream's data is copied to. */
#include "fast_path.h"

PyTypeObject *send_ring_type;

static int send_ring_init(PyObject *self, PyObject *args, PyObject *kwargs)
{
	struct send_ring *ring = (struct send_ring *)self;
	unsigned long long size;

	if (!PyArg_ParseTuple(args, "K", &size))
		return -1;
	ring->size = ring->free = size;
	return 0;
}

/* Reserve at most `nbytes`, in one piece. Returns its length, which can be 0. */
uint64_t reserve_space(struct send_ring *ring, uint64_t nbytes, uint64_t *start)
{
	uint64_t length = ring->size - ring->next;

	if (ring->free < length)
		length = ring->free;
	if (nbytes < length)
		length = nbytes;
	*start = ring->next;
	ring->free -= length;
	ring->next += length;
	if (ring->next == ring->size)
		ring->next = 0;
	return length;
}

/* Release the oldest reserved bytes. */
void release_space(struct send_ring *ring, uint64_t nbytes)
{
	ring->free += nbytes;
}

static PyObject *send_ring_reserve(PyObject *self, PyObject *argument)
{
	unsigned long long nbytes = PyLong_AsUnsignedLongLong(argument);
	uint64_t start, length;

	if (PyErr_Occurred())
		return NULL;
	length = reserve_space((struct send_ring *)self, nbytes, &start);
	return Py_BuildValue("KK", (unsigned long long)start, (unsigned long long)length);
}

static PyObject *send_ring_release(PyObject *self, PyObject *argument)
{
	unsigned long long nbytes = PyLong_AsUnsignedLongLong(argument);

	if (PyErr_Occurred())
		return NULL;
	release_space((struct send_ring *)self, nbytes);
	Py_RETURN_NONE;
}

static PyMemberDef send_ring_members[] = {
	{ "free", T_ULONGLONG, offsetof(struct send_ring, free), READONLY,
	  "The number of bytes that are not reserved." },
	{ NULL, 0, 0, 0, NULL },
};

static PyMethodDef send_ring_methods[] = {
	{ "reserve", send_ring_reserve, METH_O,
	  "reserve(nbytes): reserve at most `nbytes`, in one piece. Return its offset and its "
	  "length. The length is less than `nbytes` if less is free, or if the ring ends before. "
	  "It can be 0." },
	{ "release", send_ring_release, METH_O,
	  "release(nbytes): release the oldest bytes that are reserved: the device has completed "
	  "their writes." },
	{ NULL, NULL, 0, NULL },
};

static PyType_Slot send_ring_slots[] = {
	{ Py_tp_doc, (void *)"SendRing(size): the free and used parts of a ring buffer. It holds "
			     "numbers only, no memory. Parts are released in the order in which "
			     "they were reserved." },
	{ Py_tp_new, PyType_GenericNew },
	{ Py_tp_init, send_ring_init },
	{ Py_tp_dealloc, simple_dealloc },
	{ Py_tp_members, send_ring_members },
	{ Py_tp_methods, send_ring_methods },
	{ 0, NULL },
};

PyType_Spec send_ring_spec = {
	.name = "aiordma._native._fast_path.SendRing",
	.basicsize = sizeof(struct send_ring),
	.flags = Py_TPFLAGS_DEFAULT,
	.slots = send_ring_slots,
};
