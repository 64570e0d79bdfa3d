/*
 * Attempt: a coroutine that first tries to finish at once, in C. If it cannot, it parks and tries
 * again when it was woken, or it runs a coroutine of Python. If it polls first, it lets the loop
 * run meanwhile. So an await costs no Python frame in most cases. On a loop that needs checkpoints
 * (trio), it executes one half of a checkpoint before it tries, and the other one afterwards.
 *
 * It does nothing before it is first resumed. So a task that is cancelled before it runs has sent
 * and received nothing, as with any coroutine.
 */
#include "fast_path.h"

PyTypeObject *attempt_type;

enum step {
	TRYING,
	RAISING_IF_CANCELLED,
	YIELDED,
	PARKED,
	TRANSFERRING,
	WAITING,
	LETTING_OTHERS_RUN,
};

struct attempt {
	PyObject_HEAD const struct attempt_kind *kind;
	PyObject *owner;       /* kept alive until the end */
	PyObject *target;      /* the first argument of the function */
	PyObject *argument;    /* its second argument, or NULL */
	PyObject *const *slow; /* the member of the target that makes the coroutine of Python */
	PyObject *checkpoints; /* a tuple of functions, or NULL */
	PyObject *coroutine;   /* of the current step, or the iterator of a future */
	PyObject *result;
	struct parking *parking;   /* a part of the target, while the task waits there */
	struct transfer *transfer; /* the one whose end the task waits for, or NULL */
	enum step step;
	char is_started;
	char is_over;
	char is_running; /* so that code that it runs cannot resume it, or end it */
	char is_tracked; /* by the garbage collector */
};

#define UNUSED_ATTEMPTS 16

/* Attempts that have ended, for the next ones: allocating one takes longer than the rest of it. */
static struct attempt *unused[UNUSED_ATTEMPTS];
static int unused_count;

PyObject *make_attempt(const struct attempt_kind *kind, PyObject *target, PyObject *argument,
		       PyObject *owner, PyObject *const *slow, PyObject *checkpoints)
{
	struct attempt *attempt;

	if (unused_count)
		attempt = (struct attempt *)PyObject_Init((PyObject *)unused[--unused_count],
							  attempt_type);
	else
		attempt = PyObject_GC_New(struct attempt, attempt_type);
	if (!attempt)
		return NULL;
	attempt->kind = kind;
	attempt->owner = Py_NewRef(owner);
	attempt->target = Py_NewRef(target);
	attempt->argument = Py_XNewRef(argument);
	attempt->slow = slow;
	attempt->checkpoints = checkpoints == Py_None ? NULL : Py_XNewRef(checkpoints);
	attempt->coroutine = attempt->result = NULL;
	attempt->parking = NULL;
	attempt->transfer = NULL;
	attempt->step = attempt->checkpoints ? RAISING_IF_CANCELLED : TRYING;
	attempt->is_started = attempt->is_over = attempt->is_running = attempt->is_tracked = 0;
	return (PyObject *)attempt;
}

static int attempt_traverse(PyObject *self, visitproc visit, void *arg)
{
	struct attempt *attempt = (struct attempt *)self;

	Py_VISIT(Py_TYPE(self));
	Py_VISIT(attempt->owner);
	Py_VISIT(attempt->target);
	Py_VISIT(attempt->argument);
	Py_VISIT(attempt->checkpoints);
	Py_VISIT(attempt->coroutine);
	Py_VISIT(attempt->result);
	Py_VISIT((PyObject *)attempt->transfer);
	return 0;
}

/* The task waits for the transfer no more: it was cancelled, or its coroutine was closed. */
static void abandon_transfer(struct attempt *attempt)
{
	struct transfer *transfer = attempt->transfer;
	PyObject *type, *value, *traceback, *call = NULL, *result;

	attempt->transfer = NULL;
	if (transfer->core && (transfer->is_read || transfer->error))
		call = transfer->core->on_abandoned; /* NULL: the connection is unlinked */
	if (call) {
		PyErr_Fetch(&type, &value, &traceback);
		Py_INCREF(call);
		result = PyObject_CallFunctionObjArgs(call, (PyObject *)transfer, NULL);
		if (!result)
			PyErr_WriteUnraisable((PyObject *)attempt_type);
		Py_XDECREF(result);
		Py_DECREF(call);
		PyErr_Restore(type, value, traceback);
	}
	Py_DECREF((PyObject *)transfer);
}

/* Drop all that an attempt has in the step TRYING. In the others it has more. */
static inline void drop_arguments(struct attempt *attempt)
{
	Py_CLEAR(attempt->argument);
	Py_CLEAR(attempt->target);
	Py_CLEAR(attempt->owner);
}

static int attempt_clear(PyObject *self)
{
	struct attempt *attempt = (struct attempt *)self;

	attempt->is_over = 1;
	if (attempt->parking)
		unpark(attempt->parking);
	attempt->parking = NULL;
	if (attempt->transfer)
		abandon_transfer(attempt);
	if (attempt->target && attempt->kind->on_end)
		attempt->kind->on_end(attempt->target);
	if (attempt->step != TRYING) {
		Py_CLEAR(attempt->checkpoints);
		Py_CLEAR(attempt->coroutine);
		Py_CLEAR(attempt->result);
	}
	drop_arguments(attempt);
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
		warn_never_awaited(attempt->kind->name);
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
	attempt_clear((PyObject *)attempt);
}

/* Await this coroutine, a new reference, in this step. NULL is an error. Returns 0 or -1. */
static int await_in(struct attempt *attempt, enum step step, PyObject *coroutine)
{
	attempt->step = step;
	attempt->coroutine = coroutine;
	if (!attempt->is_tracked) /* only the coroutine can be part of a reference cycle */
		PyObject_GC_Track((PyObject *)attempt);
	attempt->is_tracked = 1;
	return coroutine ? 0 : -1;
}

static int await_half(struct attempt *attempt, enum step step, Py_ssize_t index)
{
	PyObject *half = PyTuple_GetItem(attempt->checkpoints, index);

	return half ? await_in(attempt, step, PyObject_CallNoArgs(half)) : -1;
}

/* Make the coroutine of Python. Its maker gets the argument, and the error if there is one. */
static int go_slow(struct attempt *attempt, int error)
{
	PyObject *slow = *attempt->slow, *argument = attempt->argument, *coroutine = NULL;

	if (!slow)
		PyErr_SetString(PyExc_RuntimeError, "set_slow() was not called");
	else if (error)
		coroutine = PyObject_CallFunction(slow, "Oi", argument, error);
	else if (attempt->kind->is_tuple)
		coroutine = PyObject_CallObject(slow, argument);
	else if (argument)
		coroutine = PyObject_CallFunctionObjArgs(slow, argument, NULL);
	else
		coroutine = PyObject_CallNoArgs(slow);
	Py_CLEAR(attempt->argument);
	return await_in(attempt, WAITING, coroutine);
}

/* Wait in the target, if it can, or in Python. */
static int wait(struct attempt *attempt, int error)
{
	const struct attempt_kind *kind = attempt->kind;
	struct parking *parking = NULL;
	enum step step = PARKED;
	PyObject *iterator;

	if (kind->find_parking && !error)
		parking = kind->find_parking(attempt->target, attempt->argument);
	if (!parking)
		return go_slow(attempt, error);
	if (must_yield(parking))
		step = YIELDED;
	iterator = step == YIELDED ? begin_yield(parking) : park(parking);
	if (iterator) {
		/* If it was PARKED before, it was woken for nothing. */
		parking->count += step == PARKED && attempt->step != PARKED;
		attempt->parking = parking;
	}
	return await_in(attempt, step, iterator);
}

/* Have Python wait for the end of the transfer, or raise the error with which it has ended. */
static int finish_in_python(struct attempt *attempt, struct transfer *transfer)
{
	return await_in(attempt, WAITING,
			PyObject_CallFunctionObjArgs(transfer->core->finish_transfer,
						     (PyObject *)transfer, NULL));
}

/* Wait for the end of a transfer, a new reference. */
static int wait_for(struct attempt *attempt, struct transfer *transfer)
{
	int result;

	Py_CLEAR(attempt->argument);
	if (transfer->core->polls_transfers) {
		result = finish_in_python(attempt, transfer);
		Py_DECREF((PyObject *)transfer);
		return result;
	}
	attempt->transfer = transfer;
	return await_in(attempt, TRANSFERRING, await_future(transfer->future));
}

/* The transfer's future was set. */
static int has_transferred(struct attempt *attempt)
{
	struct transfer *transfer = attempt->transfer;
	int result = 0;

	attempt->transfer = NULL;
	if (transfer->succeeded)
		attempt->result = Py_NewRef(Py_None);
	else
		result = finish_in_python(attempt, transfer);
	Py_DECREF((PyObject *)transfer);
	return result;
}

/* Call the function. Returns what it returns, but 0 if there is a coroutine to await, or -1. */
static inline int try_now(struct attempt *attempt, PyObject **result)
{
	int error = 0;
	int done = attempt->kind->function(attempt->target, attempt->argument, result, &error);

	if (done == STARTED_TRANSFER) {
		done = wait_for(attempt, (struct transfer *)*result);
		*result = NULL;
	} else if (!done) {
		done = wait(attempt, error);
	}
	return done;
}

/* Take the step that follows the current one. It ends with a coroutine to await, or the result. */
static int next_step(struct attempt *attempt)
{
	int done;

	if (attempt->step == LETTING_OTHERS_RUN || attempt->step == WAITING)
		return 0;
	done = try_now(attempt, &attempt->result);
	if (done <= 0)
		return done;
	if (attempt->checkpoints && attempt->step != PARKED && attempt->step != YIELDED)
		return await_half(attempt, LETTING_OTHERS_RUN, 1);
	return 0; /* other tasks have run since this one began to wait */
}

static int end_parking(struct attempt *attempt)
{
	struct parking *parking = attempt->parking;

	attempt->parking = NULL;
	if (attempt->step == YIELDED) {
		end_yield(parking);
		return 0;
	}
	unpark(parking);
	return note_parked(parking);
}

/* Note that the coroutine of the current step has returned `value`, a new reference. */
static int has_returned(struct attempt *attempt, PyObject *value)
{
	Py_CLEAR(attempt->coroutine);
	if (attempt->step == WAITING)
		attempt->result = value;
	else
		Py_DECREF(value);
	if (attempt->transfer)
		return has_transferred(attempt);
	if (attempt->parking && end_parking(attempt))
		return -1;
	return next_step(attempt);
}

/* Run coroutines until one of them waits, or the end. Returns as PyIter_Send() does. */
static PySendResult run(struct attempt *attempt, int failed, PyObject *value, PyObject **result)
{
	while (!failed && attempt->coroutine) {
		PySendResult sent = PyIter_Send(attempt->coroutine, value, result);

		if (sent == PYGEN_NEXT)
			return sent;
		failed = sent == PYGEN_ERROR || has_returned(attempt, *result);
		value = Py_None;
	}
	*result = failed ? NULL : attempt->result;
	if (!failed)
		attempt->result = NULL;
	end(attempt);
	return failed ? PYGEN_ERROR : PYGEN_RETURN;
}

/* Run it for the first time. Returns as PyIter_Send() does. */
static inline PySendResult begin(struct attempt *attempt, PyObject **result)
{
	int done;

	attempt->is_started = 1;
	if (attempt->checkpoints) {
		done = await_half(attempt, RAISING_IF_CANCELLED, 0);
	} else {
		done = try_now(attempt, result);
		if (done > 0) { /* the fast path */
			attempt->is_over = 1;
			drop_arguments(attempt);
			return PYGEN_RETURN;
		}
	}
	return run(attempt, done, Py_None, result);
}

/* Raise ValueError if it is running. Returns 0, or -1 with the exception. */
static inline int check_not_running(const struct attempt *attempt)
{
	if (!attempt->is_running)
		return 0;
	PyErr_SetString(PyExc_ValueError, "coroutine already executing");
	return -1;
}

/* Resume it. Returns as PyIter_Send() does. */
static PySendResult attempt_resume(PyObject *self, PyObject *value, PyObject **result)
{
	struct attempt *attempt = (struct attempt *)self;
	PySendResult sent;

	*result = NULL;
	if (check_not_running(attempt))
		return PYGEN_ERROR;
	if (attempt->is_over) {
		PyErr_SetString(PyExc_RuntimeError, "cannot reuse already awaited coroutine");
		return PYGEN_ERROR;
	}
	attempt->is_running = 1;
	sent = attempt->is_started ? run(attempt, 0, value, result) : begin(attempt, result);
	attempt->is_running = 0;
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

/* Return an attribute, or NULL: without an exception if there is none. A future has few of them. */
static PyObject *get_optional(PyObject *owner, const char *name)
{
	PyObject *method = PyObject_GetAttrString(owner, name);

	if (!method && PyErr_ExceptionMatches(PyExc_AttributeError))
		PyErr_Clear();
	return method;
}

/* Raise the exception that the arguments of throw() describe. */
static void raise_error(PyObject *args)
{
	PyObject *type, *value = NULL, *traceback = NULL;

	if (!PyArg_ParseTuple(args, "O|OO", &type, &value, &traceback))
		return;
	if (PyExceptionInstance_Check(type)) {
		value = type;
		type = (PyObject *)Py_TYPE(value);
	}
	if (PyExceptionClass_Check(type))
		PyErr_SetObject(type, value);
	else
		PyErr_SetString(PyExc_TypeError, "throw() takes an exception");
}

/* Return what a coroutine has returned that raised StopIteration; NULL for any other exception. */
static PyObject *take_return_value(void)
{
	PyObject *type, *exception, *traceback, *value;

	if (!PyErr_ExceptionMatches(PyExc_StopIteration))
		return NULL;
	PyErr_Fetch(&type, &exception, &traceback);
	PyErr_NormalizeException(&type, &exception, &traceback);
	value = PyObject_GetAttrString(exception, "value");
	Py_XDECREF(type);
	Py_XDECREF(exception);
	Py_XDECREF(traceback);
	return value;
}

/* Raise an exception in the coroutine of the current step, and go on. */
static PyObject *throw_into(struct attempt *attempt, PyObject *args)
{
	PyObject *method = get_optional(attempt->coroutine, "throw"), *value, *result = NULL;
	PySendResult sent;

	if (method)
		result = PyObject_CallObject(method, args);
	else if (!PyErr_Occurred())
		raise_error(args);
	Py_XDECREF(method);
	if (result)
		return result;
	value = take_return_value();
	sent = run(attempt, !value || has_returned(attempt, value), Py_None, &result);
	return as_method(sent, result);
}

/* An attempt that has not begun tries nothing any more: the new coroutine raises at once. */
static PyObject *attempt_throw(PyObject *self, PyObject *args)
{
	struct attempt *attempt = (struct attempt *)self;
	PyObject *result = NULL;

	if (check_not_running(attempt))
		return NULL;
	if (attempt->is_over) {
		PyErr_SetString(PyExc_RuntimeError, "cannot reuse already awaited coroutine");
		return NULL;
	}
	attempt->is_running = 1;
	if (!attempt->is_started && go_slow(attempt, 0))
		end(attempt);
	else
		result = throw_into(attempt, args);
	attempt->is_started = 1;
	attempt->is_running = 0;
	return result;
}

static PyObject *attempt_close(PyObject *self, PyObject *unused)
{
	struct attempt *attempt = (struct attempt *)self;
	PyObject *method = NULL, *result = NULL;

	if (check_not_running(attempt))
		return NULL;
	attempt->is_started = attempt->is_running = 1;
	if (attempt->coroutine)
		method = get_optional(attempt->coroutine, "close");
	if (method)
		result = PyObject_CallNoArgs(method);
	else if (!PyErr_Occurred())
		result = Py_NewRef(Py_None);
	Py_XDECREF(method);
	end(attempt);
	attempt->is_running = 0;
	return result;
}

static PyObject *attempt_name(PyObject *self, void *unused)
{
	return PyUnicode_FromString(((struct attempt *)self)->kind->name);
}

static PyObject *attempt_awaited(PyObject *self, void *unused)
{
	PyObject *coroutine = ((struct attempt *)self)->coroutine;

	return Py_NewRef(coroutine ? coroutine : Py_None);
}

/* Return the frame of the coroutine of Python; None if there is none yet, or none any more. */
static PyObject *attempt_frame(PyObject *self, void *unused)
{
	PyObject *coroutine = ((struct attempt *)self)->coroutine, *frame = NULL;

	if (coroutine)
		frame = get_optional(coroutine, "cr_frame");
	return frame || PyErr_Occurred() ? frame : Py_NewRef(Py_None);
}

static PyGetSetDef attempt_getset[] = {
	{ "__name__", attempt_name, NULL, "The name of the method that made it.", NULL },
	{ "__qualname__", attempt_name, NULL, "The name of the method that made it.", NULL },
	{ "cr_await", attempt_awaited, NULL, "The coroutine that it waits for, or None.", NULL },
	{ "cr_frame", attempt_frame, NULL, "The frame of that coroutine.", NULL },
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
