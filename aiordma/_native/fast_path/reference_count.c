/* Pin: how many requests use a region of registered memory. */
#include "fast_path.h"

PyTypeObject *pin_type;

static int pin_init(PyObject *self, PyObject *args, PyObject *kwargs)
{
	struct pin *pin = (struct pin *)self;
	PyObject *domain;

	if (!PyArg_ParseTuple(args, "Oi", &domain, &pin->access))
		return -1;
	replace(&pin->domain, domain);
	return 0;
}

static int pin_traverse(PyObject *self, visitproc visit, void *arg)
{
	Py_VISIT(Py_TYPE(self));
	Py_VISIT(((struct pin *)self)->domain);
	Py_VISIT(((struct pin *)self)->on_unused);
	return 0;
}

static int pin_clear(PyObject *self)
{
	Py_CLEAR(((struct pin *)self)->domain);
	Py_CLEAR(((struct pin *)self)->on_unused);
	return 0;
}

static void pin_dealloc(PyObject *self)
{
	PyObject_GC_UnTrack(self);
	pin_clear(self);
	simple_dealloc(self);
}

static PyObject *pin_take(PyObject *self, PyObject *domain)
{
	struct pin *pin = (struct pin *)self;

	if (pin->closed) {
		PyErr_SetString(PyExc_ValueError, "the memory region is closed");
		return NULL;
	}
	if (pin->domain != domain) {
		PyErr_SetString(PyExc_ValueError, "the memory is registered on another device, "
						  "or by another event loop");
		return NULL;
	}
	pin->uses++;
	Py_RETURN_NONE;
}

/* One use less. -1 with an exception, which comes from what is called after the last one. */
int unpin(struct pin *pin)
{
	PyObject *on_unused = pin->on_unused;
	PyObject *result;

	if (--pin->uses || !on_unused)
		return 0;
	pin->on_unused = NULL;
	result = PyObject_CallNoArgs(on_unused);
	Py_DECREF(on_unused);
	Py_XDECREF(result);
	return result ? 0 : -1;
}

static PyObject *pin_give_back(PyObject *self, PyObject *unused)
{
	if (unpin((struct pin *)self))
		return NULL;
	Py_RETURN_NONE;
}

static PyObject *pin_close(PyObject *self, PyObject *on_unused)
{
	struct pin *pin = (struct pin *)self;

	pin->closed = 1;
	if (!pin->uses)
		return PyObject_CallNoArgs(on_unused);
	replace(&pin->on_unused, on_unused);
	Py_RETURN_NONE;
}

static PyMemberDef pin_members[] = {
	{ "domain", T_OBJECT, offsetof(struct pin, domain), READONLY,
	  "The protection domain it is registered in." },
	{ "access", T_INT, offsetof(struct pin, access), READONLY, "AccessFlags." },
	{ "uses", T_INT, offsetof(struct pin, uses), READONLY, "Requests that use it now." },
	{ "closed", T_BOOL, offsetof(struct pin, closed), READONLY, "No request may any more." },
	{ NULL, 0, 0, 0, NULL },
};

static PyMethodDef pin_methods[] = {
	{ "take", pin_take, METH_O,
	  "take(domain): the device begins to use it. ValueError: it is closed, or of another domain." },
	{ "give_back", pin_give_back, METH_NOARGS, "The device has ended one use." },
	{ "close", pin_close, METH_O,
	  "close(on_unused): let nobody take it any more, and call that after the last use." },
	{ NULL, NULL, 0, NULL },
};

static PyType_Slot pin_slots[] = {
	{ Py_tp_doc, (void *)"Pin(domain, access): how many requests use a region of memory." },
	{ Py_tp_new, PyType_GenericNew },
	{ Py_tp_init, pin_init },
	{ Py_tp_traverse, pin_traverse },
	{ Py_tp_clear, pin_clear },
	{ Py_tp_dealloc, pin_dealloc },
	{ Py_tp_members, pin_members },
	{ Py_tp_methods, pin_methods },
	{ 0, NULL },
};

PyType_Spec pin_spec = {
	.name = "aiordma._native._fast_path.Pin",
	.basicsize = sizeof(struct pin),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
	.slots = pin_slots,
};
