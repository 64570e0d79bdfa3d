/*
 * The core of a send queue: the numbers, credits and signaling of its requests, the memory that
 * they use, and the functions that change these. Included by fast_path.h.
 *
 *	send_queue_core.c	the Python type, credits, batched requests
 *	requests_in_flight.c	requests with memory, and their completion
 *	send_message.c		messages
 *	start_transfer.c	transfers
 */
#ifndef AIORDMA_SEND_QUEUE_CORE_H
#define AIORDMA_SEND_QUEUE_CORE_H

/* The state of a send queue before requests were committed. */
struct send_queue_mark {
	unsigned int next_number;
	int unsignaled;
	unsigned long long unsignaled_copies;
	long long credits;
};

/* A request with memory that the device uses until the request has ended. */
struct request_in_flight {
	unsigned int number;
	PyObject *memory;
};

/*
 * The state of one send queue. Only the functions of this header and of the four files above change
 * it, and poll_within_budget() the state of its polling.
 */
struct send_queue_core {
	PyObject_HEAD struct ibv_qp **qp;
	PyObject *keeper; /* owns the cell */
	uint64_t first_wr_id;
	unsigned int next_number;    /* of the next request */
	unsigned int oldest_pending; /* number of the oldest request that has not completed */
	long long credits;	     /* free entries in the send queue */
	int unsignaled;		     /* requests since the last signaled one */
	unsigned long long unsignaled_copies; /* bytes of the buffers of these requests */
	int signal_interval;		      /* one request in this many is signaled */
	int max_inline;
	int abandoned_reads; /* reads whose tasks were cancelled: later requests are fenced */
	int waiters;	     /* tasks that need to be notified of every completion */
	char is_open;	     /* send() and start_transfer() can post */
	char is_selective;   /* a completion reports the requests before it, too */
	long long withheld;  /* credits that pause() has taken */
	struct send_queue_mark mark;	     /* before the last commit() of Python */
	struct request_in_flight *in_flight; /* Python's requests, a ring of `capacity` entries */
	unsigned int capacity;
	unsigned int first_in_flight;
	unsigned int count_in_flight;
	struct free_buffers *buffers; /* for copies, or NULL */
	PyObject *refused;	      /* a list: buffers of requests that were refused, or NULL */
	unsigned long long messages;
	unsigned long long nbytes;
	struct polling polling;
	/* Transfers. They can start if `make_future` is set. */
	struct transfers transfers_in_flight;
	struct transfers queued_reads; /* reads that wait for an RD/atomic credit */
	PyObject *make_future;	       /* makes the future that a task awaits */
	PyObject *finish_transfer;     /* makes the coroutine that waits for a transfer's end */
	PyObject *on_abandoned;	       /* called with a transfer whose waiter was cancelled */
	char polls_transfers;	       /* tasks wait in that coroutine, which polls */
	PyObject *pd;		       /* the protection domain of usable memory */
	PyObject *should_batch;	       /* returns true if requests are batched now */
	PyObject *on_rd_atomic_credit; /* called when credits are free and other waiters exist */
	struct aiordma_chain chain;    /* the batched requests: post nothing else before them */
	int batch_error;	       /* errno with which the device refused them, or 0 */
	long long rd_atomic_credits;   /* reads and atomics that can start */
	int rd_atomic_waiters; /* tasks that wait for such a credit, apart from `queued_reads` */
	char waiters_first;    /* those tasks got credits before `queued_reads` the last time */
	int read_access;       /* access flags that the target of a read needs */
	unsigned int max_message_size;
	char batching;	       /* requests are batched now */
	PyObject *slow_send;   /* makes the coroutine that sends what send() cannot, or NULL */
	PyObject *slow_read;   /* the same for read() */
	PyObject *slow_write;  /* the same for write() */
	PyObject *checkpoints; /* see make_attempt() */
	unsigned long long reads, bytes_read, writes, bytes_written, rd_atomic_waits;
	unsigned long long reads_completed; /* by this core and by Python */
};

static inline struct send_queue_mark mark_send_queue(const struct send_queue_core *core)
{
	return (struct send_queue_mark){ core->next_number, core->unsignaled,
					 core->unsignaled_copies, core->credits };
}

/* Return the number for the next request. It is signaled if `needs_completion`, or if it is time.
 */
static inline uint64_t commit(struct send_queue_core *core, int needs_completion, int *is_signaled)
{
	uint64_t wr_id = core->first_wr_id + core->next_number;

	*is_signaled = needs_completion || core->unsignaled + 1 >= core->signal_interval;
	core->next_number = (core->next_number + 1) & NUMBER_MASK;
	core->unsignaled = *is_signaled ? 0 : core->unsignaled + 1;
	if (*is_signaled)
		core->unsignaled_copies = 0;
	return wr_id;
}

static inline int fence_flags(const struct send_queue_core *core)
{
	return core->abandoned_reads ? IBV_SEND_FENCE : 0;
}

/*
 * Give a request the next number, and take a credit for it. A read needs no fence: reads are done
 * in order, and iWARP allows no fence on them.
 */
static inline void commit_request(struct send_queue_core *core, struct ibv_send_wr *wr,
				  int needs_completion)
{
	int is_signaled;

	wr->wr_id = commit(core, needs_completion, &is_signaled);
	wr->send_flags |= is_signaled ? IBV_SEND_SIGNALED : 0;
	if (wr->opcode != IBV_WR_RDMA_READ)
		wr->send_flags |= fence_flags(core);
	core->credits--;
}

/*
 * Do what commit_request() does for a request with `copied` bytes, which are in use until it has
 * ended. It is signaled if the unsignaled ones have `limit` bytes or more.
 */
static inline void commit_copy(struct send_queue_core *core, struct ibv_send_wr *wr,
			       uint64_t copied, uint64_t limit, int needs_completion)
{
	core->unsignaled_copies += copied;
	commit_request(core, wr, needs_completion || core->unsignaled_copies >= limit);
}

/* Undo commit_request() for all requests after the mark: the device has refused them. */
static inline void roll_back_requests(struct send_queue_core *core, struct send_queue_mark mark)
{
	core->next_number = mark.next_number;
	core->unsignaled = mark.unsignaled;
	core->unsignaled_copies = mark.unsignaled_copies;
	core->credits = mark.credits;
}

/*
 * Post requests that are linked by `next`, and that were committed.
 *
 * A thread that destroys a queue pair sets its cell to NULL with the interpreter's lock held. Small
 * requests are posted with that lock. For large ones it is released, because a soft device might do
 * all of its work in this call; post_all() has a lock of its own. Returns 0 or an errno.
 */
static inline int post_requests(struct send_queue_core *core, struct ibv_send_wr *first,
				int is_large)
{
	int error;

	if (!is_large)
		return post_send(*core->qp, first);
	Py_BEGIN_ALLOW_THREADS
	error = post_all(core->qp, first);
	Py_END_ALLOW_THREADS
	return error;
}

/* Return true if requests can be posted at all: there is a queue pair, which is this process's. */
static inline int is_usable(const struct send_queue_core *core)
{
	return core->is_open && core->qp && *core->qp && !is_forked_child;
}

/* --- requests_in_flight.c --- */

int make_room_in_flight(struct send_queue_core *core);
void add_in_flight(struct send_queue_core *core, PyObject *memory);
PyObject *take_newest_in_flight(struct send_queue_core *core);
int visit_in_flight(struct send_queue_core *core, visitproc visit, void *arg);
void clear_in_flight(struct send_queue_core *core);
int complete_request(struct send_queue_core *core, const struct ibv_wc *wc,
		     struct transfers *ended);
PyObject *send_queue_core_commit(PyObject *self, PyObject *args);
PyObject *send_queue_core_roll_back(PyObject *self, PyObject *unused);
PyObject *send_queue_core_completed(PyObject *self, PyObject *argument);
PyObject *send_queue_core_in_flight(PyObject *self, PyObject *unused);

/* --- send_message.c --- */

/* A message to post: `data`, after a header that can be empty. */
struct message {
	const char *header;
	Py_ssize_t header_length;
	const char *data;
	Py_ssize_t length;
};

int try_post_message(struct send_queue_core *core, const struct message *message, int *error);
PyObject *send_queue_core_send(PyObject *self, PyObject *const *args, Py_ssize_t count);

/* --- start_transfer.c --- */

PyObject *send_queue_core_start_transfer(PyObject *self, PyObject *const *args, Py_ssize_t count);
PyObject *send_queue_core_read(PyObject *self, PyObject *const *args, Py_ssize_t count);
PyObject *send_queue_core_write(PyObject *self, PyObject *const *args, Py_ssize_t count);
int try_awaited_transfer(struct send_queue_core *core, int opcode, PyObject *memory,
			 PyObject *remote, PyObject **transfer);
int stop_waiting_for(struct send_queue_core *core, unsigned int count, int error);
int grant_rd_atomic_credits(struct send_queue_core *core);
int end_transfers(struct transfers *list);
int withdraw_read(struct transfer *transfer);
int prepare_starting(PyObject *module);

#endif
