/*
 * The requests of a send queue whose memory the device uses until they have ended, and the
 * completion of all requests.
 */
#include "fast_path.h"

static struct request_in_flight *in_flight_at(struct send_queue_core *core, unsigned int index)
{
	return &core->in_flight[(core->first_in_flight + index) % core->capacity];
}

/* Make room for one more request with memory. Returns 0, or -1 with an exception. */
int make_room_in_flight(struct send_queue_core *core)
{
	unsigned int capacity = core->capacity ? 2 * core->capacity : 8, index;
	struct request_in_flight *larger;

	if (core->count_in_flight < core->capacity)
		return 0;
	larger = PyMem_Malloc(capacity * sizeof(*larger));
	if (!larger) {
		PyErr_NoMemory();
		return -1;
	}
	for (index = 0; index < core->count_in_flight; index++)
		larger[index] = *in_flight_at(core, index);
	PyMem_Free(core->in_flight);
	core->in_flight = larger;
	core->capacity = capacity;
	core->first_in_flight = 0;
	return 0;
}

/* Record memory as in flight until the next request has ended. There is room. Steals `memory`. */
void add_in_flight(struct send_queue_core *core, PyObject *memory)
{
	struct request_in_flight *request = in_flight_at(core, core->count_in_flight++);

	request->number = core->next_number;
	request->memory = memory;
}

/* Remove the newest request. Returns its memory. */
PyObject *take_newest_in_flight(struct send_queue_core *core)
{
	return in_flight_at(core, --core->count_in_flight)->memory;
}

int visit_in_flight(struct send_queue_core *core, visitproc visit, void *arg)
{
	unsigned int index;

	for (index = 0; index < core->count_in_flight; index++)
		Py_VISIT(in_flight_at(core, index)->memory);
	return 0;
}

void clear_in_flight(struct send_queue_core *core)
{
	while (core->count_in_flight)
		Py_DECREF(take_newest_in_flight(core));
}

/* Return 1 if the request `other` is the request `number`, or one before it. */
static int is_up_to(unsigned int other, unsigned int number)
{
	return ((number - other) & NUMBER_MASK) <= NUMBER_MASK >> 1;
}

/* Remove the request at this index. Returns its memory. */
static PyObject *remove_in_flight(struct send_queue_core *core, unsigned int index)
{
	PyObject *memory = in_flight_at(core, index)->memory;

	for (; index > 0; index--)
		*in_flight_at(core, index) = *in_flight_at(core, index - 1);
	core->first_in_flight = (core->first_in_flight + 1) % core->capacity;
	core->count_in_flight--;
	return memory;
}

/*
 * Return the index of the oldest request that has ended with the request `number`, or -1.
 *
 * If signaling is selective, the requests before the completed one have ended, too. If not, each
 * one is reported, because on Linux's siw a read can end after requests that were posted later.
 */
static int find_ended(struct send_queue_core *core, unsigned int number)
{
	unsigned int index;

	if (core->is_selective)
		return core->count_in_flight && is_up_to(in_flight_at(core, 0)->number, number) ?
			       0 :
			       -1;
	for (index = 0; index < core->count_in_flight; index++)
		if (in_flight_at(core, index)->number == number)
			return (int)index;
	return -1;
}

/*
 * Release the buffers of copied messages that have ended with the request `number`. Returns 1 if
 * another request has ended, whose memory Python must release.
 */
static int release_copies(struct send_queue_core *core, unsigned int number)
{
	int index;

	while ((index = find_ended(core, number)) >= 0) {
		if (!is_pooled_buffer(in_flight_at(core, index)->memory))
			return 1;
		release_buffer((struct pooled_buffer *)remove_in_flight(core, index));
	}
	return 0;
}

/*
 * Count all requests up to this number as completed. If a completion of a later request was counted
 * before, nothing changes.
 */
static void complete_sends(struct send_queue_core *core, unsigned int number)
{
	unsigned int count = (number + 1 - core->oldest_pending) & NUMBER_MASK;

	if (count <= ((core->next_number - core->oldest_pending) & NUMBER_MASK)) {
		core->oldest_pending = (number + 1) & NUMBER_MASK;
		core->credits += count;
	}
}

/*
 * Count the request of a completion as completed, and, if signaling is selective, those before it.
 * Release their buffers. If the request is a transfer that has succeeded, move it to `ended`.
 * Returns 1, or 0 if Python must handle the completion, too.
 */
int complete_request(struct send_queue_core *core, const struct ibv_wc *wc, struct transfers *ended)
{
	uint32_t number = (uint32_t)wc->wr_id & NUMBER_MASK;
	struct transfer *transfer;

	complete_sends(core, number);
	if (wc->status != IBV_WC_SUCCESS)
		return 0;
	core->reads_completed += wc->opcode == IBV_WC_RDMA_READ;
	transfer = find_transfer(&core->transfers_in_flight, number);
	if (transfer) {
		transfer->succeeded = 1;
		append_transfer(ended, unlink_transfer(&core->transfers_in_flight, transfer));
		Py_DECREF((PyObject *)transfer);
	}
	return !release_copies(core, number) && !core->waiters &&
	       !(core->queued_reads.first && core->rd_atomic_credits > 0);
}

PyObject *send_queue_core_commit(PyObject *self, PyObject *args)
{
	struct send_queue_core *core = (struct send_queue_core *)self;
	int needs_completion, is_read = 0, is_signaled, flags;
	unsigned long long wr_id;
	PyObject *memory;

	if (!PyArg_ParseTuple(args, "Op|p", &memory, &needs_completion, &is_read) ||
	    make_room_in_flight(core))
		return NULL;
	core->mark = mark_send_queue(core);
	if (memory != Py_None)
		add_in_flight(core, Py_NewRef(memory));
	wr_id = commit(core, needs_completion, &is_signaled);
	flags = (is_signaled ? IBV_SEND_SIGNALED : 0) | (is_read ? 0 : fence_flags(core));
	return Py_BuildValue("Ki", wr_id, flags);
}

PyObject *send_queue_core_roll_back(PyObject *self, PyObject *unused)
{
	struct send_queue_core *core = (struct send_queue_core *)self;
	PyObject *memory = NULL;

	core->next_number = core->mark.next_number;
	core->unsignaled = core->mark.unsignaled;
	core->unsignaled_copies = core->mark.unsignaled_copies;
	if (core->count_in_flight &&
	    in_flight_at(core, core->count_in_flight - 1)->number == core->next_number)
		memory = take_newest_in_flight(core);
	Py_XDECREF(memory);
	Py_RETURN_NONE;
}

PyObject *send_queue_core_completed(PyObject *self, PyObject *argument)
{
	struct send_queue_core *core = (struct send_queue_core *)self;
	unsigned long number = PyLong_AsUnsignedLong(argument);
	PyObject *ended;
	int index;

	if (PyErr_Occurred())
		return NULL;
	complete_sends(core, number);
	ended = PyList_New(0);
	while (ended && (index = find_ended(core, number)) >= 0) {
		PyObject *memory = remove_in_flight(core, index);

		if (PyList_Append(ended, memory))
			Py_CLEAR(ended);
		Py_DECREF(memory);
	}
	return ended;
}

PyObject *send_queue_core_in_flight(PyObject *self, PyObject *unused)
{
	struct send_queue_core *core = (struct send_queue_core *)self;
	PyObject *memories = PyList_New(0);
	unsigned int index;

	for (index = 0; memories && index < core->count_in_flight; index++)
		if (PyList_Append(memories, in_flight_at(core, index)->memory))
			Py_CLEAR(memories);
	return memories;
}
