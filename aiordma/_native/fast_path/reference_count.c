/* ReferenceCount: the number of requests that use a region of registered memory. */
#include "fast_path.h"

PyTypeObject *reference_count_type;

static int reference_count_init(PyObject *self, PyObject *args, PyObject *kwargs)
{
	struct reference_count *references = (struct reference_count *)self;
	PyObject *pd;

	if (!PyArg_ParseTuple(args, "Oi", &pd, &references->access))
		return -1;
	replace(&references->pd, pd);
	return 0;
}

static int reference_count_traverse(PyObject *self, visitproc visit, void *arg)
{
	Py_VISIT(Py_TYPE(self));
	Py_VISIT(((struct reference_count *)self)->pd);
	Py_VISIT(((struct reference_count *)self)->on_unused);
	return 0;
}

static int reference_count_clear(PyObject *self)
{
	Py_CLEAR(((struct reference_count *)self)->pd);
	Py_CLEAR(((struct reference_count *)self)->on_unused);
	return 0;
}

static void reference_count_dealloc(PyObject *self)
{
	PyObject_GC_UnTrack(self);
	reference_count_clear(self);
	simple_dealloc(self);
}

/* Add a reference for a request. The caller has checked that the memory is usable. */
void acquire_reference(struct reference_count *references)
{
	references->count++;
}

static PyObject *reference_count_acquire(PyObject *self, PyObject *pd)
{
	struct reference_count *references = (struct reference_count *)self;

	if (references->closed) {
		PyErr_SetString(PyExc_ValueError, "the memory region is closed");
		return NULL;
	}
	if (references->pd != pd) {
		PyErr_SetString(PyExc_ValueError, "the memory is registered on another device, "
						  "by another event loop, "
						  "or in another protection domain");
		return NULL;
	}
	acquire_reference(references);
	Py_RETURN_NONE;
}

/*
 * Drop a reference. After the last one, call on_unused if close() has set it. Returns 0, or -1 with
 * the exception of on_unused.
 */
int release_reference(struct reference_count *references)
{
	PyObject *on_unused = references->on_unused;
	PyObject *result;

	if (--references->count || !on_unused)
		return 0;
	references->on_unused = NULL;
	result = PyObject_CallNoArgs(on_unused);
	Py_DECREF(on_unused);
	Py_XDECREF(result);
	return result ? 0 : -1;
}

static PyObject *reference_count_release(PyObject *self, PyObject *unused)
{
	if (release_reference((struct reference_count *)self))
		return NULL;
	Py_RETURN_NONE;
}

static PyObject *reference_count_close(PyObject *self, PyObject *on_unused)
{
	struct reference_count *references = (struct reference_count *)self;

	references->closed = 1;
	if (!references->count)
		return PyObject_CallNoArgs(on_unused);
	replace(&references->on_unused, on_unused);
	Py_RETURN_NONE;
}

static PyMemberDef reference_count_members[] = {
	{ "pd", T_OBJECT, offsetof(struct reference_count, pd), READONLY,
	  "The protection domain of the memory." },
	{ "access", T_INT, offsetof(struct reference_count, access), READONLY, "AccessFlags." },
	{ "count", T_INT, offsetof(struct reference_count, count), READONLY,
	  "The number of requests that use the memory now." },
	{ "closed", T_BOOL, offsetof(struct reference_count, closed), READONLY,
	  "True if no request can acquire it any more." },
	{ NULL, 0, 0, 0, NULL },
};

static PyMethodDef reference_count_methods[] = {
	{ "acquire", reference_count_acquire, METH_O,
	  "acquire(pd): add a reference. Raise ValueError if the memory is closed, or of another "
	  "protection domain." },
	{ "release", reference_count_release, METH_NOARGS, "Drop a reference." },
	{ "close", reference_count_close, METH_O,
	  "close(on_unused): refuse new references. Call on_unused after the last one, at once if "
	  "there is none." },
	{ NULL, NULL, 0, NULL },
};

static PyType_Slot reference_count_slots[] = {
	{ Py_tp_doc,
	  (void *)"ReferenceCount(pd, access): the number of requests that use a region." },
	{ Py_tp_new, PyType_GenericNew },
	{ Py_tp_init, reference_count_init },
	{ Py_tp_traverse, reference_count_traverse },
	{ Py_tp_clear, reference_count_clear },
	{ Py_tp_dealloc, reference_count_dealloc },
	{ Py_tp_members, reference_count_members },
	{ Py_tp_methods, reference_count_methods },
	{ 0, NULL },
};

PyType_Spec reference_count_spec = {
	.name = "aiordma._native._fast_path.ReferenceCount",
	.basicsize = sizeof(struct reference_count),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
	.slots = reference_count_slots,
};
