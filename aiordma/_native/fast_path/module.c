/* The module aiordma._native._fast_path. */
#include "fast_path.h"

int is_forked_child;
int (*post_send)(struct ibv_qp *qp, struct ibv_send_wr *first);
int (*post_all)(struct ibv_qp **cell, struct ibv_send_wr *first);
int (*comp_event)(struct ibv_comp_channel *channel, struct ibv_cq **cq);

static PyObject *get_is_forked_child(PyObject *module, PyObject *unused)
{
	return PyBool_FromLong(is_forked_child);
}

static PyObject *note_fork(PyObject *module, PyObject *unused)
{
	is_forked_child = 1;
	Py_RETURN_NONE;
}

static PyObject *set_functions(PyObject *module, PyObject *args)
{
	unsigned long long post_address, all_address, event_address;

	if (!PyArg_ParseTuple(args, "KKK", &post_address, &all_address, &event_address))
		return NULL;
	post_send = (int (*)(struct ibv_qp *, struct ibv_send_wr *))(uintptr_t)post_address;
	post_all = (int (*)(struct ibv_qp **, struct ibv_send_wr *))(uintptr_t)all_address;
	comp_event = (int (*)(struct ibv_comp_channel *, struct ibv_cq **))(uintptr_t)event_address;
	Py_RETURN_NONE;
}

static PyMethodDef module_methods[] = {
	{ "is_forked_child", get_is_forked_child, METH_NOARGS,
	  "Return True if note_fork() was called." },
	{ "note_fork", note_fork, METH_NOARGS,
	  "Note that this process is a forked child: post nothing, and take no completions." },
	{ "set_functions", set_functions, METH_VARARGS,
	  "set_functions(post_send, post_all, comp_event): use the functions aiordma_post_send(), "
	  "aiordma_post_all() and aiordma_comp_event() at these addresses." },
	{ "run_with_inline_wakeups", (PyCFunction)(void (*)(void))run_with_inline_wakeups,
	  METH_FASTCALL,
	  "run_with_inline_wakeups(callback, *arguments): call it, then run the tasks that it "
	  "woke." },
	{ "set_run_batch", set_run_batch, METH_O,
	  "set_run_batch(function): run several woken tasks by function(futures)." },
	{ "wake_batch", wake_batch, METH_O,
	  "wake_batch(futures): run the tasks of a list of set InlineFutures. If one raises, the "
	  "others run in the loop's next iteration." },
	{ "set_done_future", set_done_future, METH_O,
	  "set_done_future(future): pass this future, which is done, to the tasks that are "
	  "woken." },
	{ "make_future", make_future_of, METH_O,
	  "make_future(loop): return a future for one waiting task: an InlineFuture on asyncio, "
	  "else one of the loop." },
	{ "scheduled_count", scheduled_count, METH_NOARGS,
	  "Return the number of wake-ups that this thread has left to the loop's next iteration." },
	{ NULL, NULL, 0, NULL },
};

/* Return 1 if `object` is of this type of the module. Else return 0 and set TypeError. */
int is_instance(PyTypeObject *type, PyObject *object)
{
	PyObject *name;

	if (PyObject_TypeCheck(object, type))
		return 1;
	name = PyType_GetName(type);
	if (name)
		PyErr_Format(PyExc_TypeError, "%U expected", name);
	Py_XDECREF(name);
	return 0;
}

/*
 * Get the memory of a contiguous buffer. Returns 1, or 0 without an exception if it is none: Python
 * raises it. Release the view afterwards.
 */
int get_buffer(PyObject *data, Py_buffer *view)
{
	if (!PyObject_CheckBuffer(data))
		return 0;
	if (!PyObject_GetBuffer(data, view, PyBUF_SIMPLE))
		return 1;
	PyErr_Clear();
	return 0;
}

static int add_numbers(PyObject *module)
{
	return PyModule_AddIntMacro(module, KEY_SHIFT) ||
	       PyModule_AddIntMacro(module, NUMBER_MASK) || PyModule_AddIntMacro(module, BATCH) ||
	       PyModule_AddIntMacro(module, LOOP_BUDGET_NS) ||
	       PyModule_AddIntMacro(module, MAX_LOOP_BUDGET_NS) ||
	       PyModule_AddIntMacro(module, BUDGET_FACTOR) ||
	       PyModule_AddIntMacro(module, BUSY_ITERATION_FACTOR) ||
	       PyModule_AddIntMacro(module, MAX_BATCHED) ||
	       PyModule_AddIntMacro(module, STREAM_TARGETS) ||
	       PyModule_AddIntMacro(module, STREAM_CONTROLS);
}

static int add_types(PyObject *module)
{
	const struct {
		PyType_Spec *spec;
		PyTypeObject **global;
	} types[] = {
		{ &send_queue_core_spec, &send_queue_core_type },
		{ &receive_ring_spec, &receive_ring_type },
		{ &receive_queue_spec, &receive_queue_type },
		{ &completion_dispatcher_spec, &completion_dispatcher_type },
		{ &reference_count_spec, &reference_count_type },
		{ &transfer_spec, &transfer_type },
		{ &inline_future_spec, &inline_future_type },
		{ &inline_future_factory_spec, &inline_future_factory_type },
		{ &inbound_spec, &inbound_type },
		{ &outbound_spec, &outbound_type },
		{ &send_ring_spec, &send_ring_type },
		{ &stream_data_path_spec, &stream_data_path_type },
		{ &polled_queue_spec, &polled_queue_type },
		{ &adaptive_polling_spec, &adaptive_polling_type },
		{ &attempt_spec, &attempt_type },
		{ &message_credits_spec, &message_credits_type },
		{ &eager_path_spec, NULL },
		{ &wait_queue_spec, NULL },
		{ &free_buffers_spec, &free_buffers_type },
		{ &pooled_buffer_spec, &pooled_buffer_type },
	};
	size_t index;

	for (index = 0; index < sizeof(types) / sizeof(*types); index++) {
		PyObject *type = PyType_FromModuleAndSpec(module, types[index].spec, NULL);
		int result = type ? PyModule_AddType(module, (PyTypeObject *)type) : -1;

		if (!result && types[index].global)
			*types[index].global = (PyTypeObject *)Py_NewRef(type);
		Py_XDECREF(type);
		if (result)
			return -1;
	}
	return 0;
}

static PyModuleDef_Slot module_slots[] = {
	{ Py_mod_exec, add_types },
	{ Py_mod_exec, add_numbers },
	{ Py_mod_exec, prepare_starting },
	{ Py_mod_exec, prepare_inline_futures },
	{ Py_mod_exec, prepare_adaptive_polling },
	{ 0, NULL },
};

static struct PyModuleDef module = {
	PyModuleDef_HEAD_INIT,
	.m_name = "aiordma._native._fast_path",
	.m_methods = module_methods,
	.m_slots = module_slots,
};

PyMODINIT_FUNC PyInit__fast_path(void)
{
	return PyModuleDef_Init(&module);
}
