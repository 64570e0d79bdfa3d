/*
 * WaitQueue: a queue of tasks that wait for a change of some state. Each checks the state when
 * woken.
 *
 * A wake-up carries no data, so nothing is lost if a task is cancelled after it was woken.
 */
#include "fast_path.h"

/* With fewer futures than this, those that are done are kept. */
#define KEPT 8

struct wait_queue {
	PyObject_HEAD PyObject *loop;
	PyObject *futures; /* a list: one for each task, and some that are done */
	Py_ssize_t limit;  /* the number of futures at which those that are done are removed */
	long long woken_at;
};

static PyObject *queue_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
	struct wait_queue *queue;
	PyObject *loop;

	if (!PyArg_ParseTuple(args, "O", &loop))
		return NULL;
	queue = (struct wait_queue *)PyType_GenericAlloc(type, 0);
	if (!queue)
		return NULL;
	queue->loop = Py_NewRef(loop);
	queue->limit = KEPT;
	return (PyObject *)queue;
}

static int queue_traverse(PyObject *self, visitproc visit, void *arg)
{
	Py_VISIT(Py_TYPE(self));
	Py_VISIT(((struct wait_queue *)self)->loop);
	Py_VISIT(((struct wait_queue *)self)->futures);
	return 0;
}

static int queue_clear(PyObject *self)
{
	Py_CLEAR(((struct wait_queue *)self)->loop);
	Py_CLEAR(((struct wait_queue *)self)->futures);
	return 0;
}

static void queue_dealloc(PyObject *self)
{
	PyObject_GC_UnTrack(self);
	queue_clear(self);
	simple_dealloc(self);
}

/* Return a list of the futures that are not done. NULL with an exception. */
static PyObject *waiting(const struct wait_queue *queue)
{
	Py_ssize_t index, count = queue->futures ? PyList_Size(queue->futures) : 0;
	PyObject *found = PyList_New(0), *future;
	int done;

	for (index = 0; found && index < count; index++) {
		future = PyList_GetItem(queue->futures, index);
		done = is_done(future);
		if (done < 0 || (!done && PyList_Append(found, future)))
			Py_CLEAR(found);
	}
	return found;
}

/* Remove the futures that are done, if there are many. Returns 0, or -1 with an exception. */
static int limit_futures(struct wait_queue *queue)
{
	PyObject *futures;

	if (PyList_Size(queue->futures) < queue->limit)
		return 0;
	futures = waiting(queue);
	if (!futures)
		return -1;
	queue->limit = KEPT + 2 * PyList_Size(futures);
	replace(&queue->futures, futures);
	Py_DECREF(futures);
	return 0;
}

static PyObject *queue_wait(PyObject *self, PyObject *unused)
{
	struct wait_queue *queue = (struct wait_queue *)self;
	PyObject *future;

	if (!queue->futures)
		queue->futures = PyList_New(0);
	if (!queue->futures || limit_futures(queue))
		return NULL;
	future = make_future_of(NULL, queue->loop);
	if (future && PyList_Append(queue->futures, future))
		Py_CLEAR(future);
	return future;
}

static PyObject *queue_wake_all(PyObject *self, PyObject *unused)
{
	struct wait_queue *queue = (struct wait_queue *)self;
	struct failure failure = { NULL, NULL, NULL };
	PyObject *futures = queue->futures;
	Py_ssize_t index;

	if (!futures)
		Py_RETURN_NONE;
	queue->futures = NULL;
	queue->woken_at = (long long)now_ns();
	for (index = 0; index < PyList_Size(futures); index++) {
		wake(PyList_GetItem(futures, index));
		note_failure(&failure);
	}
	Py_DECREF(futures);
	return none_unless(restore_failure(&failure));
}

static Py_ssize_t queue_length(PyObject *self)
{
	PyObject *futures = waiting((struct wait_queue *)self);
	Py_ssize_t length = futures ? PyList_Size(futures) : -1;

	Py_XDECREF(futures);
	return length;
}

static PyMemberDef queue_members[] = {
	{ "woken_at", T_LONGLONG, offsetof(struct wait_queue, woken_at), 0,
	  "time.monotonic_ns() when tasks were woken last." },
	{ NULL, 0, 0, 0, NULL },
};

static PyMethodDef queue_methods[] = {
	{ "wait", queue_wait, METH_NOARGS,
	  "Return an object to be awaited at once: it waits for the next wake_all(). Cancelling "
	  "takes the task out of the queue." },
	{ "wake_all", queue_wake_all, METH_NOARGS, "Wake every task that waits now." },
	{ NULL, NULL, 0, NULL },
};

static PyType_Slot queue_slots[] = {
	{ Py_tp_doc, (void *)"WaitQueue(loop): a queue of tasks that wait for a change." },
	{ Py_tp_new, queue_new },
	{ Py_tp_traverse, queue_traverse },
	{ Py_tp_clear, queue_clear },
	{ Py_tp_dealloc, queue_dealloc },
	{ Py_tp_members, queue_members },
	{ Py_tp_methods, queue_methods },
	{ Py_sq_length, queue_length },
	{ 0, NULL },
};

PyType_Spec wait_queue_spec = {
	.name = "aiordma._native._fast_path.WaitQueue",
	.basicsize = sizeof(struct wait_queue),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
	.slots = queue_slots,
};
