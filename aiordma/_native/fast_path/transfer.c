/* Transfer: a posted request on registered memory in one piece. */
#include "fast_path.h"

PyTypeObject *transfer_type;

/* --- lists --- */

/* Append to the list, which gets a new reference. */
void append_transfer(struct transfers *list, struct transfer *transfer)
{
	Py_INCREF((PyObject *)transfer);
	transfer->next = NULL;
	transfer->previous = list->last;
	if (list->last)
		list->last->next = transfer;
	else
		list->first = transfer;
	list->last = transfer;
	list->count++;
}

/* Remove from the list. The caller gets the list's reference. */
struct transfer *unlink_transfer(struct transfers *list, struct transfer *transfer)
{
	if (transfer->previous)
		transfer->previous->next = transfer->next;
	else
		list->first = transfer->next;
	if (transfer->next)
		transfer->next->previous = transfer->previous;
	else
		list->last = transfer->previous;
	transfer->next = transfer->previous = NULL;
	transfer->queued = 0;
	list->count--;
	return transfer;
}

/* Return the transfer with this number, or NULL. */
struct transfer *find_transfer(const struct transfers *list, unsigned int number)
{
	struct transfer *transfer = list->first;

	while (transfer && transfer->number != number)
		transfer = transfer->next;
	return transfer;
}

int visit_transfers(const struct transfers *list, visitproc visit, void *arg)
{
	struct transfer *transfer;

	for (transfer = list->first; transfer; transfer = transfer->next)
		Py_VISIT((PyObject *)transfer);
	return 0;
}

void clear_transfers(struct transfers *list)
{
	while (list->first)
		Py_DECREF((PyObject *)unlink_transfer(list, list->first));
}

/* --- completion --- */

/* Store the current exception, if there is one. Only the first one is kept. */
void note_failure(struct failure *failure)
{
	if (!PyErr_Occurred())
		return;
	if (failure->type)
		PyErr_Clear();
	else
		PyErr_Fetch(&failure->type, &failure->value, &failure->traceback);
}

/* Raise the stored exception. Returns -1 if there is one, else 0. */
int restore_failure(struct failure *failure)
{
	if (!failure->type)
		return 0;
	PyErr_Restore(failure->type, failure->value, failure->traceback);
	return -1;
}

/* Wake the waiter. Returns 0, or -1 with an exception. */
int stop_waiting(struct transfer *transfer)
{
	transfer->over = 1;
	wake(transfer->future);
	return PyErr_Occurred() ? -1 : 0;
}

/*
 * Release the memory and wake the waiter: the request has ended, or was never posted.
 * Returns 0, or -1 with an exception.
 */
int release_transfer(struct transfer *transfer)
{
	struct failure failure = { NULL, NULL, NULL };
	PyObject *call = transfer->on_abandoned_end;

	if (transfer->references) {
		struct reference_count *references = transfer->references;

		transfer->references = NULL;
		release_reference(references);
		note_failure(&failure);
		Py_DECREF((PyObject *)references);
		Py_CLEAR(transfer->memory);
	}
	if (call) {
		transfer->on_abandoned_end = NULL;
		Py_XDECREF(PyObject_CallNoArgs(call));
		note_failure(&failure);
		Py_DECREF(call);
	}
	stop_waiting(transfer);
	note_failure(&failure);
	return restore_failure(&failure);
}

/* Release all transfers of a list, and empty it. Returns 0, or -1 with an exception. */
int release_transfers(struct transfers *list)
{
	struct failure failure = { NULL, NULL, NULL };

	while (list->first) {
		struct transfer *transfer = unlink_transfer(list, list->first);

		release_transfer(transfer);
		note_failure(&failure);
		Py_DECREF((PyObject *)transfer);
	}
	return restore_failure(&failure);
}

/* --- the type --- */

static int transfer_traverse(PyObject *self, visitproc visit, void *arg)
{
	struct transfer *transfer = (struct transfer *)self;

	Py_VISIT(Py_TYPE(self));
	Py_VISIT((PyObject *)transfer->core);
	Py_VISIT((PyObject *)transfer->references);
	Py_VISIT(transfer->memory);
	Py_VISIT(transfer->future);
	Py_VISIT(transfer->on_abandoned_end);
	return 0;
}

static int transfer_clear(PyObject *self)
{
	struct transfer *transfer = (struct transfer *)self;

	Py_CLEAR(transfer->core);
	Py_CLEAR(transfer->references);
	Py_CLEAR(transfer->memory);
	Py_CLEAR(transfer->on_abandoned_end);
	return 0;
}

static void transfer_dealloc(PyObject *self)
{
	PyObject_GC_UnTrack(self);
	transfer_clear(self);
	Py_CLEAR(((struct transfer *)self)->future);
	simple_dealloc(self);
}

static PyObject *transfer_is_over(PyObject *self, PyObject *unused)
{
	return PyBool_FromLong(((struct transfer *)self)->over);
}

static PyObject *transfer_withdraw(PyObject *self, PyObject *unused)
{
	struct transfer *transfer = (struct transfer *)self;

	if (!transfer->queued)
		Py_RETURN_FALSE;
	if (withdraw_read(transfer))
		return NULL;
	Py_RETURN_TRUE;
}

static PyMemberDef transfer_members[] = {
	{ "future", T_OBJECT_EX, offsetof(struct transfer, future), READONLY,
	  "Set when the transfer is over. Cancelling it does not stop the device." },
	{ "opcode", T_INT, offsetof(struct transfer, opcode), READONLY, "WrOpcode." },
	{ "is_read", T_BOOL, offsetof(struct transfer, is_read), READONLY,
	  "True for a read: later requests can overtake it at the peer." },
	{ "succeeded", T_BOOL, offsetof(struct transfer, succeeded), READONLY,
	  "True if the device has completed it without an error." },
	{ "error", T_INT, offsetof(struct transfer, error), READONLY,
	  "The errno with which the device refused it, or 0." },
	{ "on_abandoned_end", T_OBJECT, offsetof(struct transfer, on_abandoned_end), 0,
	  "Called at the end of a transfer whose waiter was cancelled." },
	{ NULL, 0, 0, 0, NULL },
};

static PyMethodDef transfer_methods[] = {
	{ "is_over", transfer_is_over, METH_NOARGS, "Return True if the waiter can go on." },
	{ "withdraw", transfer_withdraw, METH_NOARGS,
	  "Drop the transfer if it is not posted yet. Return True if it was dropped." },
	{ NULL, NULL, 0, NULL },
};

static PyType_Slot transfer_slots[] = {
	{ Py_tp_doc, (void *)"A request on registered memory in one piece: see "
			     "SendQueueCore.start_transfer()." },
	{ Py_tp_traverse, transfer_traverse },
	{ Py_tp_clear, transfer_clear },
	{ Py_tp_dealloc, transfer_dealloc },
	{ Py_tp_members, transfer_members },
	{ Py_tp_methods, transfer_methods },
	{ 0, NULL },
};

PyType_Spec transfer_spec = {
	.name = "aiordma._native._fast_path.Transfer",
	.basicsize = sizeof(struct transfer),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
	.slots = transfer_slots,
};
