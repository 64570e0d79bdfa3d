/* OutboundCore: the credits and buffers of a stream's peer, which bound the data that is sent. */
#include "fast_path.h"

PyTypeObject *outbound_type;

static int outbound_init(PyObject *self, PyObject *args, PyObject *kwargs)
{
	struct outbound *outbound = (struct outbound *)self;
	int is_big_endian;
	PyObject *sgl;

	if (!PyArg_ParseTuple(args, "OpIi", &sgl, &is_big_endian, &outbound->reserve,
			      &outbound->control_credits))
		return -1;
	if (PyObject_GetBuffer(sgl, &outbound->sgl, PyBUF_WRITABLE))
		return -1;
	if (outbound->sgl.len < STREAM_TARGETS * STREAM_SEGMENT_SIZE) {
		PyErr_SetString(PyExc_ValueError, "the target SGL is too small");
		return -1;
	}
	outbound->is_big_endian = (char)is_big_endian;
	return 0;
}

static void outbound_dealloc(PyObject *self)
{
	PyBuffer_Release(&((struct outbound *)self)->sgl);
	simple_dealloc(self);
}

/* --- numbers --- */

/* Return the number of messages that use a credit and may be sent now. */
unsigned int outbound_credits(const struct outbound *self)
{
	unsigned int free = (uint16_t)(self->limit - self->sent);

	return free > self->reserve ? free - self->reserve : 0;
}

/* Return the number of bytes that one message may carry now; 0 if no data can be sent. */
unsigned int outbound_room(const struct outbound *self)
{
	unsigned int length;

	if (!self->may_send || !self->target_count || !outbound_credits(self))
		return 0;
	length = self->targets[0].length;
	return length < STREAM_VALUE_MASK ? length : STREAM_VALUE_MASK;
}

static uint64_t unpack(const unsigned char *from, int nbytes, int is_big_endian)
{
	uint64_t value = 0;
	int index;

	for (index = 0; index < nbytes; index++)
		value |= (uint64_t)from[is_big_endian ? nbytes - 1 - index : index] << (8 * index);
	return value;
}

/*
 * Take the targets that the peer has written. Returns NULL, or the first one that is not valid.
 *
 * The device writes an entry from its first byte to its last. An entry with a length is complete,
 * even if its own message has not been received yet. So the length is read first.
 */
static const struct remote_segment *take_targets(struct outbound *self)
{
	while (self->target_count < STREAM_TARGETS) {
		unsigned char *entry =
			(unsigned char *)self->sgl.buf + self->next_target * STREAM_SEGMENT_SIZE;
		struct remote_segment *target = &self->targets[self->target_count];

		target->length = (uint32_t)unpack(entry + 12, 4, self->is_big_endian);
		if (!target->length)
			break;
		__atomic_thread_fence(__ATOMIC_ACQUIRE);
		target->length = (uint32_t)unpack(entry + 12, 4, self->is_big_endian);
		target->addr = unpack(entry, 8, self->is_big_endian);
		target->key = (uint32_t)unpack(entry + 8, 4, self->is_big_endian);
		if (target->addr + target->length - 1 < target->addr)
			return target; /* it goes beyond the last address */
		memset(entry, 0, STREAM_SEGMENT_SIZE);
		self->target_count++;
		self->next_target = (self->next_target + 1) % STREAM_TARGETS;
	}
	return NULL;
}

/*
 * Take new credits, and the targets that the peer has written, if any. `total` is the number of
 * messages that may have been sent since the beginning. Returns NULL, or a target that is not
 * valid.
 */
const struct remote_segment *outbound_update(struct outbound *self, unsigned int total)
{
	self->limit = (uint16_t)total;
	return take_targets(self);
}

/* Use up one credit and `nbytes` of a target, at most outbound_room(). Returns this part. */
struct remote_segment outbound_use(struct outbound *self, unsigned int nbytes)
{
	struct remote_segment used = self->targets[0];

	used.length = nbytes;
	self->nbytes += nbytes;
	self->targets[0].addr += nbytes;
	self->targets[0].length -= nbytes;
	if (!self->targets[0].length) {
		self->targets[0] = self->targets[1];
		self->target_count--;
	}
	self->sent++;
	return used;
}

/* --- for Python --- */

static PyObject *segment_or_none(const struct remote_segment *segment)
{
	if (!segment)
		Py_RETURN_NONE;
	return Py_BuildValue("KII", (unsigned long long)segment->addr, segment->key,
			     segment->length);
}

static PyObject *outbound_start(PyObject *self, PyObject *args)
{
	struct outbound *outbound = (struct outbound *)self;
	unsigned long long address;
	struct remote_segment buffer;
	unsigned int credits;

	if (!PyArg_ParseTuple(args, "I(KII)", &credits, &address, &buffer.key, &buffer.length))
		return NULL;
	buffer.addr = address;
	outbound->limit = (uint16_t)credits;
	if (credits / 4 < outbound->reserve)
		outbound->reserve = credits / 4;
	outbound->next_target = 1;
	outbound->target_count = 0;
	if (buffer.length)
		outbound->targets[outbound->target_count++] = buffer;
	Py_RETURN_NONE;
}

static PyObject *outbound_update_credits(PyObject *self, PyObject *total)
{
	unsigned long value = PyLong_AsUnsignedLong(total);

	if (PyErr_Occurred())
		return NULL;
	return segment_or_none(outbound_update((struct outbound *)self, (unsigned int)value));
}

static PyObject *outbound_send(PyObject *self, PyObject *argument)
{
	struct outbound *outbound = (struct outbound *)self;
	unsigned long nbytes = PyLong_AsUnsignedLong(argument);
	struct remote_segment used;

	if (PyErr_Occurred())
		return NULL;
	if (!nbytes || nbytes > outbound_room(outbound)) {
		PyErr_SetString(PyExc_ValueError, "the peer has no room for this message");
		return NULL;
	}
	used = outbound_use(outbound, (unsigned int)nbytes);
	return segment_or_none(&used);
}

static PyObject *outbound_spend_credit(PyObject *self, PyObject *unused)
{
	((struct outbound *)self)->sent++;
	Py_RETURN_NONE;
}

/* Take a credit for a control message. Returns 0 if there is none. */
int outbound_take_control(struct outbound *self)
{
	if (self->control_credits <= 0)
		return 0;
	self->control_credits--;
	return 1;
}

/* Release the credit of a control message, which has completed. */
void outbound_release_control(struct outbound *self)
{
	self->control_credits++;
}

static PyObject *outbound_take_control_credit(PyObject *self, PyObject *unused)
{
	return PyBool_FromLong(outbound_take_control((struct outbound *)self));
}

static PyObject *outbound_control_completed(PyObject *self, PyObject *unused)
{
	outbound_release_control((struct outbound *)self);
	Py_RETURN_NONE;
}

static PyObject *outbound_get_credits(PyObject *self, void *unused)
{
	return PyLong_FromUnsignedLong(outbound_credits((struct outbound *)self));
}

static PyObject *outbound_get_room(PyObject *self, void *unused)
{
	return PyLong_FromUnsignedLong(outbound_room((struct outbound *)self));
}

static PyMemberDef outbound_members[] = {
	{ "may_send", T_BOOL, offsetof(struct outbound, may_send), 0,
	  "True if this side may send data." },
	{ "nbytes", T_ULONGLONG, offsetof(struct outbound, nbytes), READONLY,
	  "The number of bytes that were sent since the beginning." },
	{ "control_credits", T_INT, offsetof(struct outbound, control_credits), READONLY,
	  "The number of control messages that may be posted now." },
	{ NULL, 0, 0, 0, NULL },
};

static PyGetSetDef outbound_getset[] = {
	{ "credits", outbound_get_credits, NULL,
	  "The number of messages that use a credit and may be sent now.", NULL },
	{ "room", outbound_get_room, NULL,
	  "The number of bytes that one message may carry now; 0 if no data can be sent.", NULL },
	{ NULL, NULL, NULL, NULL, NULL },
};

static PyMethodDef outbound_methods[] = {
	{ "_start", outbound_start, METH_VARARGS,
	  "_start(credits, buffer): take the credits and the first buffer (address, key, length) "
	  "of the peer." },
	{ "_update_credits", outbound_update_credits, METH_O,
	  "_update_credits(total): take new credits and the new targets. Return None, or a target "
	  "(address, key, length) that is not valid." },
	{ "_send", outbound_send, METH_O,
	  "_send(nbytes): use up one credit and `nbytes` of a target. Return this part of the "
	  "target (address, key, length)." },
	{ "spend_credit", outbound_spend_credit, METH_NOARGS, "Use up one credit." },
	{ "take_control_credit", outbound_take_control_credit, METH_NOARGS,
	  "Count a control message as posted. Return False if none may be posted now." },
	{ "control_completed", outbound_control_completed, METH_NOARGS,
	  "Count a control message as completed by the device." },
	{ NULL, NULL, 0, NULL },
};

static PyType_Slot outbound_slots[] = {
	{ Py_tp_doc, (void *)"OutboundCore(target_sgl, is_big_endian, reserve, controls): the "
			     "credits and buffers of the peer. It writes its targets to "
			     "`target_sgl`. `reserve` credits stay unused. `controls` control "
			     "messages can be posted and not completed at once." },
	{ Py_tp_new, PyType_GenericNew },
	{ Py_tp_init, outbound_init },
	{ Py_tp_dealloc, outbound_dealloc },
	{ Py_tp_members, outbound_members },
	{ Py_tp_getset, outbound_getset },
	{ Py_tp_methods, outbound_methods },
	{ 0, NULL },
};

PyType_Spec outbound_spec = {
	.name = "aiordma._native._fast_path.OutboundCore",
	.basicsize = sizeof(struct outbound),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
	.slots = outbound_slots,
};
