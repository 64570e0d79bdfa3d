/*
 * InlineFuture: a future that wakes one task of an asyncio loop, in the callback that sets it.
 *
 * The methods are those that asyncio's tasks call. aiordma.loop.inline_wakeup describes the
 * wake-up.
 */
#include "fast_path.h"

enum { PENDING, IS_SET, CANCELLED };

struct inline_future {
	PyObject_HEAD PyObject *loop;
	PyObject *waiter;  /* resumes the task that awaits the future, or NULL */
	PyObject *context; /* of the task */
	PyObject *message; /* of the cancellation, or NULL */
	char state;
	char blocking; /* set while a task takes the future from the await */
};

/*
 * The tasks that one callback has woken so far: one list for each thread. With another model, the
 * module would be linked with the dynamic loader.
 */
#define PER_THREAD static _Thread_local __attribute__((tls_model("initial-exec")))
PER_THREAD PyObject *batch;
PER_THREAD unsigned long long scheduled;

PyTypeObject *inline_future_type;

static PyObject *cancelled_error, *asyncio_loop;
static PyObject *name_run, *name_done, *name_set_result, *name_create_future;
static PyObject *run_batch; /* called with a list of several woken futures */
/*
 * A future of asyncio that is done, with the result None. A task gets it in place of the one that
 * it awaited: asyncio reads the result of its own futures in C, and calls result() of all others.
 */
static PyObject *done_future;

static PyObject *make_inline_future(PyObject *loop)
{
	PyObject *self = PyType_GenericAlloc(inline_future_type, 0);

	if (self)
		((struct inline_future *)self)->loop = Py_NewRef(loop);
	return self;
}

static PyObject *inline_future_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
	PyObject *loop, *callback = NULL, *context = NULL, *self;

	if (!PyArg_ParseTuple(args, "O|OO", &loop, &callback, &context))
		return NULL;
	if (callback && !context) {
		PyErr_SetString(PyExc_TypeError, "a callback needs a context");
		return NULL;
	}
	self = make_inline_future(loop);
	if (self && callback) {
		((struct inline_future *)self)->waiter = Py_NewRef(callback);
		((struct inline_future *)self)->context = Py_NewRef(context);
	}
	return self;
}

static int inline_future_traverse(PyObject *self, visitproc visit, void *arg)
{
	struct inline_future *future = (struct inline_future *)self;

	Py_VISIT(Py_TYPE(self));
	Py_VISIT(future->loop);
	Py_VISIT(future->waiter);
	Py_VISIT(future->context);
	Py_VISIT(future->message);
	return 0;
}

static int inline_future_clear(PyObject *self)
{
	struct inline_future *future = (struct inline_future *)self;

	Py_CLEAR(future->loop);
	Py_CLEAR(future->waiter);
	Py_CLEAR(future->context);
	Py_CLEAR(future->message);
	return 0;
}

static void inline_future_dealloc(PyObject *self)
{
	PyObject_GC_UnTrack(self);
	inline_future_clear(self);
	simple_dealloc(self);
}

/* Call the waiter now if `now`, or else in the loop's next iteration. It is called once. */
static PyObject *resume(struct inline_future *future, int now)
{
	PyObject *waiter = future->waiter, *context = future->context, *result = NULL;
	PyObject *done = future->state == IS_SET && done_future ? done_future : (PyObject *)future;
	PyObject *call_soon, *arguments, *names;

	future->waiter = future->context = NULL;
	if (!waiter)
		Py_RETURN_NONE;
	if (now) {
		result = PyObject_CallMethodObjArgs(context, name_run, waiter, done, NULL);
	} else {
		scheduled++;
		call_soon = PyObject_GetAttrString(future->loop, "call_soon");
		arguments = Py_BuildValue("(OO)", waiter, done);
		names = Py_BuildValue("{sO}", "context", context);
		if (call_soon && arguments && names)
			result = PyObject_Call(call_soon, arguments, names);
		Py_XDECREF(call_soon);
		Py_XDECREF(arguments);
		Py_XDECREF(names);
	}
	Py_DECREF(waiter);
	Py_DECREF(context);
	if (!result)
		return NULL;
	Py_DECREF(result);
	Py_RETURN_NONE;
}

/* Set a future that is not done. Returns 0, or -1 with an exception. */
static int set_pending(struct inline_future *future)
{
	PyObject *result;

	future->state = IS_SET;
	if (!future->waiter)
		return 0;
	if (batch)
		return PyList_Append(batch, (PyObject *)future);
	result = resume(future, 0);
	Py_XDECREF(result);
	return result ? 0 : -1;
}

/* Set a future unless it is done. An exception means that the loop is closed, or is left set. */
void wake_inline_future(PyObject *self)
{
	struct inline_future *future = (struct inline_future *)self;

	if (future->state == PENDING && set_pending(future) &&
	    PyErr_ExceptionMatches(PyExc_RuntimeError))
		PyErr_Clear();
}

static PyObject *inline_future_set_result(PyObject *self, PyObject *result)
{
	struct inline_future *future = (struct inline_future *)self;

	if (future->state != PENDING) {
		PyErr_SetString(PyExc_RuntimeError, "the future is done already");
		return NULL;
	}
	return set_pending(future) ? NULL : Py_NewRef(Py_None);
}

static PyObject *inline_future_cancel(PyObject *self, PyObject *args, PyObject *kwargs)
{
	static char *names[] = { "msg", NULL };
	struct inline_future *future = (struct inline_future *)self;
	PyObject *message = NULL, *result;

	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|O", names, &message))
		return NULL;
	if (future->state != PENDING)
		Py_RETURN_FALSE;
	future->state = CANCELLED;
	if (message && message != Py_None)
		replace(&future->message, message);
	result = resume(future, 0);
	if (!result)
		return NULL;
	Py_DECREF(result);
	Py_RETURN_TRUE;
}

/* Its only keyword argument is `context`. The tasks of asyncio always have one. */
static PyObject *inline_future_add_done_callback(PyObject *self, PyObject *const *args,
						 Py_ssize_t count, PyObject *keywords)
{
	struct inline_future *future = (struct inline_future *)self;

	if (count != 1 || !keywords || PyTuple_Size(keywords) != 1 ||
	    PyUnicode_CompareWithASCIIString(PyTuple_GetItem(keywords, 0), "context")) {
		PyErr_SetString(PyExc_TypeError, "add_done_callback(callback, *, context)");
		return NULL;
	}
	if (future->waiter) {
		PyErr_SetString(PyExc_RuntimeError, "another task awaits the future");
		return NULL;
	}
	future->waiter = Py_NewRef(args[0]);
	future->context = Py_NewRef(args[1]);
	return future->state == PENDING ? Py_NewRef(Py_None) : resume(future, 0);
}

static PyObject *inline_future_remove_done_callback(PyObject *self, PyObject *callback)
{
	struct inline_future *future = (struct inline_future *)self;
	int equal = future->waiter ? PyObject_RichCompareBool(future->waiter, callback, Py_EQ) : 0;

	if (equal < 0)
		return NULL;
	if (equal) {
		Py_CLEAR(future->waiter);
		Py_CLEAR(future->context);
	}
	return PyLong_FromLong(equal);
}

static PyObject *inline_future_done(PyObject *self, PyObject *unused)
{
	return PyBool_FromLong(((struct inline_future *)self)->state != PENDING);
}

static PyObject *inline_future_cancelled(PyObject *self, PyObject *unused)
{
	return PyBool_FromLong(((struct inline_future *)self)->state == CANCELLED);
}

static PyObject *inline_future_get_loop(PyObject *self, PyObject *unused)
{
	return Py_NewRef(((struct inline_future *)self)->loop);
}

static PyObject *inline_future_result(PyObject *self, PyObject *unused)
{
	struct inline_future *future = (struct inline_future *)self;

	if (future->state == IS_SET)
		Py_RETURN_NONE;
	if (future->state == PENDING)
		PyErr_SetString(PyExc_RuntimeError, "the future is not done");
	else if (future->message)
		PyErr_SetObject(cancelled_error, future->message);
	else
		PyErr_SetNone(cancelled_error);
	return NULL;
}

/* The first step of an await gives the future to the task, and the second one ends it. */
static PyObject *inline_future_next(PyObject *self)
{
	struct inline_future *future = (struct inline_future *)self;

	if (future->state == PENDING) {
		future->blocking = 1;
		return Py_NewRef(self);
	}
	Py_XDECREF(inline_future_result(self, NULL));
	return NULL;
}

static PyMemberDef inline_future_members[] = {
	{ "_asyncio_future_blocking", T_BOOL, offsetof(struct inline_future, blocking), 0,
	  "True while a task takes the future from the await." },
	{ NULL, 0, 0, 0, NULL },
};

static PyMethodDef inline_future_methods[] = {
	{ "set_result", inline_future_set_result, METH_O,
	  "set_result(None): wake the task, in the batch of this thread or in the loop's next "
	  "iteration." },
	{ "cancel", (PyCFunction)(void (*)(void))inline_future_cancel, METH_VARARGS | METH_KEYWORDS,
	  "cancel(msg=None): cancel the await. Return False if the future is done." },
	{ "add_done_callback", (PyCFunction)(void (*)(void))inline_future_add_done_callback,
	  METH_FASTCALL | METH_KEYWORDS,
	  "add_done_callback(callback, *, context): resume a task by this callback. One task can "
	  "await the future." },
	{ "remove_done_callback", inline_future_remove_done_callback, METH_O,
	  "remove_done_callback(callback): resume the task no more. Return 1 if it was to be." },
	{ "done", inline_future_done, METH_NOARGS, "Return True if it is set or cancelled." },
	{ "cancelled", inline_future_cancelled, METH_NOARGS, "Return True if it is cancelled." },
	{ "get_loop", inline_future_get_loop, METH_NOARGS, "Return the event loop." },
	{ "result", inline_future_result, METH_NOARGS,
	  "Return None if the future is set. Raise CancelledError if it is cancelled." },
	{ NULL, NULL, 0, NULL },
};

static PyType_Slot inline_future_slots[] = {
	{ Py_tp_doc,
	  (void *)"InlineFuture(loop[, callback, context]): a future that wakes one task, or has "
		  "callback(future) called in this context, with any future that is done." },
	{ Py_tp_new, inline_future_new },
	{ Py_tp_traverse, inline_future_traverse },
	{ Py_tp_clear, inline_future_clear },
	{ Py_tp_dealloc, inline_future_dealloc },
	{ Py_tp_members, inline_future_members },
	{ Py_tp_methods, inline_future_methods },
	{ Py_am_await, PyObject_SelfIter },
	{ Py_tp_iter, PyObject_SelfIter },
	{ Py_tp_iternext, inline_future_next },
	{ 0, NULL },
};

PyType_Spec inline_future_spec = {
	.name = "aiordma._native._fast_path.InlineFuture",
	.basicsize = sizeof(struct inline_future),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
	.slots = inline_future_slots,
};

/* --- InlineFutureFactory --- */

struct factory {
	PyObject_HEAD PyObject *loop;
};

PyTypeObject *inline_future_factory_type;

static PyObject *factory_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
	PyObject *loop, *self = NULL;

	if (PyArg_ParseTuple(args, "O", &loop))
		self = PyType_GenericAlloc(type, 0);
	if (self)
		((struct factory *)self)->loop = Py_NewRef(loop);
	return self;
}

static int factory_traverse(PyObject *self, visitproc visit, void *arg)
{
	Py_VISIT(Py_TYPE(self));
	Py_VISIT(((struct factory *)self)->loop);
	return 0;
}

static int factory_clear(PyObject *self)
{
	Py_CLEAR(((struct factory *)self)->loop);
	return 0;
}

static void factory_dealloc(PyObject *self)
{
	PyObject_GC_UnTrack(self);
	factory_clear(self);
	simple_dealloc(self);
}

static PyObject *factory_call(PyObject *self, PyObject *args, PyObject *kwargs)
{
	return make_inline_future(((struct factory *)self)->loop);
}

static PyType_Slot factory_slots[] = {
	{ Py_tp_doc, (void *)"InlineFutureFactory(loop): a function that makes InlineFutures." },
	{ Py_tp_new, factory_new },
	{ Py_tp_traverse, factory_traverse },
	{ Py_tp_clear, factory_clear },
	{ Py_tp_dealloc, factory_dealloc },
	{ Py_tp_call, factory_call },
	{ 0, NULL },
};

PyType_Spec inline_future_factory_spec = {
	.name = "aiordma._native._fast_path.InlineFutureFactory",
	.basicsize = sizeof(struct factory),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
	.slots = factory_slots,
};

/* Return a new future of this factory, or of any other function. */
PyObject *make_future(PyObject *function)
{
	if (Py_TYPE(function) == inline_future_factory_type)
		return make_inline_future(((struct factory *)function)->loop);
	return PyObject_CallNoArgs(function);
}

/* --- futures of any loop --- */

/* Return a new future for one waiting task: an InlineFuture on asyncio, else one of the loop. */
PyObject *make_future_of(PyObject *module, PyObject *loop)
{
	int is_asyncio = PyObject_IsInstance(loop, asyncio_loop);

	if (is_asyncio < 0)
		return NULL;
	if (is_asyncio)
		return make_inline_future(loop);
	return PyObject_CallMethodObjArgs(loop, name_create_future, NULL);
}

/* Return 1 if a future was set or its task was cancelled, else 0. -1 with an exception. */
int is_done(PyObject *future)
{
	PyObject *done;
	int result;

	if (Py_TYPE(future) == inline_future_type)
		return ((struct inline_future *)future)->state != PENDING;
	done = PyObject_CallMethodObjArgs(future, name_done, NULL);
	result = done ? PyObject_IsTrue(done) : -1;
	Py_XDECREF(done);
	return result;
}

/* Do what aiordma.loop.wake() does. RuntimeError: the loop is closed and there is no waiter. */
void wake(PyObject *future)
{
	PyObject *result = NULL;

	if (Py_TYPE(future) == inline_future_type) {
		wake_inline_future(future);
		return;
	}
	if (!is_done(future)) {
		result = PyObject_CallMethodObjArgs(future, name_set_result, Py_None, NULL);
		if (!result && PyErr_ExceptionMatches(PyExc_RuntimeError))
			PyErr_Clear();
	}
	Py_XDECREF(result);
}

/* --- the batch of a thread --- */

static PyObject *call(PyObject *const *args, Py_ssize_t count)
{
	PyObject *arguments, *result;
	Py_ssize_t index;

	if (count == 1)
		return PyObject_CallNoArgs(args[0]);
	arguments = PyTuple_New(count - 1);
	if (!arguments)
		return NULL;
	for (index = 1; index < count; index++)
		PyTuple_SetItem(arguments, index - 1, Py_NewRef(args[index]));
	result = PyObject_CallObject(args[0], arguments);
	Py_DECREF(arguments);
	return result;
}

/* Begin to collect the woken tasks. Returns 1, or 0 if they are collected already, or -1. */
int begin_wakeups(void)
{
	if (batch)
		return 0;
	batch = PyList_New(0);
	return batch ? 1 : -1;
}

/* Run the tasks that were collected. Returns 0, or -1 with an exception. */
int run_wakeups(void)
{
	struct failure failure = { NULL, NULL, NULL };
	PyObject *futures = batch;

	note_failure(&failure);
	batch = NULL;
	if (PyList_Size(futures) == 1)
		Py_XDECREF(resume((struct inline_future *)PyList_GetItem(futures, 0), 1));
	else if (PyList_Size(futures) > 1)
		Py_XDECREF(PyObject_CallFunctionObjArgs(run_batch, futures, NULL));
	note_failure(&failure);
	Py_DECREF(futures);
	return restore_failure(&failure);
}

PyObject *wake_batch(PyObject *module, PyObject *futures)
{
	struct failure failure = { NULL, NULL, NULL };
	Py_ssize_t index, count = PyList_Size(futures);

	for (index = 0; index < count; index++) {
		PyObject *future = PyList_GetItem(futures, index);

		Py_XDECREF(resume((struct inline_future *)future, !failure.type));
		note_failure(&failure);
	}
	return none_unless(restore_failure(&failure));
}

PyObject *run_with_inline_wakeups(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
	int started;

	if (count < 1) {
		PyErr_SetString(PyExc_TypeError, "a callback expected");
		return NULL;
	}
	started = begin_wakeups();
	if (started <= 0)
		return started ? NULL : call(args, count);
	Py_XDECREF(call(args, count));
	return run_wakeups() ? NULL : Py_NewRef(Py_None);
}

PyObject *set_run_batch(PyObject *module, PyObject *function)
{
	replace(&run_batch, function);
	Py_RETURN_NONE;
}

PyObject *set_done_future(PyObject *module, PyObject *future)
{
	replace(&done_future, future);
	Py_RETURN_NONE;
}

PyObject *scheduled_count(PyObject *module, PyObject *unused)
{
	return PyLong_FromUnsignedLongLong(scheduled);
}

int prepare_inline_futures(PyObject *module)
{
	PyObject *asyncio = PyImport_ImportModule("asyncio");

	if (!asyncio)
		return -1;
	cancelled_error = PyObject_GetAttrString(asyncio, "CancelledError");
	asyncio_loop = PyObject_GetAttrString(asyncio, "AbstractEventLoop");
	Py_DECREF(asyncio);
	name_run = PyUnicode_InternFromString("run");
	name_done = PyUnicode_InternFromString("done");
	name_set_result = PyUnicode_InternFromString("set_result");
	name_create_future = PyUnicode_InternFromString("create_future");
	return PyErr_Occurred() ? -1 : 0;
}
