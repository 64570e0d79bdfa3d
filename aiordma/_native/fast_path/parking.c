/* Parking: a task waits for what arrives, without a coroutine of Python. */
#include "fast_path.h"

/* Return an iterator for a task to await, which ends when the future is done. */
PyObject *await_future(PyObject *future)
{
	unaryfunc await = (unaryfunc)PyType_GetSlot(Py_TYPE(future), Py_am_await);

	if (await)
		return await(future);
	PyErr_SetString(PyExc_TypeError, "a future must be awaitable");
	return NULL;
}

/*
 * Begin to wait. Returns an iterator for the task to await, which ends when the waiter is woken, or
 * NULL with an exception. The caller calls unpark() at the end.
 */
PyObject *park(struct parking *parking)
{
	PyObject *future = make_future(parking->make_future), *iterator;

	if (!future)
		return NULL;
	iterator = await_future(future);
	if (iterator) {
		replace(&parking->waiter, future);
		parking->has_waiter = 1;
		parking->parked_at = (long long)now_ns();
	}
	Py_DECREF(future);
	return iterator;
}

/* Move the waiter, if there is one, to the list `woken`. Returns 0, or -1 with an exception. */
int collect_waiter(struct parking *parking, PyObject *woken)
{
	if (!parking->waiter || parking->waiter == Py_None)
		return 0;
	if (PyList_Append(woken, parking->waiter))
		return -1;
	parking->woken_at = (long long)now_ns();
	Py_CLEAR(parking->waiter);
	return 0;
}

/* Wake the waiter, if there is one. */
void wake_waiter(struct parking *parking)
{
	PyObject *future = parking->waiter;

	if (!future || future == Py_None)
		return;
	parking->waiter = NULL;
	parking->woken_at = (long long)now_ns();
	wake(future);
	Py_DECREF(future);
}

/* The task waits no more: it was woken, or it was cancelled. */
void unpark(struct parking *parking)
{
	parking->has_waiter = 0;
	Py_CLEAR(parking->waiter);
}

/* Note a poll before parking. One that other work has ended is noted by the slow path. */
void note_polled(struct parking *parking, const struct polling *polling, int found)
{
	if (parking->policy && (found || (polling->budget > 0 && !polling->preempted)))
		note_poll(parking->policy, found);
}

/* Note the duration of a wait that has ended with a wake-up. Returns 0, or -1 with an exception. */
int note_parked(struct parking *parking)
{
	if (!parking->policy)
		return 0;
	return note_wait(parking->policy, parking->parked_at, parking->woken_at,
			 (long long)now_ns());
}

/* True if a task may park now. Otherwise it waits in Python. */
int may_park(const struct parking *parking, const struct polling *polling)
{
	return parking->is_allowed && !parking->has_waiter && parking->make_future &&
	       !is_forked_child && !(polling->budget > 0 && polling->preempted);
}

PyObject *set_parking(PyObject *self, struct parking *parking, PyObject *args)
{
	PyObject *make_future, *policy;

	if (!PyArg_ParseTuple(args, "OO", &make_future, &policy) ||
	    (policy != Py_None && !is_instance(self, "AdaptivePolling", policy)))
		return NULL;
	Py_CLEAR(parking->make_future);
	Py_CLEAR(parking->policy);
	if (make_future != Py_None)
		parking->make_future = Py_NewRef(make_future);
	if (policy != Py_None)
		parking->policy = (struct adaptive_polling *)Py_NewRef(policy);
	Py_RETURN_NONE;
}

int visit_parking(struct parking *parking, visitproc visit, void *arg)
{
	Py_VISIT(parking->make_future);
	Py_VISIT((PyObject *)parking->policy);
	Py_VISIT(parking->waiter);
	return 0;
}

void clear_parking(struct parking *parking)
{
	Py_CLEAR(parking->make_future);
	Py_CLEAR(parking->policy);
	Py_CLEAR(parking->waiter);
}
