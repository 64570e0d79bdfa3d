/* InboundCore: the bytes of a stream that were received and not read. It holds numbers only. */
#include "fast_path.h"

PyTypeObject *inbound_type;

static int inbound_init(PyObject *self, PyObject *args, PyObject *kwargs)
{
	struct inbound *inbound = (struct inbound *)self;
	unsigned long long address, length;

	if (!PyArg_ParseTuple(args, "KIKI", &address, &inbound->key, &length, &inbound->messages))
		return -1;
	inbound->address = address;
	inbound->half = length / 2;
	inbound->next_update = inbound->messages / 2;
	/* The connection data announces the first half. The first update announces the second. */
	inbound->announced = inbound->announce_at = inbound->unannounced = inbound->half;
	return 0;
}

/* --- numbers --- */

/* Return 1 if the peer may have written this many bytes. */
int inbound_has_room(const struct inbound *self, uint64_t nbytes)
{
	return nbytes <= self->announced;
}

/* Count bytes that the peer reports as written, at most those of inbound_has_room(). */
void inbound_count_data(struct inbound *self, uint64_t nbytes)
{
	self->announced -= nbytes;
	self->available += nbytes;
	self->nbytes += nbytes;
	self->messages_received++;
}

/* Return the number of bytes from `start` that lie in one piece, at most `limit`. */
uint64_t inbound_readable(const struct inbound *self, uint64_t limit)
{
	uint64_t length = 2 * self->half - self->start;

	if (self->available < length)
		length = self->available;
	return limit < length ? limit : length;
}

/* Count bytes as read, at most those of inbound_readable(). */
void inbound_consume(struct inbound *self, uint64_t nbytes)
{
	self->available -= nbytes;
	self->unannounced += nbytes;
	self->start += nbytes;
	if (self->start == 2 * self->half)
		self->start = 0;
}

/* Return 1 if the peer needs a credit update. */
int inbound_has_update(const struct inbound *self)
{
	return self->unannounced >= self->half || self->messages_received >= self->next_update;
}

static void pack(unsigned char *where, uint64_t value, int nbytes, int is_big_endian)
{
	int index;

	for (index = 0; index < nbytes; index++)
		where[is_big_endian ? nbytes - 1 - index : index] =
			(unsigned char)(value >> (8 * index));
}

/*
 * Return the next credit update: the total number of messages that the peer may have sent, and, if
 * half of the buffer was read, this half as a target for the peer. Count it as sent.
 */
struct stream_message inbound_take_update(struct inbound *self)
{
	struct stream_message update = { .is_control = 1 };
	uint64_t total = self->messages_received + self->messages;

	update.message = STREAM_CREDIT << STREAM_VALUE_BITS | (total & STREAM_VALUE_MASK);
	self->next_update = self->messages_received + self->messages / 2;
	if (self->unannounced < self->half)
		return update;
	pack(update.payload, self->address + self->announce_at, 8, self->peer_is_big_endian);
	pack(update.payload + 8, self->key, 4, self->peer_is_big_endian);
	pack(update.payload + 12, self->half, 4, self->peer_is_big_endian);
	update.length = STREAM_SEGMENT_SIZE;
	update.target = self->targets + (uint64_t)self->next_target * STREAM_SEGMENT_SIZE;
	update.rkey = self->targets_key;
	self->next_target = (self->next_target + 1) % self->target_count;
	self->announce_at = (self->announce_at + self->half) % (2 * self->half);
	self->announced += self->half;
	self->unannounced -= self->half;
	return update;
}

/* --- for Python --- */

static PyObject *inbound_start(PyObject *self, PyObject *args)
{
	struct inbound *inbound = (struct inbound *)self;
	unsigned long long address;
	unsigned int count;
	int is_big_endian;

	if (!PyArg_ParseTuple(args, "KIIp", &address, &inbound->targets_key, &count,
			      &is_big_endian))
		return NULL;
	if (!count) {
		PyErr_SetString(PyExc_ValueError, "the peer has no targets");
		return NULL;
	}
	inbound->targets = address;
	inbound->target_count = count;
	/* The connection data was the first target. */
	inbound->next_target = 1 % count;
	inbound->peer_is_big_endian = (char)is_big_endian;
	Py_RETURN_NONE;
}

static PyObject *inbound_data_received(PyObject *self, PyObject *argument)
{
	struct inbound *inbound = (struct inbound *)self;
	unsigned long long nbytes = PyLong_AsUnsignedLongLong(argument);

	if (PyErr_Occurred())
		return NULL;
	if (!inbound_has_room(inbound, nbytes))
		Py_RETURN_FALSE;
	inbound_count_data(inbound, nbytes);
	Py_RETURN_TRUE;
}

static PyObject *inbound_count_message(PyObject *self, PyObject *unused)
{
	((struct inbound *)self)->messages_received++;
	Py_RETURN_NONE;
}

static PyObject *inbound_readable_part(PyObject *self, PyObject *argument)
{
	struct inbound *inbound = (struct inbound *)self;
	unsigned long long limit = PyLong_AsUnsignedLongLong(argument);

	if (PyErr_Occurred())
		return NULL;
	return Py_BuildValue("KK", (unsigned long long)inbound->start,
			     (unsigned long long)inbound_readable(inbound, limit));
}

static PyObject *inbound_consume_bytes(PyObject *self, PyObject *argument)
{
	struct inbound *inbound = (struct inbound *)self;
	unsigned long long nbytes = PyLong_AsUnsignedLongLong(argument);

	if (PyErr_Occurred())
		return NULL;
	if (nbytes > inbound_readable(inbound, nbytes)) {
		PyErr_SetString(PyExc_ValueError, "fewer bytes are readable");
		return NULL;
	}
	inbound_consume(inbound, nbytes);
	Py_RETURN_NONE;
}

static PyObject *inbound_take_credit_update(PyObject *self, PyObject *unused)
{
	struct inbound *inbound = (struct inbound *)self;
	struct stream_message update;

	if (!inbound->target_count) {
		PyErr_SetString(PyExc_ValueError, "start() was not called");
		return NULL;
	}
	update = inbound_take_update(inbound);
	return Py_BuildValue("Iy#(KII)", update.message, (const char *)update.payload,
			     (Py_ssize_t)update.length, (unsigned long long)update.target,
			     update.rkey, update.length);
}

static PyObject *inbound_get_has_update(PyObject *self, void *unused)
{
	return PyBool_FromLong(inbound_has_update((struct inbound *)self));
}

static PyMemberDef inbound_members[] = {
	{ "available", T_ULONGLONG, offsetof(struct inbound, available), READONLY,
	  "The number of bytes that were received and not read." },
	{ "nbytes", T_ULONGLONG, offsetof(struct inbound, nbytes), READONLY,
	  "The number of bytes that were received since the beginning." },
	{ "announced", T_ULONGLONG, offsetof(struct inbound, announced), READONLY,
	  "The number of bytes that the peer may still write." },
	{ "takes_data", T_BOOL, offsetof(struct inbound, takes_data), 0,
	  "True if the peer may send data now, and this side takes it." },
	{ "may_update", T_BOOL, offsetof(struct inbound, may_update), 0,
	  "True if credit updates may be sent to the peer." },
	{ NULL, 0, 0, 0, NULL },
};

static PyGetSetDef inbound_getset[] = {
	{ "has_update", inbound_get_has_update, NULL, "True if the peer needs a credit update.",
	  NULL },
	{ NULL, NULL, NULL, NULL, NULL },
};

static PyMethodDef inbound_methods[] = {
	{ "start", inbound_start, METH_VARARGS,
	  "start(address, key, count, is_big_endian): announce further buffers in the target SGL "
	  "of the peer, which has `count` entries." },
	{ "_data_received", inbound_data_received, METH_O,
	  "_data_received(nbytes): count bytes that the peer has written. Return False, and count "
	  "nothing, if it had no room for them." },
	{ "count_message", inbound_count_message, METH_NOARGS,
	  "Count a message of the peer that used a credit but carried no data." },
	{ "readable", inbound_readable_part, METH_O,
	  "readable(limit): return the offset in the receive buffer of the next bytes to read, and "
	  "their number. They are at most `limit`, and do not go beyond the end of the buffer." },
	{ "consume", inbound_consume_bytes, METH_O, "consume(nbytes): count bytes as read." },
	{ "take_update", inbound_take_credit_update, METH_NOARGS,
	  "Return the message, the payload and the target (address, key, length) of the next "
	  "credit update, and count it as sent." },
	{ NULL, NULL, 0, NULL },
};

static PyType_Slot inbound_slots[] = {
	{ Py_tp_doc, (void *)"InboundCore(address, key, length, messages): the numbers of a "
			     "receive buffer and of `messages` receives." },
	{ Py_tp_new, PyType_GenericNew },
	{ Py_tp_init, inbound_init },
	{ Py_tp_dealloc, simple_dealloc },
	{ Py_tp_members, inbound_members },
	{ Py_tp_getset, inbound_getset },
	{ Py_tp_methods, inbound_methods },
	{ 0, NULL },
};

PyType_Spec inbound_spec = {
	.name = "aiordma._native._fast_path.InboundCore",
	.basicsize = sizeof(struct inbound),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
	.slots = inbound_slots,
};
