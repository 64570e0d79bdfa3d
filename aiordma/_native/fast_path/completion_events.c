/* Completion events: reading them, and arming the queues again. */
#include "fast_path.h"

/* A loop that never waits has its queues armed after this number of iterations. */
#define MAX_UNARMED_ITERATIONS 4
/* The most batches of completions that one call of the loop takes, so that other callbacks run. */
#define MAX_BATCHES_PER_CALL 8

PyTypeObject *polled_queue_type;

/* Report that a function has failed. Returns 0, or -1 with an exception. */
static int report(struct completion_dispatcher *self, int error, const char *function)
{
	PyObject *result;

	if (!self->on_failure)
		return 0;
	result = PyObject_CallFunction(self->on_failure, "is", error, function);
	Py_XDECREF(result);
	return result ? 0 : -1;
}

static int has_work(const struct completion_dispatcher *self)
{
	return self->ended.first || self->pending || PyList_Size(self->woken) > 0 ||
	       PyList_Size(self->notified) > 0;
}

/*
 * Take a batch of completions. If `is_last`, have on_full() take more if there might be more. Then
 * run the tasks that were woken. Returns 1 if there were completions, 0 if there were none, or -1
 * with an exception.
 */
static int take_and_wake(struct completion_dispatcher *self, struct polled_queue *queue,
			 int is_last)
{
	struct failure failure = { NULL, NULL, NULL };
	int started, count = 0;

	if (self->is_dispatching)
		return 0;
	if (self->is_reading && queue->cq)
		count = ibv_poll_cq(queue->cq, BATCH, self->batch);
	if (!count && !has_work(self))
		return 0;
	started = begin_wakeups() > 0;
	note_failure(&failure); /* without memory, the tasks run in the loop's next iteration */
	take_batch(self, count);
	note_failure(&failure);
	if (count < 0)
		report(self, -count, "ibv_poll_cq");
	else if (count == BATCH && is_last && self->on_full)
		Py_XDECREF(PyObject_CallFunctionObjArgs(self->on_full, (PyObject *)queue, NULL));
	note_failure(&failure);
	if (started)
		run_wakeups();
	note_failure(&failure);
	return restore_failure(&failure) ? -1 : count > 0;
}

/*
 * Take batches while there are completions. The tasks that one batch wakes often post requests that
 * have completed when they return, above all on a soft device. An event and an iteration of the
 * loop for each of these would cost more than to poll once more.
 */
static void take_all_and_wake(struct completion_dispatcher *self, struct polled_queue *queue)
{
	int batches = 0;

	while (take_and_wake(self, queue, 0) > 0 && ++batches < MAX_BATCHES_PER_CALL)
		;
}

static int arm_again(struct completion_dispatcher *self, struct polled_queue *queue)
{
	int error;

	self->took_some = 0;
	if (!self->is_reading || queue->pollers || queue->is_armed || !queue->cq)
		return 0;
	error = abs(ibv_req_notify_cq(queue->cq, 0));
	if (error)
		return report(self, error, "ibv_req_notify_cq");
	queue->is_armed = 1;
	return take_and_wake(self, queue, 1) < 0 ? -1 : 0;
}

/*
 * Arm the queue before the loop waits, or now. A loop that runs an iteration for each message, as
 * trio does, would otherwise handle an event for each message that polling has found.
 */
static int arm_soon(struct completion_dispatcher *self, struct polled_queue *queue)
{
	if (!self->on_wait || self->on_wait == Py_None)
		return arm_again(self, queue);
	self->has_unarmed = 1;
	self->unarmed_iterations = 0;
	return 0;
}

PyObject *completion_dispatcher_watch(PyObject *self, PyObject *address)
{
	struct completion_dispatcher *dispatcher = (struct completion_dispatcher *)self;

	dispatcher->channel =
		(struct ibv_comp_channel *)(uintptr_t)PyLong_AsUnsignedLongLong(address);
	dispatcher->is_reading = dispatcher->channel && !PyErr_Occurred();
	return none_unless(PyErr_Occurred() != NULL);
}

/* Return a new reference to the queue of an event, or NULL. */
static struct polled_queue *find_queue(struct completion_dispatcher *self, struct ibv_cq *cq)
{
	PyObject *address = PyLong_FromUnsignedLongLong((uintptr_t)cq), *found = NULL;

	if (address)
		found = PyDict_GetItemWithError(self->queues, address);
	Py_XDECREF(address);
	if (!found || !PyObject_TypeCheck(found, polled_queue_type))
		return NULL;
	return (struct polled_queue *)Py_NewRef(found);
}

/* Return a new reference to the queue, if there is exactly one; else NULL. */
static struct polled_queue *only_queue(struct completion_dispatcher *self)
{
	PyObject *key, *found;
	Py_ssize_t position = 0;

	if (PyDict_Size(self->queues) != 1 || !PyDict_Next(self->queues, &position, &key, &found) ||
	    !PyObject_TypeCheck(found, polled_queue_type))
		return NULL;
	return (struct polled_queue *)Py_NewRef(found);
}

/* Read and acknowledge an event. Returns a new reference to its queue, or NULL. */
static struct polled_queue *read_event(struct completion_dispatcher *self)
{
	struct polled_queue *queue;
	struct ibv_cq *cq;
	int error;

	if (!self->is_reading)
		return NULL;
	do
		error = comp_event(self->channel, &cq);
	while (error == EINTR);
	if (error == EAGAIN || error == EWOULDBLOCK)
		return NULL;
	if (error) {
		report(self, error, "ibv_get_cq_event");
		return NULL;
	}
	queue = find_queue(self, cq);
	if (queue)
		queue->is_armed = 0;
	return queue;
}

/*
 * The descriptor of the channel is readable. First come the completions and the tasks that wait for
 * them. Reading the event and arming the queue are less urgent: the tasks might have an answer for
 * the peer. If there are several queues, the event says which one has completions.
 */
PyObject *completion_dispatcher_handle_event(PyObject *self, PyObject *unused)
{
	struct completion_dispatcher *dispatcher = (struct completion_dispatcher *)self;
	struct polled_queue *polled, *queue;
	struct failure failure = { NULL, NULL, NULL };

	dispatcher->last_event_at = now_ns();
	if (!dispatcher->is_reading)
		Py_RETURN_NONE;
	Py_INCREF(self);
	polled = only_queue(dispatcher);
	if (polled)
		take_all_and_wake(dispatcher, polled);
	note_failure(&failure);
	queue = read_event(dispatcher);
	note_failure(&failure);
	if (queue && queue != polled)
		take_all_and_wake(dispatcher, queue);
	note_failure(&failure);
	if (queue)
		arm_soon(dispatcher, queue);
	note_failure(&failure);
	Py_XDECREF((PyObject *)polled);
	Py_XDECREF((PyObject *)queue);
	Py_DECREF(self);
	return none_unless(restore_failure(&failure));
}

PyObject *completion_dispatcher_arm_again(PyObject *self, PyObject *queue)
{
	if (!is_instance(polled_queue_type, queue))
		return NULL;
	if (arm_again((struct completion_dispatcher *)self, (struct polled_queue *)queue))
		return NULL;
	return PyBool_FromLong(((struct completion_dispatcher *)self)->took_some);
}

/* A loop that is never idle must get its events, too: after some iterations without a completion.
 */
PyObject *completion_dispatcher_before_wait(PyObject *self, PyObject *timeout)
{
	struct completion_dispatcher *dispatcher = (struct completion_dispatcher *)self;
	double seconds = PyFloat_AsDouble(timeout);

	if (seconds < 0 && PyErr_Occurred())
		return NULL;
	if (!dispatcher->has_unarmed)
		Py_RETURN_NONE;
	if (seconds <= 0 && ++dispatcher->unarmed_iterations < MAX_UNARMED_ITERATIONS)
		Py_RETURN_NONE;
	dispatcher->has_unarmed = 0;
	if (!dispatcher->on_wait || dispatcher->on_wait == Py_None)
		Py_RETURN_NONE;
	return PyObject_CallNoArgs(dispatcher->on_wait);
}

/* --- PolledQueue --- */

static int polled_queue_init(PyObject *self, PyObject *args, PyObject *kwargs)
{
	return PyArg_ParseTuple(args, "") ? 0 : -1;
}

static PyObject *polled_queue_open(PyObject *self, PyObject *address)
{
	((struct polled_queue *)self)->cq =
		(struct ibv_cq *)(uintptr_t)PyLong_AsUnsignedLongLong(address);
	return none_unless(PyErr_Occurred() != NULL);
}

static PyMemberDef polled_queue_members[] = {
	{ "pollers", T_INT, offsetof(struct polled_queue, pollers), 0,
	  "The number of tasks that poll the queue. They need no event." },
	{ "is_armed", T_BOOL, offsetof(struct polled_queue, is_armed), 0,
	  "True if the next completion raises an event." },
	{ NULL, 0, 0, 0, NULL },
};

static PyMethodDef polled_queue_methods[] = {
	{ "_open", polled_queue_open, METH_O,
	  "_open(address): use the completion queue at this address. 0: it is destroyed." },
	{ NULL, NULL, 0, NULL },
};

static PyType_Slot polled_queue_slots[] = {
	{ Py_tp_doc, (void *)"PolledQueue(): a completion queue whose events the loop handles." },
	{ Py_tp_new, PyType_GenericNew },
	{ Py_tp_init, polled_queue_init },
	{ Py_tp_dealloc, simple_dealloc },
	{ Py_tp_members, polled_queue_members },
	{ Py_tp_methods, polled_queue_methods },
	{ 0, NULL },
};

PyType_Spec polled_queue_spec = {
	.name = "aiordma._native._fast_path.PolledQueue",
	.basicsize = sizeof(struct polled_queue),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
	.slots = polled_queue_slots,
};
