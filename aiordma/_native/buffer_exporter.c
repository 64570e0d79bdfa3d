/*
 * BufferExporter: a base class whose instances support the buffer protocol. From Python 3.12 on, a
 * class can do the same with `__buffer__`. An instance exports the buffer of its attribute
 * `_exported`. Every view has a reference to the instance, which counts its views in `_views`.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <structmember.h>

struct exporter {
	PyObject_HEAD PyObject *exported;
	Py_ssize_t views;
};

static int exporter_getbuffer(PyObject *self, Py_buffer *view, int flags)
{
	struct exporter *exporter = (struct exporter *)self;
	Py_buffer *inner;

	view->obj = NULL;
	if (!exporter->exported) {
		PyErr_SetString(PyExc_BufferError, "the memory is closed");
		return -1;
	}
	inner = PyMem_Malloc(sizeof(*inner));
	if (!inner) {
		PyErr_NoMemory();
		return -1;
	}
	if (PyObject_GetBuffer(exporter->exported, inner, flags)) {
		PyMem_Free(inner);
		return -1;
	}
	*view = *inner;
	view->obj = Py_NewRef(self);
	view->internal = inner;
	exporter->views++;
	return 0;
}

static void exporter_releasebuffer(PyObject *self, Py_buffer *view)
{
	Py_buffer *inner = view->internal;

	((struct exporter *)self)->views--;
	PyBuffer_Release(inner);
	PyMem_Free(inner);
}

static int exporter_traverse(PyObject *self, visitproc visit, void *arg)
{
	Py_VISIT(Py_TYPE(self));
	Py_VISIT(((struct exporter *)self)->exported);
	return 0;
}

static int exporter_clear(PyObject *self)
{
	Py_CLEAR(((struct exporter *)self)->exported);
	return 0;
}

static void exporter_dealloc(PyObject *self)
{
	PyTypeObject *type = Py_TYPE(self);
	freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);

	PyObject_GC_UnTrack(self);
	exporter_clear(self);
	release(self);
	Py_DECREF(type);
}

static PyMemberDef exporter_members[] = {
	{ "_exported", T_OBJECT, offsetof(struct exporter, exported), 0, NULL },
	{ "_views", T_PYSSIZET, offsetof(struct exporter, views), READONLY, NULL },
	{ NULL, 0, 0, 0, NULL },
};

static PyType_Slot exporter_slots[] = {
	{ Py_tp_doc, (void *)"A base class whose instances export the buffer of their attribute "
			     "`_exported`." },
	{ Py_bf_getbuffer, exporter_getbuffer },
	{ Py_bf_releasebuffer, exporter_releasebuffer },
	{ Py_tp_traverse, exporter_traverse },
	{ Py_tp_clear, exporter_clear },
	{ Py_tp_dealloc, exporter_dealloc },
	{ Py_tp_members, exporter_members },
	{ 0, NULL },
};

static PyType_Spec exporter_spec = {
	.name = "aiordma._native._buffer_exporter.BufferExporter",
	.basicsize = sizeof(struct exporter),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
	.slots = exporter_slots,
};

static int add_type(PyObject *module)
{
	PyObject *type = PyType_FromModuleAndSpec(module, &exporter_spec, NULL);
	int result;

	if (!type)
		return -1;
	result = PyModule_AddType(module, (PyTypeObject *)type);
	Py_DECREF(type);
	return result;
}

static PyModuleDef_Slot module_slots[] = {
	{ Py_mod_exec, add_type },
	{ 0, NULL },
};

static struct PyModuleDef module = {
	PyModuleDef_HEAD_INIT,
	.m_name = "aiordma._native._buffer_exporter",
	.m_slots = module_slots,
};

PyMODINIT_FUNC PyInit__buffer_exporter(void)
{
	return PyModuleDef_Init(&module);
}
