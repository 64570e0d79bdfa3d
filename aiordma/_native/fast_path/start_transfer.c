/* Starting transfers, now or when an RD/atomic credit is free, and ending them. */
#include "fast_path.h"

#define SMALL_READ 32
#define PAGE_SIZE 4096

/* The largest number of queued reads that are posted in one call. */
#define MAX_QUEUED_POSTS 16
/* The number of a request that the device refused. */
#define NO_NUMBER (NUMBER_MASK + 1)

static PyObject *name_references, *name_segment, *name_addr, *name_rkey, *name_length;

/* --- reading the arguments --- */

/* Return 1 for a member that Python code has set to another object than None. */
static int is_set(const PyObject *object)
{
	return object && object != Py_None;
}

/* Get an attribute. Returns 1, 0 if there is no such attribute, or -1 with another exception. */
static int get(PyObject *owner, PyObject *name, PyObject **value)
{
	*value = PyObject_GetAttr(owner, name);
	if (*value)
		return 1;
	if (!PyErr_ExceptionMatches(PyExc_AttributeError))
		return -1;
	PyErr_Clear();
	return 0;
}

static int get_number(PyObject *owner, PyObject *name, uint64_t *number)
{
	PyObject *value = PyObject_GetAttr(owner, name);
	PyObject *index = value ? PyNumber_Index(value) : NULL; /* for numpy integers */

	Py_XDECREF(value);
	if (!index)
		return -1;
	*number = PyLong_AsUnsignedLongLong(index);
	Py_DECREF(index);
	return PyErr_Occurred() ? -1 : 0;
}

/* Get the address, the length and the lkey from `memory.segment`, a tuple of these. */
static int get_segment(struct transfer *transfer, PyObject *memory, uint64_t *nbytes)
{
	PyObject *segment = PyObject_GetAttr(memory, name_segment);

	if (segment && PyTuple_Check(segment) && PyTuple_Size(segment) == 3) {
		transfer->address = PyLong_AsUnsignedLongLong(PyTuple_GetItem(segment, 0));
		*nbytes = PyLong_AsUnsignedLongLong(PyTuple_GetItem(segment, 1));
		transfer->lkey = (uint32_t)PyLong_AsUnsignedLong(PyTuple_GetItem(segment, 2));
	} else if (segment) {
		PyErr_SetString(PyExc_TypeError, "a segment is a tuple of three numbers");
	}
	Py_XDECREF(segment);
	return PyErr_Occurred() ? -1 : 0;
}

static int get_remote(struct transfer *transfer, PyObject *remote, uint64_t *room)
{
	uint64_t rkey = 0;

	if (get_number(remote, name_addr, &transfer->remote) ||
	    get_number(remote, name_rkey, &rkey) || get_number(remote, name_length, room))
		return -1;
	transfer->rkey = (uint32_t)rkey;
	return 0;
}

/*
 * Return 1 if soft-iWARP might answer the read with wrong bytes: see crosses_page() in
 * aiordma/qp/scatter_gather.py. Reads need REMOTE_WRITE on iWARP only.
 */
static int must_split(const struct send_queue_core *core, const struct transfer *transfer,
		      uint64_t nbytes)
{
	return core->read_access & IBV_ACCESS_REMOTE_WRITE && nbytes <= SMALL_READ &&
	       transfer->remote % PAGE_SIZE + nbytes > PAGE_SIZE;
}

/* Return 1 if the transfer can be posted without the checks of the slow path, else 0. */
static int is_plain(struct send_queue_core *core, struct transfer *transfer, uint64_t nbytes,
		    uint64_t room)
{
	const struct reference_count *references = transfer->references;

	if (transfer->is_read) {
		if (room > nbytes || !core->read_access || must_split(core, transfer, room) ||
		    (references->access & core->read_access) != core->read_access)
			return 0;
		nbytes = room;
	}
	transfer->length = (uint32_t)nbytes;
	return !references->closed && references->pd == core->pd && nbytes && nbytes <= room;
}

/*
 * Make a transfer. Returns NULL without an exception if the memory is not registered, or if a check
 * fails.
 */
static struct transfer *make(struct send_queue_core *core, int opcode, PyObject *memory,
			     PyObject *remote)
{
	struct transfer *transfer = NULL;
	uint64_t nbytes = 0, room = core->max_message_size;
	PyObject *references;

	if (PyBytes_CheckExact(memory) || get(memory, name_references, &references) <= 0)
		return NULL;
	if (Py_TYPE(references) == reference_count_type)
		transfer = (struct transfer *)PyType_GenericAlloc(transfer_type, 0);
	if (!transfer) {
		Py_DECREF(references);
		return NULL;
	}
	transfer->references = (struct reference_count *)references;
	transfer->memory = Py_NewRef(memory);
	transfer->opcode = opcode;
	transfer->is_read = opcode == IBV_WR_RDMA_READ;
	if (!get_segment(transfer, memory, &nbytes) &&
	    (opcode == IBV_WR_SEND || !get_remote(transfer, remote, &room)) &&
	    is_plain(core, transfer, nbytes, room)) {
		transfer->future = make_future(core->make_future);
		if (transfer->future) {
			transfer->core = (struct send_queue_core *)Py_NewRef((PyObject *)core);
			return transfer;
		}
	}
	Py_DECREF((PyObject *)transfer);
	return NULL;
}

/* --- posting --- */

static void count(struct send_queue_core *core, const struct transfer *transfer)
{
	if (transfer->opcode == IBV_WR_SEND) {
		core->messages++;
		core->nbytes += transfer->length;
	} else if (transfer->is_read) {
		core->reads++;
		core->bytes_read += transfer->length;
	} else {
		core->writes++;
		core->bytes_written += transfer->length;
	}
}

/* Append a request for the transfer to the chain, and commit it. */
static void add_to(struct aiordma_chain *chain, struct send_queue_core *core,
		   struct transfer *transfer)
{
	struct ibv_send_wr *wr = &chain->links[chain->count].wr;
	struct ibv_sge segment = {
		.addr = transfer->address,
		.length = transfer->length,
		.lkey = transfer->lkey,
	};

	transfer->number = core->next_number;
	aiordma_append(chain, 0, transfer->opcode, segment, 0, -1, transfer->remote,
		       transfer->rkey);
	commit_request(core, wr, 1);
	core->rd_atomic_credits -= transfer->is_read;
	append_transfer(&core->transfers_in_flight, transfer);
}

static int post_chain(struct send_queue_core *core, struct aiordma_chain *chain)
{
	return post_requests(core, &chain->links->wr, 1);
}

static int can_post(const struct send_queue_core *core)
{
	return is_usable(core) && !core->chain.count;
}

/*
 * Post one transfer. If the device refuses it, its memory stays acquired until the queue pair is
 * destroyed, because libsiw keeps the request. Returns 0, or -1 with an exception.
 */
static int post_alone(struct send_queue_core *core, struct transfer *transfer)
{
	struct aiordma_link link;
	struct aiordma_chain chain = { .links = &link };
	struct send_queue_mark mark = mark_send_queue(core);

	add_to(&chain, core, transfer);
	transfer->error = post_chain(core, &chain);
	if (!transfer->error) {
		count(core, transfer);
		return 0;
	}
	roll_back_requests(core, mark);
	transfer->number = NO_NUMBER;
	return stop_waiting(transfer);
}

static int is_last_waiting(const struct send_queue_core *core, const struct transfer *transfer,
			   unsigned int count)
{
	return !transfer->over &&
	       ((core->next_number - 1 - transfer->number) & NUMBER_MASK) < count;
}

/*
 * Wake the waiters of the last `count` requests. Their completions will not be reported. Returns 0,
 * or -1 with an exception.
 *
 * A waiter can remove any transfer from the list. So the walk has a reference to the transfer that
 * it is at, and begins anew if that one was removed. Those that it has woken are over by then.
 */
int stop_waiting_for(struct send_queue_core *core, unsigned int count, int error)
{
	struct transfers *list = &core->transfers_in_flight;
	struct failure failure = { NULL, NULL, NULL };
	struct transfer *transfer = list->first;
	int is_listed;

	Py_INCREF((PyObject *)core);
	while (transfer) {
		if (!is_last_waiting(core, transfer, count)) {
			transfer = transfer->next;
			continue;
		}
		Py_INCREF((PyObject *)transfer);
		transfer->error = error;
		stop_waiting(transfer);
		note_failure(&failure);
		is_listed = transfer->previous || list->first == transfer;
		Py_DECREF((PyObject *)transfer); /* runs Python only if it is not listed */
		transfer = is_listed ? transfer->next : list->first;
	}
	Py_DECREF((PyObject *)core);
	return restore_failure(&failure);
}

/*
 * Post queued reads, as far as there are RD/atomic credits and send credits. They get the credits
 * of the reads that have just completed before any task does. Returns 0, or -1 with an exception.
 */
static int post_queued(struct send_queue_core *core)
{
	struct aiordma_link links[MAX_QUEUED_POSTS];
	struct aiordma_chain chain;
	int error;

	do {
		chain = (struct aiordma_chain){ .links = links };
		while (core->queued_reads.first && core->rd_atomic_credits > 0 &&
		       core->credits > 0 && chain.count < MAX_QUEUED_POSTS) {
			struct transfer *transfer =
				unlink_transfer(&core->queued_reads, core->queued_reads.first);

			add_to(&chain, core, transfer);
			count(core, transfer);
			Py_DECREF((PyObject *)transfer); /* the other list has a reference */
		}
		error = chain.count ? post_chain(core, &chain) : 0;
	} while (!error && chain.count == MAX_QUEUED_POSTS && can_post(core));
	return error ? stop_waiting_for(core, chain.count, error) : 0;
}

static int call_on_rd_atomic_credit(struct send_queue_core *core)
{
	PyObject *result;

	if (core->rd_atomic_credits <= 0 || !core->rd_atomic_waiters ||
	    !is_set(core->on_rd_atomic_credit))
		return 0;
	result = PyObject_CallNoArgs(core->on_rd_atomic_credit);
	Py_XDECREF(result);
	return result ? 0 : -1;
}

/*
 * Grant free RD/atomic credits to queued reads and to waiting tasks. The two come first
 * alternately. Returns 0, or -1 with an exception.
 */
int grant_rd_atomic_credits(struct send_queue_core *core)
{
	struct failure failure = { NULL, NULL, NULL };

	if (core->rd_atomic_credits <= 0)
		return 0;
	if (core->rd_atomic_waiters) {
		core->waiters_first = !core->waiters_first;
		if (core->waiters_first) {
			call_on_rd_atomic_credit(core);
			note_failure(&failure);
		}
	}
	if (core->queued_reads.first && can_post(core)) {
		post_queued(core);
		note_failure(&failure);
	}
	call_on_rd_atomic_credit(core);
	note_failure(&failure);
	return restore_failure(&failure);
}

/* --- ending --- */

/*
 * Release a list of completed transfers. The RD/atomic credits of consecutive transfers of one
 * queue pair are granted together.
 */
int end_transfers(struct transfers *list)
{
	struct failure failure = { NULL, NULL, NULL };

	while (list->first) {
		struct transfer *transfer = unlink_transfer(list, list->first);
		struct send_queue_core *core =
			(struct send_queue_core *)Py_NewRef((PyObject *)transfer->core);

		core->rd_atomic_credits += transfer->is_read;
		release_transfer(transfer);
		note_failure(&failure);
		Py_DECREF((PyObject *)transfer);
		if (!list->first || list->first->core != core) {
			grant_rd_atomic_credits(core);
			note_failure(&failure);
		}
		Py_DECREF((PyObject *)core);
	}
	return restore_failure(&failure);
}

/* Drop a read that is queued. Returns 0, or -1 with an exception. */
int withdraw_read(struct transfer *transfer)
{
	int result;

	unlink_transfer(&transfer->core->queued_reads, transfer);
	result = release_transfer(transfer);
	Py_DECREF((PyObject *)transfer);
	return result;
}

/* --- for Python --- */

/* Return 1 if the request is batched with others, 0 if not, or -1 with an exception. */
static int is_batched(struct send_queue_core *core)
{
	PyObject *result;
	int batched;

	if (core->batching || !is_set(core->should_batch))
		return core->batching;
	result = PyObject_CallNoArgs(core->should_batch);
	batched = result ? PyObject_IsTrue(result) : -1;
	Py_XDECREF(result);
	return batched;
}

/*
 * Post, batch or queue a transfer. Returns 1, or 0 if the caller must take the slow path, or -1
 * with an exception.
 */
static int start(struct send_queue_core *core, struct transfer *transfer)
{
	int is_queued = transfer->is_read && core->rd_atomic_credits <= 0;
	int batched = is_queued ? 0 : is_batched(core);

	if (batched < 0)
		return -1;
	if (!is_usable(core))
		return 0;
	if (is_queued) {
		append_transfer(&core->queued_reads, transfer);
		transfer->queued = 1;
		core->rd_atomic_waits++;
	} else if (core->credits <= 0) {
		return 0;
	} else if (!batched) {
		acquire_reference(transfer->references);
		return post_alone(core, transfer) ? -1 : 1;
	} else if (core->chain.count < core->chain.capacity) {
		add_to(&core->chain, core, transfer);
		count(core, transfer);
	} else {
		return 0;
	}
	acquire_reference(transfer->references);
	return 1;
}

/* Start a transfer. Returns as an attempt_function does, with STARTED_TRANSFER if it could. */
static int try_transfer(struct send_queue_core *core, int opcode, PyObject *memory,
			PyObject *remote, PyObject **transfer)
{
	struct transfer *made;
	int result;

	if (!is_set(core->make_future) || core->waiters || (core->chain.count && !core->batching))
		return 0;
	made = make(core, opcode, memory, remote);
	if (!made)
		return PyErr_Occurred() ? -1 : 0;
	result = start(core, made);
	if (result > 0) {
		*transfer = (PyObject *)made;
		return STARTED_TRANSFER;
	}
	Py_DECREF((PyObject *)made);
	return result;
}

/* Start a transfer for an attempt, if one can wait for it. */
int try_awaited_transfer(struct send_queue_core *core, int opcode, PyObject *memory,
			 PyObject *remote, PyObject **transfer)
{
	return core->finish_transfer ? try_transfer(core, opcode, memory, remote, transfer) : 0;
}

static int try_read(PyObject *self, PyObject *arguments, PyObject **result, int *error)
{
	return try_awaited_transfer((struct send_queue_core *)self, IBV_WR_RDMA_READ,
				    PyTuple_GetItem(arguments, 1), PyTuple_GetItem(arguments, 0),
				    result);
}

static int try_write(PyObject *self, PyObject *arguments, PyObject **result, int *error)
{
	return try_awaited_transfer((struct send_queue_core *)self, IBV_WR_RDMA_WRITE,
				    PyTuple_GetItem(arguments, 0), PyTuple_GetItem(arguments, 1),
				    result);
}

/* Return an attempt of a method with two arguments, which follow the owner. */
static PyObject *make_access(PyObject *self, const struct attempt_kind *kind, PyObject *const *slow,
			     PyObject *const *args, Py_ssize_t count)
{
	PyObject *arguments, *attempt;

	if (count != 3) {
		PyErr_Format(PyExc_TypeError, "%s() takes an owner and two arguments", kind->name);
		return NULL;
	}
	arguments = PyTuple_Pack(2, args[1], args[2]);
	attempt = arguments ? make_attempt(kind, self, arguments, args[0], slow, NULL) : NULL;
	Py_XDECREF(arguments);
	return attempt;
}

PyObject *send_queue_core_read(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
	static const struct attempt_kind kind = { "Connection.read", try_read, NULL, 1 };

	return make_access(self, &kind, &((struct send_queue_core *)self)->slow_read, args, count);
}

PyObject *send_queue_core_write(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
	static const struct attempt_kind kind = { "Connection.write", try_write, NULL, 1 };

	return make_access(self, &kind, &((struct send_queue_core *)self)->slow_write, args, count);
}

PyObject *send_queue_core_start_transfer(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
	PyObject *transfer = NULL;
	int opcode, result;

	if (count != 3) {
		PyErr_SetString(PyExc_TypeError, "start_transfer(opcode, memory, remote)");
		return NULL;
	}
	opcode = (int)PyLong_AsLong(args[0]);
	if (PyErr_Occurred())
		return NULL;
	result = try_transfer((struct send_queue_core *)self, opcode, args[1], args[2], &transfer);
	return result ? transfer : Py_NewRef(Py_None);
}

int prepare_starting(PyObject *module)
{
	name_references = PyUnicode_InternFromString("references");
	name_segment = PyUnicode_InternFromString("segment");
	name_addr = PyUnicode_InternFromString("addr");
	name_rkey = PyUnicode_InternFromString("rkey");
	name_length = PyUnicode_InternFromString("length");
	return name_references && name_segment && name_addr && name_rkey && name_length ? 0 : -1;
}
