/* Starting transfers, at once or when their turn comes: what SendLane.transfer() does. */
#include "fast_path.h"

#include "../work_requests.h"

/* So many that have waited for their turn go to the device in one call. */
#define AT_ONCE 16
/* Of a request that the device has refused. */
#define NO_NUMBER (NUMBER_MASK + 1)

static int (*post_all)(struct ibv_qp **cell, struct ibv_send_wr *wr);

static PyObject *name_pin, *name_segment, *name_addr, *name_rkey, *name_length;

/* --- what is to be done --- */

/* Members that Python code sets. */
static int is_set(const PyObject *object)
{
	return object && object != Py_None;
}

/* 1, or 0 without an exception if there is no such attribute; -1 with one. */
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
	PyObject *index = value ? PyNumber_Index(value) : NULL; /* it may be one of numpy's */

	Py_XDECREF(value);
	if (!index)
		return -1;
	*number = PyLong_AsUnsignedLongLong(index);
	Py_DECREF(index);
	return PyErr_Occurred() ? -1 : 0;
}

static int get_segment(struct transfer *transfer, PyObject *memory, uint64_t *nbytes)
{
	PyObject *segment = PyObject_GetAttr(memory, name_segment);
	int result;

	if (!segment)
		return -1;
	result = PyArg_ParseTuple(segment, "KKI", &transfer->address, nbytes, &transfer->lkey);
	Py_DECREF(segment);
	return result ? 0 : -1;
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

/* Whether it may be done without further ado. */
static int is_plain(struct send_lane *lane, struct transfer *transfer, uint64_t nbytes, uint64_t room)
{
	const struct pin *pin = transfer->pin;

	if (transfer->reads) {
		if (room > nbytes || !lane->read_access ||
		    (pin->access & lane->read_access) != lane->read_access)
			return 0;
		nbytes = room;
	}
	transfer->length = (uint32_t)nbytes;
	return !pin->closed && pin->domain == lane->domain && nbytes && nbytes <= room;
}

/* NULL without an exception if the memory is not registered, or if something is unusual. */
static struct transfer *make(struct send_lane *lane, int opcode, PyObject *memory, PyObject *remote)
{
	struct transfer *transfer = NULL;
	uint64_t nbytes, room = lane->max_message;
	PyObject *pin;

	if (PyBytes_CheckExact(memory) || get(memory, name_pin, &pin) <= 0)
		return NULL;
	if (Py_TYPE(pin) == pin_type)
		transfer = (struct transfer *)PyType_GenericAlloc(transfer_type, 0);
	if (!transfer) {
		Py_DECREF(pin);
		return NULL;
	}
	transfer->pin = (struct pin *)pin;
	transfer->memory = Py_NewRef(memory);
	transfer->opcode = opcode;
	transfer->reads = opcode == IBV_WR_RDMA_READ;
	if (!get_segment(transfer, memory, &nbytes) &&
	    (opcode == IBV_WR_SEND || !get_remote(transfer, remote, &room)) &&
	    is_plain(lane, transfer, nbytes, room)) {
		transfer->future = PyObject_CallNoArgs(lane->make_future);
		if (transfer->future) {
			transfer->lane = (struct send_lane *)Py_NewRef((PyObject *)lane);
			return transfer;
		}
	}
	Py_DECREF((PyObject *)transfer);
	return NULL;
}

/* --- posting --- */

static void enqueue(struct send_lane *lane, struct transfer *transfer)
{
	lane->free--;
	lane->turns -= transfer->reads;
	transfer->number = lane->number;
	lane->number = (lane->number + 1) & NUMBER_MASK;
	lane->unsignalled = 0;
	append_transfer(&lane->under_way, transfer);
}

static void count(struct send_lane *lane, const struct transfer *transfer)
{
	if (transfer->opcode == IBV_WR_SEND) {
		lane->messages++;
		lane->nbytes += transfer->length;
	} else if (transfer->reads) {
		lane->reads++;
		lane->bytes_read += transfer->length;
	} else {
		lane->writes++;
		lane->bytes_written += transfer->length;
	}
}

static void add_to(struct aiordma_chain *chain, const struct send_lane *lane,
		   const struct transfer *transfer)
{
	struct ibv_sge segment = {
		.addr = transfer->address,
		.length = transfer->length,
		.lkey = transfer->lkey,
	};
	uint32_t flags = transfer->reads ? 0 : lane->order;

	aiordma_append(chain, lane->first_wr_id + transfer->number, transfer->opcode, segment,
		       flags | IBV_SEND_SIGNALED, -1, transfer->remote, transfer->rkey);
}

/* A soft device may do all the work in here. */
static int post_chain(struct send_lane *lane, struct aiordma_chain *chain)
{
	int error;

	Py_BEGIN_ALLOW_THREADS
	error = post_all(lane->qp, &chain->links->wr);
	Py_END_ALLOW_THREADS
	return error;
}

static int is_usable(const struct send_lane *lane)
{
	return lane->is_open && lane->qp && *lane->qp && !lanes_is_forked_child;
}

static int can_post(const struct send_lane *lane)
{
	return is_usable(lane) && !lane->is_due;
}

/* The device may use what it has refused as long as the queue pair is there: libsiw keeps it. */
static int post_alone(struct send_lane *lane, struct transfer *transfer)
{
	struct aiordma_link link;
	struct aiordma_chain chain = { .links = &link };
	int unsignalled = lane->unsignalled;

	enqueue(lane, transfer);
	add_to(&chain, lane, transfer);
	transfer->error = post_chain(lane, &chain);
	if (!transfer->error) {
		count(lane, transfer);
		return 0;
	}
	lane->unsignalled = unsignalled;
	lane->number = transfer->number;
	transfer->number = NO_NUMBER;
	lane->free++;
	return stop_waiting(transfer);
}

/* Of the last `count` requests: nobody will hear of their ends. -1 with an exception. */
int stop_waiting_for(struct send_lane *lane, unsigned int count, int error)
{
	struct failure failure = { NULL, NULL, NULL };
	struct transfer *transfer;

	for (transfer = lane->under_way.first; transfer; transfer = transfer->next) {
		if (transfer->over || ((lane->number - 1 - transfer->number) & NUMBER_MASK) >= count)
			continue;
		transfer->error = error;
		stop_waiting(transfer);
		note_failure(&failure);
	}
	return restore_failure(&failure);
}

/*
 * Post reads that have waited for their turn, and for a place: those of the reads that have ended,
 * before anybody else gets these. -1 with an exception.
 */
static int post_queued(struct send_lane *lane)
{
	struct aiordma_link links[AT_ONCE];
	struct aiordma_chain chain;
	int error;

	do {
		chain = (struct aiordma_chain){ .links = links };
		while (lane->queued.first && lane->turns > 0 && lane->free > 0 && chain.count < AT_ONCE) {
			struct transfer *transfer = unlink_transfer(&lane->queued, lane->queued.first);

			enqueue(lane, transfer);
			add_to(&chain, lane, transfer);
			count(lane, transfer);
			Py_DECREF((PyObject *)transfer); /* it is in the other list */
		}
		error = chain.count ? post_chain(lane, &chain) : 0;
	} while (!error && chain.count == AT_ONCE && can_post(lane));
	return error ? stop_waiting_for(lane, chain.count, error) : 0;
}

static int call_on_turn(struct send_lane *lane)
{
	PyObject *result;

	if (lane->turns <= 0 || !lane->turn_waiters || !is_set(lane->on_turn))
		return 0;
	result = PyObject_CallNoArgs(lane->on_turn);
	Py_XDECREF(result);
	return result ? 0 : -1;
}

/*
 * Turns were given back: others may have them, queued reads and those who wait elsewhere, who come
 * first by turns. -1 with an exception.
 */
int hand_out_turns(struct send_lane *lane)
{
	struct failure failure = { NULL, NULL, NULL };

	if (lane->turns <= 0)
		return 0;
	if (lane->turn_waiters) {
		lane->others_first = !lane->others_first;
		if (lane->others_first) {
			call_on_turn(lane);
			note_failure(&failure);
		}
	}
	if (lane->queued.first && can_post(lane)) {
		post_queued(lane);
		note_failure(&failure);
	}
	call_on_turn(lane);
	note_failure(&failure);
	return restore_failure(&failure);
}

/* --- for Python --- */

/* Whether it goes with others that tasks post now; -1 with an exception. */
static int joins_others(struct send_lane *lane)
{
	PyObject *result;
	int joins;

	if (lane->gathering || !is_set(lane->join))
		return lane->gathering;
	result = PyObject_CallNoArgs(lane->join);
	joins = result ? PyObject_IsTrue(result) : -1;
	Py_XDECREF(result);
	return joins;
}

/* 1: it is posted, or will be; 0: it cannot be now; -1 with an exception. */
static int start(struct send_lane *lane, struct transfer *transfer)
{
	int is_queued = transfer->reads && lane->turns <= 0;
	int joins = is_queued ? 0 : joins_others(lane);

	if (joins < 0)
		return -1;
	if (!is_usable(lane))
		return 0;
	if (is_queued) {
		append_transfer(&lane->queued, transfer);
		transfer->queued = 1;
		lane->turn_waits++;
	} else if (lane->free <= 0) {
		return 0;
	} else if (!joins) {
		transfer->pin->uses++;
		return post_alone(lane, transfer) ? -1 : 1;
	} else if (lane->chain && lane->chain->count < lane->chain->capacity) {
		enqueue(lane, transfer);
		add_to(lane->chain, lane, transfer);
		count(lane, transfer);
		lane->is_due = 1;
	} else {
		return 0;
	}
	transfer->pin->uses++;
	return 1;
}

PyObject *send_lane_transfer(PyObject *self, PyObject *const *args, Py_ssize_t arguments)
{
	struct send_lane *lane = (struct send_lane *)self;
	struct transfer *transfer;
	int opcode, result;

	if (arguments != 3) {
		PyErr_SetString(PyExc_TypeError, "transfer(opcode, memory, remote)");
		return NULL;
	}
	opcode = (int)PyLong_AsLong(args[0]);
	if (PyErr_Occurred())
		return NULL;
	if (!is_set(lane->make_future) || lane->waiting || (lane->is_due && !lane->gathering))
		Py_RETURN_NONE;
	transfer = make(lane, opcode, args[1], args[2]);
	if (!transfer)
		return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
	result = start(lane, transfer);
	if (result > 0)
		return (PyObject *)transfer;
	Py_DECREF((PyObject *)transfer);
	return result ? NULL : Py_NewRef(Py_None);
}

PyObject *lanes_post_by(PyObject *module, PyObject *address)
{
	uintptr_t function = PyLong_AsUnsignedLongLong(address);

	if (PyErr_Occurred())
		return NULL;
	post_all = (int (*)(struct ibv_qp **, struct ibv_send_wr *))function;
	Py_RETURN_NONE;
}

int prepare_starting(PyObject *module)
{
	name_pin = PyUnicode_InternFromString("pin");
	name_segment = PyUnicode_InternFromString("segment");
	name_addr = PyUnicode_InternFromString("addr");
	name_rkey = PyUnicode_InternFromString("rkey");
	name_length = PyUnicode_InternFromString("length");
	return name_pin && name_segment && name_addr && name_rkey && name_length ? 0 : -1;
}
