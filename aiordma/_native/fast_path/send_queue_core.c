/* SendQueueCore: the state of one send queue. */
#include "fast_path.h"

PyTypeObject *send_queue_core_type;

static int send_queue_core_init(PyObject *self, PyObject *args, PyObject *kwargs)
{
	struct send_queue_core *core = (struct send_queue_core *)self;
	int is_selective = 1;

	if (!PyArg_ParseTuple(args, "Lii|pI", &core->credits, &core->signal_interval,
			      &core->max_inline, &is_selective, &core->next_number))
		return -1;
	core->is_selective = (char)is_selective;
	core->oldest_pending = core->next_number;
	return 0;
}

static int send_queue_core_traverse(PyObject *self, visitproc visit, void *arg)
{
	struct send_queue_core *core = (struct send_queue_core *)self;
	int result;

	Py_VISIT(Py_TYPE(self));
	Py_VISIT(core->keeper);
	Py_VISIT(core->polling.dispatcher);
	Py_VISIT(core->make_future);
	Py_VISIT(core->finish_transfer);
	Py_VISIT(core->on_abandoned);
	Py_VISIT(core->slow_send);
	Py_VISIT(core->slow_read);
	Py_VISIT(core->slow_write);
	Py_VISIT(core->checkpoints);
	Py_VISIT(core->pd);
	Py_VISIT(core->should_batch);
	Py_VISIT(core->on_rd_atomic_credit);
	Py_VISIT((PyObject *)core->buffers);
	Py_VISIT(core->refused);
	result = visit_in_flight(core, visit, arg);
	if (!result)
		result = visit_transfers(&core->transfers_in_flight, visit, arg);
	return result ? result : visit_transfers(&core->queued_reads, visit, arg);
}

static int send_queue_core_clear(PyObject *self)
{
	struct send_queue_core *core = (struct send_queue_core *)self;

	Py_CLEAR(core->polling.dispatcher);
	Py_CLEAR(core->make_future);
	Py_CLEAR(core->finish_transfer);
	Py_CLEAR(core->on_abandoned);
	Py_CLEAR(core->slow_send);
	Py_CLEAR(core->slow_read);
	Py_CLEAR(core->slow_write);
	Py_CLEAR(core->checkpoints);
	Py_CLEAR(core->pd);
	Py_CLEAR(core->should_batch);
	Py_CLEAR(core->on_rd_atomic_credit);
	core->qp = NULL;
	Py_CLEAR(core->keeper);
	Py_CLEAR(core->buffers);
	Py_CLEAR(core->refused);
	clear_transfers(&core->transfers_in_flight);
	clear_transfers(&core->queued_reads);
	clear_in_flight(core);
	return 0;
}

static void send_queue_core_dealloc(PyObject *self)
{
	PyObject_GC_UnTrack(self);
	send_queue_core_clear(self);
	PyMem_Free(((struct send_queue_core *)self)->in_flight);
	PyMem_Free(((struct send_queue_core *)self)->chain.links);
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

/* The functions are methods of objects that refer to this one. */
static PyObject *send_queue_core_unlink(PyObject *self, PyObject *unused)
{
	struct send_queue_core *core = (struct send_queue_core *)self;

	Py_CLEAR(core->finish_transfer);
	Py_CLEAR(core->on_abandoned);
	Py_CLEAR(core->slow_send);
	Py_CLEAR(core->slow_read);
	Py_CLEAR(core->slow_write);
	Py_CLEAR(core->should_batch);
	Py_CLEAR(core->on_rd_atomic_credit);
	Py_RETURN_NONE;
}

static PyObject *send_queue_core_set_slow(PyObject *self, PyObject *slow)
{
	replace(&((struct send_queue_core *)self)->slow_send, slow);
	Py_RETURN_NONE;
}

static PyObject *send_queue_core_set_slow_access(PyObject *self, PyObject *args)
{
	PyObject *read, *write;

	if (!PyArg_ParseTuple(args, "OO", &read, &write))
		return NULL;
	replace(&((struct send_queue_core *)self)->slow_read, read);
	replace(&((struct send_queue_core *)self)->slow_write, write);
	Py_RETURN_NONE;
}

/* --- credits, and who waits for them --- */

static PyObject *send_queue_core_try_reserve(PyObject *self, PyObject *unused)
{
	struct send_queue_core *core = (struct send_queue_core *)self;

	if (core->credits <= 0)
		Py_RETURN_FALSE;
	core->credits--;
	Py_RETURN_TRUE;
}

static PyObject *send_queue_core_unreserve(PyObject *self, PyObject *argument)
{
	long long count = PyLong_AsLongLong(argument);

	if (PyErr_Occurred())
		return NULL;
	((struct send_queue_core *)self)->credits += count;
	Py_RETURN_NONE;
}

static PyObject *send_queue_core_pause(PyObject *self, PyObject *unused)
{
	struct send_queue_core *core = (struct send_queue_core *)self;

	core->withheld += core->credits;
	core->credits = 0;
	Py_RETURN_NONE;
}

static PyObject *send_queue_core_resume(PyObject *self, PyObject *unused)
{
	struct send_queue_core *core = (struct send_queue_core *)self;

	core->credits += core->withheld;
	core->withheld = 0;
	Py_RETURN_NONE;
}

static PyObject *send_queue_core_add_waiter(PyObject *self, PyObject *unused)
{
	((struct send_queue_core *)self)->waiters++;
	Py_RETURN_NONE;
}

static PyObject *send_queue_core_remove_waiter(PyObject *self, PyObject *unused)
{
	((struct send_queue_core *)self)->waiters--;
	Py_RETURN_NONE;
}

static PyObject *send_queue_core_close(PyObject *self, PyObject *unused)
{
	struct send_queue_core *core = (struct send_queue_core *)self;

	core->is_open = 0;
	core->waiters++;
	return release_transfers(&core->queued_reads) ? NULL : Py_NewRef(Py_None);
}

static PyObject *send_queue_core_begin_fence(PyObject *self, PyObject *unused)
{
	((struct send_queue_core *)self)->abandoned_reads++;
	Py_RETURN_NONE;
}

static PyObject *send_queue_core_end_fence(PyObject *self, PyObject *unused)
{
	((struct send_queue_core *)self)->abandoned_reads--;
	Py_RETURN_NONE;
}

/* --- transfers, and the reads that wait for an RD/atomic credit --- */

/* Store a function. Returns None, or NULL with TypeError. */
static PyObject *store_function(PyObject **where, PyObject *function)
{
	if (!PyCallable_Check(function)) {
		PyErr_SetString(PyExc_TypeError, "a function expected");
		return NULL;
	}
	replace(where, function);
	Py_RETURN_NONE;
}

static PyObject *send_queue_core_allow_transfers(PyObject *self, PyObject *make_future)
{
	return store_function(&((struct send_queue_core *)self)->make_future, make_future);
}

static PyObject *send_queue_core_await_transfers(PyObject *self, PyObject *args)
{
	struct send_queue_core *core = (struct send_queue_core *)self;
	PyObject *finish, *on_abandoned;
	int polls;

	if (!PyArg_ParseTuple(args, "OOp", &finish, &on_abandoned, &polls))
		return NULL;
	replace(&core->finish_transfer, finish);
	replace(&core->on_abandoned, on_abandoned);
	core->polls_transfers = (char)polls;
	Py_RETURN_NONE;
}

static PyObject *send_queue_core_use_memory(PyObject *self, PyObject *args)
{
	struct send_queue_core *core = (struct send_queue_core *)self;
	PyObject *pd;

	if (!PyArg_ParseTuple(args, "OI", &pd, &core->max_message_size))
		return NULL;
	replace(&core->pd, pd);
	Py_RETURN_NONE;
}

static PyObject *send_queue_core_use_buffers(PyObject *self, PyObject *buffers)
{
	if (!is_instance(free_buffers_type, buffers))
		return NULL;
	replace((PyObject **)&((struct send_queue_core *)self)->buffers, buffers);
	Py_RETURN_NONE;
}

static PyObject *send_queue_core_allow_reads(PyObject *self, PyObject *access)
{
	int value = (int)PyLong_AsLong(access);

	if (PyErr_Occurred())
		return NULL;
	((struct send_queue_core *)self)->read_access = value;
	Py_RETURN_NONE;
}

static PyObject *send_queue_core_call_on_rd_atomic_credit(PyObject *self, PyObject *function)
{
	return store_function(&((struct send_queue_core *)self)->on_rd_atomic_credit, function);
}

static PyObject *send_queue_core_try_acquire_rd_atomic(PyObject *self, PyObject *unused)
{
	struct send_queue_core *core = (struct send_queue_core *)self;

	if (core->rd_atomic_credits <= 0)
		Py_RETURN_FALSE;
	core->rd_atomic_credits--;
	Py_RETURN_TRUE;
}

static PyObject *send_queue_core_release_rd_atomic(PyObject *self, PyObject *argument)
{
	struct send_queue_core *core = (struct send_queue_core *)self;
	long long count = PyLong_AsLongLong(argument);

	if (PyErr_Occurred())
		return NULL;
	core->rd_atomic_credits += count;
	return grant_rd_atomic_credits(core) ? NULL : Py_NewRef(Py_None);
}

static PyObject *send_queue_core_add_rd_atomic_waiter(PyObject *self, PyObject *unused)
{
	((struct send_queue_core *)self)->rd_atomic_waiters++;
	Py_RETURN_NONE;
}

static PyObject *send_queue_core_remove_rd_atomic_waiter(PyObject *self, PyObject *unused)
{
	((struct send_queue_core *)self)->rd_atomic_waiters--;
	Py_RETURN_NONE;
}

/* --- batched requests --- */

static PyObject *send_queue_core_call_should_batch(PyObject *self, PyObject *function)
{
	return store_function(&((struct send_queue_core *)self)->should_batch, function);
}

static PyObject *send_queue_core_start_batching(PyObject *self, PyObject *unused)
{
	struct send_queue_core *core = (struct send_queue_core *)self;
	struct aiordma_chain *chain = &core->chain;

	if (!chain->links) {
		chain->links = PyMem_Calloc(MAX_BATCHED, sizeof(*chain->links));
		if (!chain->links)
			return PyErr_NoMemory();
		chain->capacity = MAX_BATCHED;
	}
	core->batching = 1;
	Py_RETURN_NONE;
}

static PyObject *send_queue_core_stop_batching(PyObject *self, PyObject *unused)
{
	((struct send_queue_core *)self)->batching = 0;
	Py_RETURN_NONE;
}

/* Commit a request of Python and append it to the batch. The caller has a credit for it. */
static PyObject *send_queue_core_batch(PyObject *self, PyObject *args)
{
	struct send_queue_core *core = (struct send_queue_core *)self;
	unsigned long long address, remote;
	struct ibv_sge segment = { 0 };
	int opcode, flags, is_signaled;
	unsigned int rkey;
	PyObject *memory;
	long long imm;
	uint64_t wr_id;

	if (!PyArg_ParseTuple(args, "Oi(KII)(KI)L", &memory, &opcode, &address, &segment.length,
			      &segment.lkey, &remote, &rkey, &imm) ||
	    make_room_in_flight(core))
		return NULL;
	if (core->chain.count >= core->chain.capacity) {
		PyErr_SetString(PyExc_ValueError, "the batch is full");
		return NULL;
	}
	segment.addr = address;
	add_in_flight(core, Py_NewRef(memory));
	wr_id = commit(core, 1, &is_signaled);
	flags = IBV_SEND_SIGNALED | (opcode == IBV_WR_RDMA_READ ? 0 : fence_flags(core));
	aiordma_append(&core->chain, wr_id, opcode, segment, flags, imm, remote, rkey);
	Py_RETURN_NONE;
}

/*
 * Post the batch. If the device refuses a request, the batch stays, and is not posted again:
 * nothing can be posted any more. In a forked child the requests belong to the parent process.
 */
static PyObject *send_queue_core_flush(PyObject *self, PyObject *unused)
{
	struct send_queue_core *core = (struct send_queue_core *)self;

	if (core->chain.count && !core->batch_error && !is_forked_child)
		core->batch_error = post_requests(core, &core->chain.links->wr, 1);
	if (!core->batch_error)
		core->chain.count = 0;
	return PyLong_FromLong(core->batch_error);
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

/* Release all transfers, and return the memory of other requests: the queue pair is destroyed. */
static PyObject *send_queue_core_abandon(PyObject *self, PyObject *unused)
{
	struct send_queue_core *core = (struct send_queue_core *)self;
	struct failure failure = { NULL, NULL, NULL };
	PyObject *memories = send_queue_core_in_flight(self, NULL);

	if (memories && core->refused && PyList_SetSlice(memories, 0, 0, core->refused))
		Py_CLEAR(memories);
	note_failure(&failure);
	if (memories)
		Py_CLEAR(core->refused);
	if (memories)
		clear_in_flight(core);
	core->oldest_pending = core->next_number;
	Py_CLEAR(core->make_future);
	Py_CLEAR(core->should_batch);
	Py_CLEAR(core->on_rd_atomic_credit);
	release_transfers(&core->queued_reads);
	note_failure(&failure);
	release_transfers(&core->transfers_in_flight);
	note_failure(&failure);
	if (restore_failure(&failure) && memories)
		PyErr_WriteUnraisable(self); /* the caller releases the memory in any case */
	return memories;
}

static PyMemberDef send_queue_core_members[] = {
	{ "preempted", T_BOOL, offsetof(struct send_queue_core, polling.preempted), READONLY,
	  "True if the last poll ended early: the loop or another task had work to do." },
	{ "checkpoints", T_OBJECT, offsetof(struct send_queue_core, checkpoints), 0,
	  "The two halves of a checkpoint that send() executes, or None." },
	{ "next_number", T_UINT, offsetof(struct send_queue_core, next_number), READONLY,
	  "The number of the next request." },
	{ "oldest_pending", T_UINT, offsetof(struct send_queue_core, oldest_pending), READONLY,
	  "The number of the oldest request that has not completed." },
	{ "credits", T_LONGLONG, offsetof(struct send_queue_core, credits), READONLY,
	  "The number of free entries in the send queue." },
	{ "unsignaled", T_INT, offsetof(struct send_queue_core, unsignaled), READONLY,
	  "The number of requests since the last signaled one." },
	{ "signal_interval", T_INT, offsetof(struct send_queue_core, signal_interval), READONLY,
	  "One request in this many is signaled." },
	{ "waiters", T_INT, offsetof(struct send_queue_core, waiters), READONLY,
	  "The number of tasks that need to be notified of every completion." },
	{ "count_in_flight", T_UINT, offsetof(struct send_queue_core, count_in_flight), READONLY,
	  "The number of Python's requests with memory in flight." },
	{ "abandoned_reads", T_INT, offsetof(struct send_queue_core, abandoned_reads), READONLY,
	  "The number of reads that later requests wait for: they are fenced." },
	{ "messages", T_ULONGLONG, offsetof(struct send_queue_core, messages), READONLY,
	  "The number of messages sent by send() and start_transfer()." },
	{ "nbytes", T_ULONGLONG, offsetof(struct send_queue_core, nbytes), READONLY,
	  "The number of bytes in these messages." },
	{ "transfers_in_flight", T_UINT,
	  offsetof(struct send_queue_core, transfers_in_flight.count), READONLY,
	  "The number of transfers that are posted and not completed." },
	{ "queued_reads", T_UINT, offsetof(struct send_queue_core, queued_reads.count), READONLY,
	  "The number of reads that wait for an RD/atomic credit." },
	{ "rd_atomic_credits", T_LONGLONG, offsetof(struct send_queue_core, rd_atomic_credits),
	  READONLY, "The number of reads and atomics that can start." },
	{ "batching", T_BOOL, offsetof(struct send_queue_core, batching), READONLY,
	  "True if requests are batched now." },
	{ "unposted", T_INT, offsetof(struct send_queue_core, chain.count), READONLY,
	  "The number of batched requests. Nothing else can be posted before them." },
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
	{ "send", (PyCFunction)(void (*)(void))send_queue_core_send, METH_FASTCALL,
	  "send(owner, data): return an awaitable that posts a small message, or awaits the "
	  "`send(data)` of set_slow(); `send(data, errno)` if posting has failed. It keeps `owner` "
	  "alive." },
	{ "unlink", send_queue_core_unlink, METH_NOARGS,
	  "Drop the functions of Python: the queue has no user any more." },
	{ "set_slow", send_queue_core_set_slow, METH_O,
	  "set_slow(send): have the awaitables of send() await this if they cannot post at once." },
	{ "read", (PyCFunction)(void (*)(void))send_queue_core_read, METH_FASTCALL,
	  "read(owner, remote, into): return an awaitable of a read, or of the `read(remote, "
	  "into)` "
	  "of set_slow_access() if start_transfer() cannot start it." },
	{ "write", (PyCFunction)(void (*)(void))send_queue_core_write, METH_FASTCALL,
	  "write(owner, source, remote): return an awaitable of a write, or of the `write(source, "
	  "remote)` of set_slow_access() if start_transfer() cannot start it." },
	{ "set_slow_access", send_queue_core_set_slow_access, METH_VARARGS,
	  "set_slow_access(read, write): see read() and write()." },
	{ "set_polling", send_queue_core_set_polling, METH_VARARGS,
	  "set_polling(dispatcher, cq, budget): poll this queue for up to `budget` nanoseconds if "
	  "there is no credit. dispatcher None: do not poll." },
	{ "resumed", send_queue_core_resumed, METH_NOARGS,
	  "Start a new polling budget: a task that waited for a credit has resumed from the event "
	  "loop." },
	{ "completed", send_queue_core_completed, METH_O,
	  "completed(number): count the request with this number as completed, and all before it. "
	  "Return a list: the memory of the requests that have ended with it, the own one last." },
	{ "commit", send_queue_core_commit, METH_VARARGS,
	  "commit(memory, needs_completion, is_read=False): give a request the next number, before "
	  "it is posted. Return its wr_id and its send flags. Its memory (None: it has none) is in "
	  "flight from now on. It is signaled if its completion is needed, or once in an "
	  "interval." },
	{ "roll_back", send_queue_core_roll_back, METH_NOARGS,
	  "Undo the last commit(): the device has refused the request." },
	{ "in_flight", send_queue_core_in_flight, METH_NOARGS,
	  "Return a list: the memory of Python's requests that have not ended." },
	{ "try_reserve", send_queue_core_try_reserve, METH_NOARGS,
	  "Take a send credit if one is free. Return True if it was taken." },
	{ "unreserve", send_queue_core_unreserve, METH_O,
	  "unreserve(count): return send credits that were not used." },
	{ "pause", send_queue_core_pause, METH_NOARGS, "Withhold all credits until resume()." },
	{ "resume", send_queue_core_resume, METH_NOARGS, "End pause(). Idempotent." },
	{ "add_waiter", send_queue_core_add_waiter, METH_NOARGS,
	  "Have every completion reported, for one more task." },
	{ "remove_waiter", send_queue_core_remove_waiter, METH_NOARGS, "Undo add_waiter()." },
	{ "close", send_queue_core_close, METH_NOARGS,
	  "Post nothing more, drop the queued reads, and have every completion reported." },
	{ "begin_fence", send_queue_core_begin_fence, METH_NOARGS,
	  "Have later requests wait for the reads before them: one of these was abandoned." },
	{ "end_fence", send_queue_core_end_fence, METH_NOARGS, "Undo begin_fence()." },
	{ "allow_transfers", send_queue_core_allow_transfers, METH_O,
	  "allow_transfers(make_future): start_transfer() can post from now on. It has "
	  "make_future() make the future that a task awaits." },
	{ "await_transfers", send_queue_core_await_transfers, METH_VARARGS,
	  "await_transfers(finish, on_abandoned, polls): let the awaitables of send(), read() and "
	  "write() wait for transfers. They await finish(transfer) if it has failed, or if "
	  "`polls`, and call on_abandoned(transfer) if their task is cancelled meanwhile." },
	{ "use_memory", send_queue_core_use_memory, METH_VARARGS,
	  "use_memory(pd, max_message_size): transfer memory of this protection domain. A send "
	  "has at most this many bytes." },
	{ "use_buffers", send_queue_core_use_buffers, METH_O,
	  "use_buffers(free): copy messages that cannot be inline to buffers of these "
	  "FreeBuffers." },
	{ "allow_reads", send_queue_core_allow_reads, METH_O,
	  "allow_reads(access): the target of a read needs these AccessFlags." },
	{ "call_on_rd_atomic_credit", send_queue_core_call_on_rd_atomic_credit, METH_O,
	  "call_on_rd_atomic_credit(function): call it when RD/atomic credits are free and tasks "
	  "wait for one." },
	{ "try_acquire_rd_atomic", send_queue_core_try_acquire_rd_atomic, METH_NOARGS,
	  "Take an RD/atomic credit if one is free. Return True if it was taken." },
	{ "release_rd_atomic", send_queue_core_release_rd_atomic, METH_O,
	  "release_rd_atomic(count): return RD/atomic credits, to queued reads and to tasks that "
	  "wait." },
	{ "add_rd_atomic_waiter", send_queue_core_add_rd_atomic_waiter, METH_NOARGS,
	  "Count a task that waits for an RD/atomic credit." },
	{ "remove_rd_atomic_waiter", send_queue_core_remove_rd_atomic_waiter, METH_NOARGS,
	  "Undo add_rd_atomic_waiter()." },
	{ "call_should_batch", send_queue_core_call_should_batch, METH_O,
	  "call_should_batch(function): it returns True if requests are batched now." },
	{ "start_batching", send_queue_core_start_batching, METH_NOARGS,
	  "Batch requests, at most MAX_BATCHED, until stop_batching(). Small messages must not "
	  "overtake them." },
	{ "stop_batching", send_queue_core_stop_batching, METH_NOARGS, "Undo start_batching()." },
	{ "batch", send_queue_core_batch, METH_VARARGS,
	  "batch(memory, opcode, segment, remote, imm): give the next number to a request on "
	  "memory in one piece, and batch it. ValueError: the batch is full." },
	{ "flush", send_queue_core_flush, METH_NOARGS,
	  "Post the batched requests. Return 0 or an errno." },
	{ "start_transfer", (PyCFunction)(void (*)(void))send_queue_core_start_transfer,
	  METH_FASTCALL,
	  "start_transfer(opcode, memory, remote): send, write or read registered memory in one "
	  "piece. Return a Transfer. None: the caller takes the slow path." },
	{ "take_failed", send_queue_core_take_failed, METH_O,
	  "take_failed(number): remove, release and return the transfer of a failed request, or "
	  "None if the request is not a transfer." },
	{ "stop_waiting", send_queue_core_stop_waiting, METH_O,
	  "stop_waiting(count): wake the waiters of the newest `count` requests." },
	{ "grant_rd_atomic_credits", send_queue_core_grant_rd_atomic_credits, METH_NOARGS,
	  "Start reads and wake tasks that wait for RD/atomic credits." },
	{ "abandon", send_queue_core_abandon, METH_NOARGS,
	  "Release all transfers, and return the memory of other requests as a list. The queue "
	  "pair "
	  "is destroyed." },
	{ NULL, NULL, 0, NULL },
};

static PyType_Slot send_queue_core_slots[] = {
	{ Py_tp_doc,
	  (void *)"SendQueueCore(depth, signal_interval, max_inline, is_selective=True, "
		  "first_number=0): the state of one send queue. If signaling is selective, a "
		  "completion reports the requests before it, too." },
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
