/* SendQueueCore: the state of one send queue. */
#include "fast_path.h"

static int send_queue_core_init(PyObject *self, PyObject *args, PyObject *kwargs)
{
	struct send_queue_core *core = (struct send_queue_core *)self;

	return PyArg_ParseTuple(args, "Lii", &core->credits, &core->signal_interval,
				&core->max_inline) ?
		       0 :
		       -1;
}

static int send_queue_core_traverse(PyObject *self, visitproc visit, void *arg)
{
	struct send_queue_core *core = (struct send_queue_core *)self;
	int result;

	Py_VISIT(Py_TYPE(self));
	Py_VISIT(core->keeper);
	Py_VISIT(core->polling.dispatcher);
	Py_VISIT(core->make_future);
	Py_VISIT(core->pd);
	Py_VISIT(core->should_batch);
	Py_VISIT(core->on_rd_atomic_credit);
	Py_VISIT(core->chain_keeper);
	result = visit_transfers(&core->transfers_in_flight, visit, arg);
	return result ? result : visit_transfers(&core->queued_reads, visit, arg);
}

static int send_queue_core_clear(PyObject *self)
{
	struct send_queue_core *core = (struct send_queue_core *)self;

	Py_CLEAR(core->polling.dispatcher);
	Py_CLEAR(core->make_future);
	Py_CLEAR(core->pd);
	Py_CLEAR(core->should_batch);
	Py_CLEAR(core->on_rd_atomic_credit);
	core->chain = NULL;
	Py_CLEAR(core->chain_keeper);
	core->qp = NULL;
	Py_CLEAR(core->keeper);
	clear_transfers(&core->transfers_in_flight);
	clear_transfers(&core->queued_reads);
	return 0;
}

static void send_queue_core_dealloc(PyObject *self)
{
	PyObject_GC_UnTrack(self);
	send_queue_core_clear(self);
	simple_dealloc(self);
}

static PyObject *send_queue_core_set_polling(PyObject *self, PyObject *args)
{
	return set_polling(self, &((struct send_queue_core *)self)->polling, args);
}

static PyObject *send_queue_core_resumed(PyObject *self, PyObject *unused)
{
	start_budget(&((struct send_queue_core *)self)->polling);
	Py_RETURN_NONE;
}

static int has_credit(const void *core)
{
	return ((const struct send_queue_core *)core)->credits > 0;
}

static PyObject *send_queue_core_open(PyObject *self, PyObject *args)
{
	struct send_queue_core *core = (struct send_queue_core *)self;
	unsigned long long cell, first_wr_id;
	PyObject *keeper;

	if (!PyArg_ParseTuple(args, "OKK", &keeper, &cell, &first_wr_id))
		return NULL;
	replace(&core->keeper, keeper);
	core->qp = (struct ibv_qp **)(uintptr_t)cell;
	core->first_wr_id = first_wr_id;
	core->is_open = 1;
	Py_RETURN_NONE;
}

struct send_queue_mark mark_send_queue(const struct send_queue_core *core)
{
	return (struct send_queue_mark){ core->next_number, core->unsignaled, core->credits };
}

/*
 * Give a request the next number, and take a credit for it. It is signaled if its completion is
 * needed, or if the requests before it were not.
 */
void commit_request(struct send_queue_core *core, struct ibv_send_wr *wr, int needs_completion)
{
	int is_signaled = needs_completion || core->unsignaled + 1 >= core->signal_interval;

	wr->wr_id = core->first_wr_id + core->next_number;
	wr->send_flags |= core->fence_flags | (is_signaled ? IBV_SEND_SIGNALED : 0);
	core->next_number = (core->next_number + 1) & NUMBER_MASK;
	core->unsignaled = is_signaled ? 0 : core->unsignaled + 1;
	core->credits--;
}

/* Undo commit_request() for all requests after the mark: the device has refused them. */
void roll_back_requests(struct send_queue_core *core, struct send_queue_mark mark)
{
	core->next_number = mark.next_number;
	core->unsignaled = mark.unsignaled;
	core->credits = mark.credits;
}

/*
 * Post requests that are linked by `next`. If they are large, another thread can run Python code
 * meanwhile: a soft device might do all of its work in this call. Returns 0 or an errno.
 */
int post_requests(struct send_queue_core *core, struct ibv_send_wr *first, int is_large)
{
	int error;

	if (!is_large)
		return post_all(core->qp, first);
	Py_BEGIN_ALLOW_THREADS
	error = post_all(core->qp, first);
	Py_END_ALLOW_THREADS
	return error;
}

static int post_inline(struct send_queue_core *core, char *data, Py_ssize_t length)
{
	int is_signaled = core->unsignaled + 1 >= core->signal_interval;
	struct ibv_sge sge = { .addr = (uintptr_t)data, .length = (uint32_t)length };
	struct ibv_send_wr *bad, wr = {
		.wr_id = core->first_wr_id + core->next_number,
		.sg_list = &sge,
		.num_sge = length ? 1 : 0,
		.opcode = IBV_WR_SEND,
		.send_flags =
			core->fence_flags | IBV_SEND_INLINE | (is_signaled ? IBV_SEND_SIGNALED : 0),
	};
	int error;

	errno = 0;
	error = positive(ibv_post_send(*core->qp, &wr, &bad));
	if (error)
		return error;
	core->next_number = (core->next_number + 1) & NUMBER_MASK;
	core->unsignaled = is_signaled ? 0 : core->unsignaled + 1;
	core->credits--;
	core->messages++;
	core->nbytes += length;
	return 0;
}

static PyObject *send_queue_core_send(PyObject *self, PyObject *data)
{
	struct send_queue_core *core = (struct send_queue_core *)self;
	Py_ssize_t length;
	int error;

	if (!PyBytes_CheckExact(data) || !core->is_open || is_forked_child)
		return PyLong_FromLong(-1);
	length = PyBytes_Size(data);
	if (length > core->max_inline || core->waiters || core->batching || core->has_unposted)
		return PyLong_FromLong(-1);
	if (core->credits <= 0 && poll_within_budget(&core->polling, has_credit, core))
		return NULL;
	/* Polling runs callbacks, which might have closed or destroyed the queue. */
	if (core->credits <= 0 || !core->is_open || !core->qp || !*core->qp)
		return PyLong_FromLong(-1);
	error = post_inline(core, PyBytes_AsString(data), length);
	/* False equals 0, and Python tests it faster than an int. */
	return error ? PyLong_FromLong(error) : Py_NewRef(Py_False);
}

/*
 * Count all requests up to this number as completed. If a completion of a later request was counted
 * before, nothing changes.
 */
void complete_sends(struct send_queue_core *core, unsigned int number)
{
	unsigned int count = (number + 1 - core->oldest_pending) & NUMBER_MASK;

	if (count <= ((core->next_number - core->oldest_pending) & NUMBER_MASK)) {
		core->oldest_pending = (number + 1) & NUMBER_MASK;
		core->credits += count;
	}
}

static PyObject *send_queue_core_completed(PyObject *self, PyObject *number)
{
	unsigned long value = PyLong_AsUnsignedLong(number);

	if (PyErr_Occurred())
		return NULL;
	complete_sends((struct send_queue_core *)self, value);
	Py_RETURN_NONE;
}

static PyObject *send_queue_core_set_chain(PyObject *self, PyObject *args)
{
	struct send_queue_core *core = (struct send_queue_core *)self;
	unsigned long long address;
	PyObject *keeper;

	if (!PyArg_ParseTuple(args, "OK", &keeper, &address))
		return NULL;
	replace(&core->chain_keeper, keeper);
	core->chain = (struct aiordma_chain *)(uintptr_t)address;
	Py_RETURN_NONE;
}

static PyObject *send_queue_core_take_failed(PyObject *self, PyObject *number)
{
	struct send_queue_core *core = (struct send_queue_core *)self;
	unsigned long value = PyLong_AsUnsignedLong(number);
	struct transfer *transfer;

	if (PyErr_Occurred())
		return NULL;
	transfer = find_transfer(&core->transfers_in_flight, value & NUMBER_MASK);
	if (!transfer)
		Py_RETURN_NONE;
	unlink_transfer(&core->transfers_in_flight, transfer);
	core->rd_atomic_credits += transfer->is_read;
	if (release_transfer(transfer) || (transfer->is_read && grant_rd_atomic_credits(core))) {
		Py_DECREF((PyObject *)transfer);
		return NULL;
	}
	return (PyObject *)transfer;
}

static PyObject *none_unless(int failed)
{
	return failed ? NULL : Py_NewRef(Py_None);
}

static PyObject *send_queue_core_stop_waiting(PyObject *self, PyObject *count)
{
	unsigned long value = PyLong_AsUnsignedLong(count);

	if (PyErr_Occurred())
		return NULL;
	return none_unless(stop_waiting_for((struct send_queue_core *)self, value, 0));
}

static PyObject *send_queue_core_grant_rd_atomic_credits(PyObject *self, PyObject *unused)
{
	return none_unless(grant_rd_atomic_credits((struct send_queue_core *)self));
}

static PyObject *send_queue_core_drop_queued_reads(PyObject *self, PyObject *unused)
{
	return none_unless(release_transfers(&((struct send_queue_core *)self)->queued_reads));
}

static PyObject *send_queue_core_abandon(PyObject *self, PyObject *unused)
{
	struct send_queue_core *core = (struct send_queue_core *)self;
	struct failure failure = { NULL, NULL, NULL };

	release_transfers(&core->queued_reads);
	note_failure(&failure);
	release_transfers(&core->transfers_in_flight);
	note_failure(&failure);
	return none_unless(restore_failure(&failure));
}

static PyMemberDef send_queue_core_members[] = {
	{ "next_number", T_UINT, offsetof(struct send_queue_core, next_number), 0,
	  "The number of the next request." },
	{ "oldest_pending", T_UINT, offsetof(struct send_queue_core, oldest_pending), 0,
	  "The number of the oldest request that has not completed." },
	{ "credits", T_LONGLONG, offsetof(struct send_queue_core, credits), 0,
	  "The number of free entries in the send queue." },
	{ "unsignaled", T_INT, offsetof(struct send_queue_core, unsignaled), 0,
	  "The number of requests since the last signaled one." },
	{ "signal_interval", T_INT, offsetof(struct send_queue_core, signal_interval), READONLY,
	  "One request in this many is signaled." },
	{ "fence_flags", T_INT, offsetof(struct send_queue_core, fence_flags), 0,
	  "Send flags that are added to every request: 0 or a fence." },
	{ "in_flight", T_INT, offsetof(struct send_queue_core, in_flight), 0,
	  "The number of Python's requests with memory in flight." },
	{ "waiters", T_INT, offsetof(struct send_queue_core, waiters), 0,
	  "The number of tasks that need to be notified of every completion." },
	{ "is_open", T_BOOL, offsetof(struct send_queue_core, is_open), 0,
	  "True if send() and start_transfer() can post." },
	{ "messages", T_ULONGLONG, offsetof(struct send_queue_core, messages), READONLY,
	  "The number of messages sent by send() and start_transfer()." },
	{ "nbytes", T_ULONGLONG, offsetof(struct send_queue_core, nbytes), READONLY,
	  "The number of bytes in these messages." },
	{ "transfers_in_flight", T_UINT,
	  offsetof(struct send_queue_core, transfers_in_flight.count), READONLY,
	  "The number of transfers that are posted and not completed." },
	{ "queued_reads", T_UINT, offsetof(struct send_queue_core, queued_reads.count), READONLY,
	  "The number of reads that wait for an RD/atomic credit." },
	{ "make_future", T_OBJECT, offsetof(struct send_queue_core, make_future), 0,
	  "A function that makes the future that a task awaits. None: there are no transfers." },
	{ "pd", T_OBJECT, offsetof(struct send_queue_core, pd), 0,
	  "The protection domain of usable memory." },
	{ "should_batch", T_OBJECT, offsetof(struct send_queue_core, should_batch), 0,
	  "A function that returns True if requests are batched now. None: never." },
	{ "on_rd_atomic_credit", T_OBJECT, offsetof(struct send_queue_core, on_rd_atomic_credit), 0,
	  "A function that is called when RD/atomic credits are free and tasks wait for one." },
	{ "rd_atomic_credits", T_LONGLONG, offsetof(struct send_queue_core, rd_atomic_credits), 0,
	  "The number of reads and atomics that can start." },
	{ "rd_atomic_waiters", T_INT, offsetof(struct send_queue_core, rd_atomic_waiters), 0,
	  "The number of tasks that wait for an RD/atomic credit." },
	{ "read_access", T_INT, offsetof(struct send_queue_core, read_access), 0,
	  "AccessFlags that the target of a read needs. 0: reads are not possible." },
	{ "max_message_size", T_UINT, offsetof(struct send_queue_core, max_message_size), 0,
	  "The largest message, in bytes." },
	{ "batching", T_BOOL, offsetof(struct send_queue_core, batching), 0,
	  "True if requests are batched now." },
	{ "has_unposted", T_BOOL, offsetof(struct send_queue_core, has_unposted), 0,
	  "True if batched requests are not posted yet. Nothing else can be posted before them." },
	{ "reads", T_ULONGLONG, offsetof(struct send_queue_core, reads), READONLY,
	  "The number of reads by start_transfer()." },
	{ "bytes_read", T_ULONGLONG, offsetof(struct send_queue_core, bytes_read), READONLY,
	  "The number of bytes in these reads." },
	{ "writes", T_ULONGLONG, offsetof(struct send_queue_core, writes), READONLY,
	  "The number of writes by start_transfer()." },
	{ "bytes_written", T_ULONGLONG, offsetof(struct send_queue_core, bytes_written), READONLY,
	  "The number of bytes in these writes." },
	{ "reads_completed", T_ULONGLONG, offsetof(struct send_queue_core, reads_completed),
	  READONLY, "The number of reads that have completed, also of Python's." },
	{ "rd_atomic_waits", T_ULONGLONG, offsetof(struct send_queue_core, rd_atomic_waits),
	  READONLY, "The number of reads that had to be queued." },
	{ NULL, 0, 0, 0, NULL },
};

static PyMethodDef send_queue_core_methods[] = {
	{ "open", send_queue_core_open, METH_VARARGS,
	  "open(keeper, cell, first_wr_id): use the queue pair in this cell, which keeper owns." },
	{ "send", send_queue_core_send, METH_O,
	  "send(data): post a small message now. Return 0 or an errno. -1: the caller takes the "
	  "slow path." },
	{ "set_polling", send_queue_core_set_polling, METH_VARARGS,
	  "set_polling(dispatcher, cq, budget): poll this queue for up to `budget` nanoseconds if "
	  "there is no credit. dispatcher None: do not poll." },
	{ "resumed", send_queue_core_resumed, METH_NOARGS,
	  "Start a new polling budget: a task that waited for a credit has resumed from the event "
	  "loop." },
	{ "completed", send_queue_core_completed, METH_O,
	  "completed(number): count the request with this number as completed, and all before "
	  "it." },
	{ "start_transfer", (PyCFunction)(void (*)(void))send_queue_core_start_transfer,
	  METH_FASTCALL,
	  "start_transfer(opcode, memory, remote): send, write or read registered memory in one "
	  "piece. Return a Transfer. None: the caller takes the slow path." },
	{ "set_chain", send_queue_core_set_chain, METH_VARARGS,
	  "set_chain(keeper, address): use this aiordma_chain for batched requests." },
	{ "take_failed", send_queue_core_take_failed, METH_O,
	  "take_failed(number): remove, release and return the transfer of a failed request, or "
	  "None if the request is not a transfer." },
	{ "stop_waiting", send_queue_core_stop_waiting, METH_O,
	  "stop_waiting(count): wake the waiters of the newest `count` requests." },
	{ "grant_rd_atomic_credits", send_queue_core_grant_rd_atomic_credits, METH_NOARGS,
	  "Start reads and wake tasks that wait for RD/atomic credits." },
	{ "drop_queued_reads", send_queue_core_drop_queued_reads, METH_NOARGS,
	  "Drop the reads that are not posted." },
	{ "abandon", send_queue_core_abandon, METH_NOARGS,
	  "Release all transfers. The queue pair is destroyed." },
	{ NULL, NULL, 0, NULL },
};

static PyType_Slot send_queue_core_slots[] = {
	{ Py_tp_doc, (void *)"SendQueueCore(depth, signal_interval, max_inline): the state of one "
			     "send queue." },
	{ Py_tp_new, PyType_GenericNew },
	{ Py_tp_init, send_queue_core_init },
	{ Py_tp_traverse, send_queue_core_traverse },
	{ Py_tp_clear, send_queue_core_clear },
	{ Py_tp_dealloc, send_queue_core_dealloc },
	{ Py_tp_members, send_queue_core_members },
	{ Py_tp_methods, send_queue_core_methods },
	{ 0, NULL },
};

PyType_Spec send_queue_core_spec = {
	.name = "aiordma._native._fast_path.SendQueueCore",
	.basicsize = sizeof(struct send_queue_core),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
	.slots = send_queue_core_slots,
};
