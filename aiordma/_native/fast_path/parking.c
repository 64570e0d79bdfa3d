/*
 * Parking: a task waits for what arrives, without a coroutine of Python. It polls first, if that
 * pays. When the loop or another task has work meanwhile, it lets the loop run, and polls again.
 */
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
 * True if the task lets the loop run, and then goes on with the poll that was preempted. For
 * another task that spends a hit of the policy, see may_go_on(). Without one, the poll is noted as
 * a miss.
 */
int must_yield(struct parking *parking)
{
	const struct polling *polling = &parking->polling;

	if (!polling->preempted || polling->budget <= 0 || !parking->yield_to_loop ||
	    !parking->policy)
		return 0;
	if (may_go_on(parking->policy, polling->preempted))
		return 1;
	note_poll(parking->policy, 0);
	return 0;
}

/*
 * Let the loop run. Returns an awaitable, or NULL with an exception. The caller calls end_yield()
 * at the end, or unpark() if the task was cancelled.
 */
PyObject *begin_yield(struct parking *parking)
{
	struct polling *polling = &parking->polling;
	PyObject *awaitable = PyObject_CallNoArgs(parking->yield_to_loop);

	if (awaitable) {
		parking->has_waiter = 1;
		polling->left = polling->unused;
		polling->yield.began = (long long)now_ns();
		if (polling->dispatcher) {
			polling->polled = polling->dispatcher->polled;
			polling->yield.budget_start = polling->dispatcher->budget_start;
		}
	}
	return awaitable;
}

/* The loop has run: the next poll goes on with the last one. */
void end_yield(struct parking *parking)
{
	struct polling *polling = &parking->polling;

	parking->has_waiter = 0;
	if (polling->dispatcher)
		end_loop_yield(polling->dispatcher, &polling->yield, (long long)now_ns());
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

/*
 * There is something for the task that waits, if one does. Have a parked task woken after the
 * batch. Nothing wakes a task that is between two polls: it looks again when the loop has run. So
 * have the poll of another task end. Returns 0, or -1 with an exception.
 */
int serve_waiter(struct parking *parking, struct completion_dispatcher *dispatcher)
{
	int is_parked = parking->waiter && parking->waiter != Py_None;

	if (!is_parked) {
		dispatcher->served_poller |= parking->has_waiter;
		return 0;
	}
	if (PyList_Append(dispatcher->woken, parking->waiter))
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
	parking->polling.left = 0;
	Py_CLEAR(parking->waiter);
}

/* Note a poll before parking. must_yield() notes one that was preempted. */
void note_polled(struct parking *parking, int found)
{
	const struct polling *polling = &parking->polling;

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
int may_park(const struct parking *parking)
{
	return parking->is_allowed && !parking->has_waiter && parking->make_future &&
	       !is_forked_child;
}

/* Replace the object there, or clear it if the new one is None. */
static void replace_or_clear(PyObject **where, PyObject *what)
{
	PyObject *before = *where;

	*where = what == Py_None ? NULL : Py_NewRef(what);
	Py_XDECREF(before);
}

PyObject *set_parking(PyObject *self, struct parking *parking, PyObject *args)
{
	PyObject *make_future, *yield_to_loop, *policy;

	if (!PyArg_ParseTuple(args, "OOO", &make_future, &yield_to_loop, &policy) ||
	    (policy != Py_None && !is_instance(adaptive_polling_type, policy)))
		return NULL;
	replace_or_clear(&parking->make_future, make_future);
	replace_or_clear(&parking->yield_to_loop, yield_to_loop);
	replace_or_clear((PyObject **)&parking->policy, policy);
	Py_RETURN_NONE;
}

int visit_parking(struct parking *parking, visitproc visit, void *arg)
{
	Py_VISIT(parking->polling.dispatcher);
	Py_VISIT(parking->make_future);
	Py_VISIT(parking->yield_to_loop);
	Py_VISIT((PyObject *)parking->policy);
	Py_VISIT(parking->waiter);
	return 0;
}

void clear_parking(struct parking *parking)
{
	Py_CLEAR(parking->polling.dispatcher);
	Py_CLEAR(parking->make_future);
	Py_CLEAR(parking->yield_to_loop);
	Py_CLEAR(parking->policy);
	Py_CLEAR(parking->waiter);
}
