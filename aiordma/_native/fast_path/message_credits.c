/* MessageCredits: the credits of a message stream, see aiordma/message_streams/protocol.py. */
#include "fast_path.h"

PyTypeObject *message_credits_type;

static int message_credits_init(PyObject *self, PyObject *args, PyObject *kwargs)
{
	struct message_credits *credits = (struct message_credits *)self;

	if (!PyArg_ParseTuple(args, "II", &credits->window, &credits->peer_window))
		return -1;
	credits->granted = credits->window;
	credits->credits = credits->peer_window;
	credits->freed = 0;
	return 0;
}

/* True if half of the window is free and the peer does not know it. */
int is_credit_update_due(const struct message_credits *credits)
{
	return 2 * credits->freed >= credits->window;
}

/* Take a credit to post a wire message. Returns 0 if there is none. */
int take_credit(struct message_credits *credits)
{
	if (!credits->credits)
		return 0;
	credits->credits--;
	return 1;
}

/* Undo take_credit(): the wire message was not posted. */
void put_back_credit(struct message_credits *credits)
{
	credits->credits++;
}

/* Note that the peer has used a credit, and that the receive buffer is free again. */
void free_granted(struct message_credits *credits)
{
	credits->granted--;
	credits->freed++;
}

/* Take credits that the peer has returned. Returns 0 if it has too many. */
int add_credits(struct message_credits *credits, unsigned int returned)
{
	if (returned > credits->peer_window - credits->credits)
		return 0;
	credits->credits += returned;
	return 1;
}

/* Note that the freed receives are announced to the peer. Returns their number. */
unsigned int return_credits(struct message_credits *credits)
{
	unsigned int returned = credits->freed;

	credits->granted += returned;
	credits->freed = 0;
	return returned;
}

/* Undo return_credits(): the message with their number was not posted. */
void take_back_credits(struct message_credits *credits, unsigned int returned)
{
	credits->granted -= returned;
	credits->freed += returned;
}

static PyObject *message_credits_take(PyObject *self, PyObject *unused)
{
	if (take_credit((struct message_credits *)self))
		Py_RETURN_NONE;
	PyErr_SetString(PyExc_ValueError, "there is no credit");
	return NULL;
}

static PyObject *message_credits_add(PyObject *self, PyObject *argument)
{
	unsigned long returned = PyLong_AsUnsignedLong(argument);

	if (PyErr_Occurred())
		return NULL;
	return PyBool_FromLong(returned <= 0xffffffff &&
			       add_credits((struct message_credits *)self, (unsigned int)returned));
}

static PyObject *message_credits_use(PyObject *self, PyObject *unused)
{
	struct message_credits *credits = (struct message_credits *)self;

	if (!credits->granted)
		Py_RETURN_FALSE;
	credits->granted--;
	Py_RETURN_TRUE;
}

static PyObject *message_credits_free(PyObject *self, PyObject *unused)
{
	((struct message_credits *)self)->freed++;
	Py_RETURN_NONE;
}

static PyObject *message_credits_return_freed(PyObject *self, PyObject *unused)
{
	return PyLong_FromUnsignedLong(return_credits((struct message_credits *)self));
}

static PyObject *message_credits_is_update_due(PyObject *self, void *unused)
{
	return PyBool_FromLong(is_credit_update_due((struct message_credits *)self));
}

static PyMemberDef message_credits_members[] = {
	{ "credits", T_UINT, offsetof(struct message_credits, credits), READONLY,
	  "The number of EAGER, ANNOUNCE and TABLE that may be posted." },
	{ NULL, 0, 0, 0, NULL },
};

static PyGetSetDef message_credits_getset[] = {
	{ "is_update_due", message_credits_is_update_due, NULL,
	  "True if half of the window is free and the peer does not know it.", NULL },
	{ NULL, NULL, NULL, NULL, NULL },
};

static PyMethodDef message_credits_methods[] = {
	{ "take", message_credits_take, METH_NOARGS,
	  "Take a credit to post a wire message. ValueError: there is none." },
	{ "add", message_credits_add, METH_O,
	  "add(count): note that the peer has returned credits. Returns False if this side would "
	  "then have more than the peer's window: the peer breaks the protocol." },
	{ "use", message_credits_use, METH_NOARGS,
	  "Note that the peer has used a credit. Returns False if it had none." },
	{ "free", message_credits_free, METH_NOARGS,
	  "Note that a receive buffer is free again, for which the peer has used a credit." },
	{ "return_freed", message_credits_return_freed, METH_NOARGS,
	  "Return the number of credits for the header of a wire message: the peer has them now." },
	{ NULL, NULL, 0, NULL },
};

static PyType_Slot message_credits_slots[] = {
	{ Py_tp_doc,
	  (void *)"MessageCredits(window, peer_window): the credits of a message stream, "
		  "in both directions." },
	{ Py_tp_new, PyType_GenericNew },
	{ Py_tp_init, message_credits_init },
	{ Py_tp_dealloc, simple_dealloc },
	{ Py_tp_members, message_credits_members },
	{ Py_tp_getset, message_credits_getset },
	{ Py_tp_methods, message_credits_methods },
	{ 0, NULL },
};

PyType_Spec message_credits_spec = {
	.name = "aiordma._native._fast_path.MessageCredits",
	.basicsize = sizeof(struct message_credits),
	.flags = Py_TPFLAGS_DEFAULT,
	.slots = message_credits_slots,
};
