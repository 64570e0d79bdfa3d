/* Arrivals: messages that have arrived and are not taken. */
#include "fast_path.h"

static struct arrival *arrival_at(struct arrivals *self, unsigned int index)
{
	return &self->fifo[(self->first + index) & (self->capacity - 1)];
}

static int arrivals_init(PyObject *self, PyObject *args, PyObject *kwargs)
{
	struct arrivals *arrivals = (struct arrivals *)self;
	PyObject *ring;

	if (!PyArg_ParseTuple(args, "O", &ring) || !is_instance(self, "SlotRing", ring))
		return -1;
	arrivals->ring = (struct slot_ring *)Py_NewRef(ring);
	arrivals->backlog = -1;
	arrivals->tell = 1;
	return 0;
}

static int arrivals_traverse(PyObject *self, visitproc visit, void *arg)
{
	Py_VISIT(Py_TYPE(self));
	Py_VISIT(((struct arrivals *)self)->ring);
	Py_VISIT(((struct arrivals *)self)->outlook.completions);
	return 0;
}

static int arrivals_clear(PyObject *self)
{
	Py_CLEAR(((struct arrivals *)self)->outlook.completions);
	return 0;
}

static void arrivals_dealloc(PyObject *self)
{
	struct arrivals *arrivals = (struct arrivals *)self;
	unsigned int index;

	PyObject_GC_UnTrack(self);
	for (index = 0; index < arrivals->count; index++)
		Py_CLEAR(arrival_at(arrivals, index)->copy);
	PyMem_Free(arrivals->fifo);
	Py_CLEAR(arrivals->ring);
	arrivals_clear(self);
	simple_dealloc(self);
}

static PyObject *arrivals_look_out(PyObject *self, PyObject *args)
{
	return set_outlook(self, &((struct arrivals *)self)->outlook, args);
}

static int has_arrived(const void *arrivals)
{
	return ((const struct arrivals *)arrivals)->count > 0;
}

static int make_room(struct arrivals *self)
{
	unsigned int capacity = self->capacity ? 2 * self->capacity : 8;
	struct arrival *fifo;
	unsigned int index;

	if (self->count < self->capacity)
		return 0;
	fifo = PyMem_Malloc(capacity * sizeof(*fifo));
	if (!fifo) {
		PyErr_NoMemory();
		return -1;
	}
	for (index = 0; index < self->count; index++)
		fifo[index] = *arrival_at(self, index);
	PyMem_Free(self->fifo);
	self->fifo = fifo;
	self->capacity = capacity;
	self->first = 0;
	return 0;
}

static char *slot_memory(struct slot_ring *ring, int slot)
{
	return (char *)ring->memory.buf + (size_t)slot * ring->slot_size;
}

static PyObject *copied(struct arrivals *self, struct arrival *arrival)
{
	if (arrival->copy)
		return Py_NewRef(arrival->copy);
	return PyBytes_FromStringAndSize(slot_memory(self->ring, arrival->slot), arrival->length);
}

/* Give a slot back; the owner is told of what the device says to that. -1 with an exception. */
static int give_back(struct arrivals *self, int slot)
{
	int error = slot < 0 ? 0 : post_slot(self->ring, slot);

	if (error > 0 && !self->error) {
		self->error = error;
		self->tell = 1;
	}
	return error < 0 ? -1 : 0;
}

/* A message is in a slot. -1 with an exception. */
int add_arrival(struct arrivals *self, const struct arrival *what)
{
	struct slot_ring *ring = self->ring;
	struct arrival *arrival;
	int slot;

	if (what->slot < 0 || what->slot >= ring->slots ||
	    what->length > (unsigned int)ring->slot_size || !ring->memory.obj) {
		PyErr_SetString(PyExc_ValueError, "no such slot, or a message longer than that");
		return -1;
	}
	if (make_room(self))
		return -1;
	arrival = arrival_at(self, self->count);
	*arrival = *what;
	self->messages++;
	self->nbytes += what->length;
	slot = -1;
	if (self->backlog >= 0 && ring->posted < (ring->slots + 1) / 2) {
		arrival->copy = copied(self, arrival);
		if (!arrival->copy)
			return -1;
		slot = arrival->slot;
		arrival->slot = -1;
		self->spilled++;
	}
	self->count++;
	if (give_back(self, slot))
		return -1;
	if (self->backlog >= 0 && self->count > (unsigned int)self->backlog)
		self->tell = 1;
	return 0;
}

static PyObject *arrivals_add(PyObject *self, PyObject *args)
{
	struct arrival arrival = { 0 };

	if (!PyArg_ParseTuple(args, "iIII", &arrival.slot, &arrival.length, &arrival.flags,
			      &arrival.imm_data))
		return NULL;
	if (add_arrival((struct arrivals *)self, &arrival))
		return NULL;
	Py_RETURN_NONE;
}

static struct arrival remove_first(struct arrivals *self)
{
	struct arrival arrival = *arrival_at(self, 0);

	self->first = (self->first + 1) & (self->capacity - 1);
	self->count--;
	return arrival;
}

static PyObject *arrivals_take(PyObject *self, PyObject *unused)
{
	struct arrivals *arrivals = (struct arrivals *)self;
	struct arrival arrival;
	PyObject *message;

	if (arrivals->waited || arrivals->closed || lanes_is_forked_child)
		Py_RETURN_NONE;
	if (!arrivals->count) {
		if (look_out(&arrivals->outlook, has_arrived, arrivals))
			return NULL;
		if (arrivals->count)
			arrivals->missed = 0;
		else if (arrivals->outlook.patience > 0 && !arrivals->outlook.cut_short)
			arrivals->missed++;
	}
	if (!arrivals->count || arrivals->closed)
		Py_RETURN_NONE;
	message = copied(arrivals, arrival_at(arrivals, 0));
	if (!message)
		return NULL;
	arrival = remove_first(arrivals);
	Py_XDECREF(arrival.copy);
	if (give_back(arrivals, arrival.slot)) {
		Py_DECREF(message);
		return NULL;
	}
	return message;
}

static PyObject *arrivals_look(PyObject *self, PyObject *unused)
{
	struct arrivals *arrivals = (struct arrivals *)self;
	struct arrival *arrival;

	if (!arrivals->count)
		Py_RETURN_NONE;
	arrival = arrival_at(arrivals, 0);
	return Py_BuildValue("iIIIO", arrival->slot, arrival->length, arrival->flags,
			     arrival->imm_data, arrival->copy ? arrival->copy : Py_None);
}

static PyObject *arrivals_drop(PyObject *self, PyObject *unused)
{
	struct arrivals *arrivals = (struct arrivals *)self;

	if (arrivals->count) {
		struct arrival arrival = remove_first(arrivals);

		Py_XDECREF(arrival.copy);
	}
	Py_RETURN_NONE;
}

static Py_ssize_t arrivals_length(PyObject *self)
{
	return ((struct arrivals *)self)->count;
}

static PyMemberDef arrivals_members[] = {
	{ "backlog", T_INT, offsetof(struct arrivals, backlog), 0,
	  "So many may wait, copied away when half of the slots are full; -1: none is." },
	{ "error", T_INT, offsetof(struct arrivals, error), READONLY,
	  "The errno of a slot that could not be given back, or 0." },
	{ "tell", T_BOOL, offsetof(struct arrivals, tell), 0,
	  "Whether the owner is to be told of what arrives next." },
	{ "waited", T_BOOL, offsetof(struct arrivals, waited), 0, "Whether a task waits." },
	{ "closed", T_BOOL, offsetof(struct arrivals, closed), 0, "Whether take() has nothing." },
	{ "patience", T_LONGLONG, offsetof(struct arrivals, outlook.patience), 0,
	  "Nanoseconds for which take() polls for a message." },
	{ "cut_short", T_BOOL, offsetof(struct arrivals, outlook.cut_short), READONLY,
	  "Whether that ended early: the loop, or somebody else, has something to do." },
	{ "missed", T_UINT, offsetof(struct arrivals, missed), 0,
	  "How often in a row that was in vain." },
	{ "messages", T_ULONGLONG, offsetof(struct arrivals, messages), READONLY, "That arrived." },
	{ "nbytes", T_ULONGLONG, offsetof(struct arrivals, nbytes), READONLY, "In these." },
	{ "spilled", T_ULONGLONG, offsetof(struct arrivals, spilled), READONLY, "Copied away." },
	{ NULL, 0, 0, 0, NULL },
};

static PyMethodDef arrivals_methods[] = {
	{ "add", arrivals_add, METH_VARARGS,
	  "add(slot, length, flags, imm_data): a message is in this slot." },
	{ "take", arrivals_take, METH_NOARGS,
	  "The oldest message as bytes, its slot given back; None: that needs the long way." },
	{ "look_out", arrivals_look_out, METH_VARARGS,
	  "look_out(completions, cq, patience): poll for so long when there is no message." },
	{ "look", arrivals_look, METH_NOARGS,
	  "The oldest: (slot, length, flags, imm_data, copy), slot -1 if copied away; or None." },
	{ "drop", arrivals_drop, METH_NOARGS, "Forget the oldest; its slot is the caller's." },
	{ NULL, NULL, 0, NULL },
};

static PyType_Slot arrivals_slots[] = {
	{ Py_tp_doc, (void *)"Arrivals(ring): messages that have arrived and are not taken." },
	{ Py_tp_new, PyType_GenericNew },
	{ Py_tp_init, arrivals_init },
	{ Py_tp_traverse, arrivals_traverse },
	{ Py_tp_clear, arrivals_clear },
	{ Py_tp_dealloc, arrivals_dealloc },
	{ Py_sq_length, arrivals_length },
	{ Py_tp_members, arrivals_members },
	{ Py_tp_methods, arrivals_methods },
	{ 0, NULL },
};

PyType_Spec arrivals_spec = {
	.name = "aiordma._native._fast_path.Arrivals",
	.basicsize = sizeof(struct arrivals),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
	.slots = arrivals_slots,
};
