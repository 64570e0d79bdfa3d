/*
 * Attempt: a coroutine that first tries to finish at once, in C, and otherwise runs a coroutine of
 * Python. An await that need not wait then costs no Python frame.
 *
 * It does nothing before it is first resumed. So a task that is cancelled before it runs has sent
 * and received nothing, as with any coroutine.
 */
#include "fast_path.h"

PyTypeObject *attempt_type;

struct attempt {
	PyObject_HEAD attempt_function function;
	const char *name;
	PyObject *owner;    /* kept alive until the end */
	PyObject *target;   /* the first argument of `function` */
	PyObject *argument; /* its second argument, or NULL */
	PyObject *slow;	    /* makes the coroutine of Python */
	PyObject *coroutine;
	char is_started;
	char is_over;
	char is_tracked; /* by the garbage collector */
};

#define UNUSED_ATTEMPTS 16

/* Attempts that have ended, for the next ones: allocating one takes longer than the rest of it. */
static struct attempt *unused[UNUSED_ATTEMPTS];
static int unused_count;

PyObject *make_attempt(const char *name, attempt_function function, PyObject *target,
		       PyObject *argument, PyObject *owner, PyObject *slow)
{
	struct attempt *attempt;

	if (!slow) {
		PyErr_SetString(PyExc_RuntimeError, "set_slow() was not called");
		return NULL;
	}
	if (unused_count)
		attempt = (struct attempt *)PyObject_Init((PyObject *)unused[--unused_count],
							  attempt_type);
	else
		attempt = PyObject_GC_New(struct attempt, attempt_type);
	if (!attempt)
		return NULL;
	attempt->function = function;
	attempt->name = name;
	attempt->owner = Py_NewRef(owner);
	attempt->target = Py_NewRef(target);
	attempt->argument = Py_XNewRef(argument);
	attempt->slow = Py_NewRef(slow);
	attempt->coroutine = NULL;
	attempt->is_started = attempt->is_over = attempt->is_tracked = 0;
	return (PyObject *)attempt;
}

static int attempt_traverse(PyObject *self, visitproc visit, void *arg)
{
	struct attempt *attempt = (struct attempt *)self;

	Py_VISIT(Py_TYPE(self));
	Py_VISIT(attempt->owner);
	Py_VISIT(attempt->target);
	Py_VISIT(attempt->argument);
	Py_VISIT(attempt->slow);
	Py_VISIT(attempt->coroutine);
	return 0;
}

static int attempt_clear(PyObject *self)
{
	struct attempt *attempt = (struct attempt *)self;

	Py_CLEAR(attempt->target);
	Py_CLEAR(attempt->argument);
	Py_CLEAR(attempt->slow);
	Py_CLEAR(attempt->coroutine);
	Py_CLEAR(attempt->owner);
	return 0;
}

/* Warn as Python does of a coroutine that was never awaited. */
static void warn_never_awaited(const char *name)
{
	PyObject *type, *value, *traceback;

	PyErr_Fetch(&type, &value, &traceback);
	if (PyErr_WarnFormat(PyExc_RuntimeWarning, 1, "coroutine '%s' was never awaited", name))
		PyErr_WriteUnraisable((PyObject *)attempt_type);
	PyErr_Restore(type, value, traceback);
}

static void attempt_dealloc(PyObject *self)
{
	struct attempt *attempt = (struct attempt *)self;

	if (attempt->is_tracked)
		PyObject_GC_UnTrack(self);
	if (!attempt->is_started)
		warn_never_awaited(attempt->name);
	if (!attempt->is_over)
		attempt_clear(self);
	if (unused_count < UNUSED_ATTEMPTS) {
		unused[unused_count++] = attempt;
		Py_DECREF(Py_TYPE(self));
	} else
		simple_dealloc(self);
}

static void end(struct attempt *attempt)
{
	attempt->is_over = 1;
	attempt_clear((PyObject *)attempt);
}

/* Make the coroutine of Python. Its maker gets the argument, and the error if there is one. */
static int go_slow(struct attempt *attempt, int error)
{
	PyObject *argument = attempt->argument;

	if (error)
		attempt->coroutine = PyObject_CallFunction(attempt->slow, "Oi", argument, error);
	else if (argument)
		attempt->coroutine = PyObject_CallFunctionObjArgs(attempt->slow, argument, NULL);
	else
		attempt->coroutine = PyObject_CallNoArgs(attempt->slow);
	Py_CLEAR(attempt->argument);
	/* Only the coroutine can be part of a reference cycle. */
	PyObject_GC_Track((PyObject *)attempt);
	attempt->is_tracked = 1;
	return attempt->coroutine ? 0 : -1;
}

/* Resume it. Returns as PyIter_Send() does. */
static PySendResult attempt_resume(PyObject *self, PyObject *value, PyObject **result)
{
	struct attempt *attempt = (struct attempt *)self;
	PySendResult sent;
	int error = 0, done;

	*result = NULL;
	if (attempt->is_over) {
		PyErr_SetString(PyExc_RuntimeError, "cannot reuse already awaited coroutine");
		return PYGEN_ERROR;
	}
	if (!attempt->is_started) {
		attempt->is_started = 1;
		done = attempt->function(attempt->target, attempt->argument, result, &error);
		if (!done && !go_slow(attempt, error))
			value = Py_None;
		else {
			end(attempt);
			return done > 0 ? PYGEN_RETURN : PYGEN_ERROR;
		}
	}
	if (!attempt->coroutine) {
		PyErr_SetString(PyExc_ValueError, "coroutine already executing");
		return PYGEN_ERROR;
	}
	sent = PyIter_Send(attempt->coroutine, value, result);
	if (sent != PYGEN_NEXT)
		end(attempt);
	return sent;
}

/* Return a result as a method does: a return of the coroutine raises StopIteration. */
static PyObject *as_method(PySendResult sent, PyObject *result)
{
	PyObject *stop;

	if (sent != PYGEN_RETURN)
		return result;
	stop = PyObject_CallFunctionObjArgs(PyExc_StopIteration, result, NULL);
	Py_DECREF(result);
	if (stop)
		PyErr_SetObject(PyExc_StopIteration, stop);
	Py_XDECREF(stop);
	return NULL;
}

static PyObject *attempt_next(PyObject *self)
{
	PyObject *result;
	PySendResult sent = attempt_resume(self, Py_None, &result);

	if (sent == PYGEN_RETURN && result == Py_None) {
		Py_DECREF(result);
		return NULL;
	}
	return as_method(sent, result);
}

static PyObject *attempt_send(PyObject *self, PyObject *value)
{
	PyObject *result;
	PySendResult sent = attempt_resume(self, value, &result);

	return as_method(sent, result);
}

/* An attempt that has not begun tries nothing any more: the new coroutine raises at once. */
static PyObject *attempt_throw(PyObject *self, PyObject *args)
{
	struct attempt *attempt = (struct attempt *)self;
	PyObject *method, *result = NULL;

	if (!attempt->is_over && !attempt->is_started) {
		attempt->is_started = 1;
		if (go_slow(attempt, 0)) {
			end(attempt);
			return NULL;
		}
	}
	if (!attempt->coroutine) {
		PyErr_SetString(PyExc_RuntimeError, "cannot reuse already awaited coroutine");
		return NULL;
	}
	method = PyObject_GetAttrString(attempt->coroutine, "throw");
	if (method)
		result = PyObject_CallObject(method, args);
	Py_XDECREF(method);
	if (!result)
		end(attempt);
	return result;
}

static PyObject *attempt_close(PyObject *self, PyObject *unused)
{
	struct attempt *attempt = (struct attempt *)self;
	PyObject *result = attempt->coroutine ?
				   PyObject_CallMethod(attempt->coroutine, "close", NULL) :
				   Py_NewRef(Py_None);

	attempt->is_started = 1;
	end(attempt);
	return result;
}

static PyObject *attempt_name(PyObject *self, void *unused)
{
	return PyUnicode_FromString(((struct attempt *)self)->name);
}

static PyObject *attempt_awaited(PyObject *self, void *unused)
{
	PyObject *coroutine = ((struct attempt *)self)->coroutine;

	return Py_NewRef(coroutine ? coroutine : Py_None);
}

/* Return an attribute of the coroutine of Python; None if there is none yet, or none any more. */
static PyObject *attempt_delegate(PyObject *self, void *name)
{
	PyObject *coroutine = ((struct attempt *)self)->coroutine;

	return coroutine ? PyObject_GetAttrString(coroutine, name) : Py_NewRef(Py_None);
}

static PyGetSetDef attempt_getset[] = {
	{ "__name__", attempt_name, NULL, "The name of the method that made it.", NULL },
	{ "__qualname__", attempt_name, NULL, "The name of the method that made it.", NULL },
	{ "cr_await", attempt_awaited, NULL, "The coroutine that it waits for, or None.", NULL },
	{ "cr_frame", attempt_delegate, NULL, "The frame of that coroutine.", "cr_frame" },
	{ NULL, NULL, NULL, NULL, NULL },
};

static PyMethodDef attempt_methods[] = {
	{ "send", attempt_send, METH_O, "send(value): resume it." },
	{ "throw", attempt_throw, METH_VARARGS, "throw(type[, value[, traceback]]): raise in it." },
	{ "close", attempt_close, METH_NOARGS, "End it." },
	{ NULL, NULL, 0, NULL },
};

static PyType_Slot attempt_slots[] = {
	{ Py_tp_doc, (void *)"A coroutine that first tries to finish at once." },
	{ Py_tp_traverse, attempt_traverse },
	{ Py_tp_clear, attempt_clear },
	{ Py_tp_dealloc, attempt_dealloc },
	{ Py_tp_methods, attempt_methods },
	{ Py_tp_getset, attempt_getset },
	{ Py_am_await, PyObject_SelfIter },
	{ Py_am_send, attempt_resume },
	{ Py_tp_iternext, attempt_next },
	{ 0, NULL },
};

PyType_Spec attempt_spec = {
	.name = "aiordma._native._fast_path.Attempt",
	.basicsize = sizeof(struct attempt),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
	.slots = attempt_slots,
};
