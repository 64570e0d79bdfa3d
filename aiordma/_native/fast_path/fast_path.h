/*
 * The fast path: the work for each message, without a Python frame. It posts small sends and
 * transfers, takes completions, keeps received messages until a task takes them, and posts their
 * slots again.
 *
 * All of it runs with the interpreter's lock held, because none of it waits. Only two things
 * release the lock: polling for longer than HOT_POLL_NS, and posting a request that can be large.
 *
 * Each type is the C half of a Python class. The Python class does everything that is not done for
 * every message:
 *
 *	SendQueueCore		aiordma.qp.SendQueue
 *	ReceiveRingCore		aiordma.qp.ReceiveRing
 *	ReceiveQueue		aiordma.messages.receiver.Receiver
 *	CompletionDispatcher	aiordma.dispatch.LoopDevice
 *	PolledQueue		aiordma.dispatch.SharedCompletionQueue
 *	ReferenceCount		aiordma.memory.MemoryRegion
 *	Transfer		(used by aiordma.qp.Operations)
 *	AdaptivePolling		(used by the receivers, and aiordma.dispatch.AdaptiveWait)
 *	InlineFuture		(made by aiordma.loop.make_future())
 *	WaitQueue		(used for waits that are not those for each message)
 *	Attempt			(returned by the methods that are awaited for each message)
 *	InboundCore		aiordma.streams.inbound.Inbound
 *	OutboundCore		aiordma.streams.outbound.Outbound
 *	SendRing		(used by aiordma.streams.StreamDataPath)
 *	StreamDataPathCore	aiordma.streams.StreamDataPath
 *	MessageCredits		(used by aiordma.message_streams.MessageProtocol)
 *	EagerPath		(used by aiordma.message_streams.MessageStream)
 *	FreeBuffers		(used by aiordma.memory.BufferPool)
 *	PooledBuffer		(taken from FreeBuffers)
 *
 * A queue pair is named by a cell: the memory where its QueuePair stores the C pointer. The cell
 * becomes NULL when the queue pair is destroyed. Nothing is posted after that.
 */
#ifndef AIORDMA_FAST_PATH_H
#define AIORDMA_FAST_PATH_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <errno.h>
#include <infiniband/verbs.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <structmember.h>

#include "../work_requests.h"

/*
 * A wr_id has two halves. The upper one is the key of the queue pair. The lower one is the number
 * of a send request, or RECEIVE and the slot of a receive.
 */
#define KEY_SHIFT 32
#define RECEIVE 0x80000000u
#define NUMBER_MASK 0x7fffffffu
/* The largest number of completions that one poll takes. */
#define BATCH 64
/*
 * The default time budget for polling in one iteration of the event loop, in nanoseconds. Timers
 * and other tasks wait while a task polls.
 */
#define LOOP_BUDGET_NS 1000000
/*
 * Some loops take long for an empty iteration. There, polling lasts BUDGET_FACTOR times longer than
 * an iteration; otherwise most of the time would go into iterations. The maximum is for timers and
 * other tasks.
 */
#define BUDGET_FACTOR 16
#define MAX_LOOP_BUDGET_NS 5000000
/*
 * An empty iteration often takes longer than the shortest one: the processor's caches hold the data
 * of other code. Its usual time is a low average, and at most this many times the shortest. If an
 * iteration takes longer than this many times its usual time, other tasks have run in it.
 */
#define BUSY_ITERATION_FACTOR 4
/* The most requests in a batch. The device can work on these while the next ones are collected. */
#define MAX_BATCHED 32

extern int is_forked_child;

/* Functions of the module _lib, which is a library of its own: aiordma_post_all(), ... */
extern int (*post_send)(struct ibv_qp *qp, struct ibv_send_wr *first);
extern int (*post_all)(struct ibv_qp **cell, struct ibv_send_wr *first);
extern int (*comp_event)(struct ibv_comp_channel *channel, struct ibv_cq **cq);

extern PyType_Spec send_queue_core_spec, receive_ring_spec, receive_queue_spec,
	completion_dispatcher_spec, reference_count_spec, transfer_spec, inline_future_spec,
	inline_future_factory_spec, inbound_spec, outbound_spec, send_ring_spec,
	stream_data_path_spec, polled_queue_spec, adaptive_polling_spec, attempt_spec,
	message_credits_spec, eager_path_spec, wait_queue_spec, free_buffers_spec,
	pooled_buffer_spec;
extern PyTypeObject *reference_count_type, *transfer_type, *polled_queue_type, *attempt_type,
	*pooled_buffer_type, *send_queue_core_type, *receive_ring_type, *receive_queue_type,
	*completion_dispatcher_type, *inbound_type, *outbound_type, *send_ring_type,
	*stream_data_path_type, *adaptive_polling_type, *message_credits_type, *free_buffers_type;

/* --- polling.c --- */

struct send_queue_core;
struct receive_queue;
struct stream_data_path;
struct transfer;

/* A linked list of transfers. The list has a reference to each of them. */
struct transfers {
	struct transfer *first;
	struct transfer *last;
	unsigned int count;
};

/* The queues of one queue pair, by the key in its wr_ids. */
struct dispatch_entry {
	uint32_t key; /* 0: the entry is free */
	struct send_queue_core *sends;
	struct receive_queue *receives;	 /* NULL: the queue pair carries a stream */
	struct stream_data_path *stream; /* NULL: the queue pair carries messages */
};

struct completion_dispatcher {
	PyObject_HEAD struct dispatch_entry *entries; /* a hash table with linear probing */
	uint32_t capacity;			      /* a power of two, or 0 */
	uint32_t used;
	struct ibv_wc batch[BATCH];
	unsigned int pending; /* completions for Python, at the beginning of the batch */
	PyObject *notified;   /* a list: keys of queue pairs with pending work */
	PyObject *woken;      /* a list: futures of tasks that wait for what the batch contains */
	PyObject *on_pending; /* called if there are pending completions or notified keys */
	PyObject *queues;     /* a dict: PolledQueues by the address of their queue */
	PyObject *consumers;  /* a dict: keys of queue pairs that use shared receives, by their
				 number */
	PyObject *on_failure; /* called with an errno and the name of the function that failed */
	PyObject *on_full;    /* called with a PolledQueue that might have more than a batch */
	struct ibv_comp_channel *channel; /* valid while `is_reading` */
	PyObject *on_wait;   /* called to arm queues before the loop waits; NULL, None: at once */
	char is_dispatching; /* the batch is in use: nothing can be polled */
	char has_unarmed;    /* a queue was left unarmed until the loop waits */
	char took_some;	     /* the last batch had completions */
	char served_poller;  /* it had something for a task that is between two polls */
	int unarmed_iterations; /* iterations of the loop since the last completion */
	char is_reading;
	struct transfers ended;	 /* transfers whose waiters are not woken yet */
	long long budget_start;	 /* time when a polling task last resumed from the event loop */
	long long budget;	 /* nanoseconds of polling per loop iteration */
	long long polled;	 /* nanoseconds of all polls that have missed or were preempted */
	long long shortest;	 /* the shortest iteration of the loop, in nanoseconds */
	long long usual;	 /* the usual time of one without other tasks */
	long long notified_at;	 /* time when polling last produced work for other tasks */
	long long last_event_at; /* time when the last channel event was read */
	int open_post_lists; /* queue pairs with an open post list: do not poll if there are any */
};

/* A completion queue whose events the loop handles. */
struct polled_queue {
	PyObject_HEAD struct ibv_cq *cq; /* NULL: it does not exist */
	int pollers;			 /* tasks that poll it: they need no event */
	char is_armed;			 /* the next completion raises an event */
};

/* An iteration of the event loop, for which a task interrupts its polling. */
struct loop_yield {
	long long began;
	long long budget_start; /* of the dispatcher, at that time */
};

/* What has ended a poll early. */
enum preemption { NOT_PREEMPTED, BY_LOOP, BY_TASK };

/* The completion queue that a task polls before it parks or takes the slow path. */
struct polling {
	struct completion_dispatcher *dispatcher;
	struct ibv_cq *cq;	 /* valid while `dispatcher` is set */
	long long budget;	 /* nanoseconds of a wait; negative: it does not poll */
	long long unused;	 /* nanoseconds that were left when the last poll was preempted */
	long long left;		 /* the same, while the loop runs before the poll goes on; else 0 */
	long long polled;	 /* `polled` of the dispatcher when the loop began to run */
	struct loop_yield yield; /* between the two */
	char preempted;		 /* enum preemption */
};

uint64_t now_ns(void);
int poll_until(struct completion_dispatcher *self, struct ibv_cq *cq, uint64_t end);
int poll_within_budget(struct polling *polling, int (*is_ready)(const void *), const void *subject);
void start_budget(struct polling *polling);
void end_loop_yield(struct completion_dispatcher *self, const struct loop_yield *yield,
		    long long now);
PyObject *set_polling(PyObject *self, struct polling *polling, PyObject *args);

/* --- adaptive_polling.c --- */

struct adaptive_polling;

void note_poll(struct adaptive_polling *polling, int found);
int may_go_on(struct adaptive_polling *polling, enum preemption preempted);
int note_wait(struct adaptive_polling *polling, long long began, long long woken, long long now);
int prepare_adaptive_polling(PyObject *module);

/* --- parking.c --- */

/* The task that waits for what arrives on a connection or a stream: it polls, then it parks. */
struct parking {
	struct polling polling;
	PyObject *make_future;		 /* NULL: tasks wait in Python */
	PyObject *yield_to_loop;	 /* makes an awaitable that lets the loop run, or NULL */
	struct adaptive_polling *policy; /* notes how long they wait, or NULL */
	PyObject *waiter;		 /* the future of the waiting task, or NULL */
	long long parked_at;
	long long woken_at;
	unsigned long long count; /* waits */
	char is_allowed;	  /* the connection is open */
	char has_waiter;	  /* a task waits, here or in Python; without `waiter`: it polls */
};

PyObject *await_future(PyObject *future);
int must_yield(struct parking *parking);
PyObject *begin_yield(struct parking *parking);
void end_yield(struct parking *parking);
PyObject *park(struct parking *parking);
void unpark(struct parking *parking);
void note_polled(struct parking *parking, int found);
int serve_waiter(struct parking *parking, struct completion_dispatcher *dispatcher);
void wake_waiter(struct parking *parking);
int note_parked(struct parking *parking);
int may_park(const struct parking *parking);
PyObject *set_parking(PyObject *self, struct parking *parking, PyObject *args);
int visit_parking(struct parking *parking, visitproc visit, void *arg);
void clear_parking(struct parking *parking);

/* --- free_buffers.c --- */

/* The number of sizes: 1 KiB, 4 KiB, ... 4 GiB. */
#define BUFFER_SIZES 12

struct pooled_buffer;

/* The free buffers of one size. The last one is taken first. */
struct buffer_stack {
	struct pooled_buffer **buffers;
	unsigned int count;
	unsigned int capacity; /* at least `existing` */
	unsigned int existing; /* buffers of this size, free or not */
};

struct free_buffers {
	PyObject_HEAD struct buffer_stack stacks[BUFFER_SIZES];
	char closed;
};

struct pooled_buffer {
	PyObject_HEAD struct free_buffers *free;
	PyObject *view;
	uint64_t address;
	unsigned int lkey;
	int stack; /* the index of the stack for its size */
	char is_free;
};

struct pooled_buffer *take_buffer(struct free_buffers *free, uint64_t nbytes);
void release_buffer(struct pooled_buffer *buffer);
unsigned long long buffer_size(const struct pooled_buffer *buffer);
int is_pooled_buffer(PyObject *memory);

#include "send_queue_core.h"

/* --- reference_count.c --- */

struct reference_count {
	PyObject_HEAD PyObject *pd;
	PyObject *on_unused; /* called after the last use, once closed */
	int access;
	int count;
	char closed;
};

void acquire_reference(struct reference_count *references);
int release_reference(struct reference_count *references);

/* --- transfer.c --- */

struct transfer {
	PyObject_HEAD struct transfer *next, *previous; /* in the list that contains it */
	struct send_queue_core *core;
	struct reference_count *references; /* acquired until the request has ended */
	PyObject *memory;		    /* kept alive until then */
	PyObject *future;
	PyObject *on_abandoned_end;
	uint64_t address;
	uint64_t remote;
	unsigned int length;
	unsigned int lkey;
	unsigned int rkey;
	unsigned int number;
	int opcode; /* of the work request */
	int error;
	char is_read;
	char queued;
	char over;
	char succeeded;
};

/* The first exception of several steps. It is raised after all steps have been done. */
struct failure {
	PyObject *type, *value, *traceback;
};

void note_failure(struct failure *failure);
int restore_failure(struct failure *failure);
void append_transfer(struct transfers *list, struct transfer *transfer);
struct transfer *unlink_transfer(struct transfers *list, struct transfer *transfer);
struct transfer *find_transfer(const struct transfers *list, unsigned int number);
int visit_transfers(const struct transfers *list, visitproc visit, void *arg);
void clear_transfers(struct transfers *list);
int stop_waiting(struct transfer *transfer);
int release_transfer(struct transfer *transfer);
int release_transfers(struct transfers *list);

/* --- receive_ring.c --- */

struct receive_ring {
	PyObject_HEAD PyObject *queue;
	struct ibv_qp **qp;
	struct ibv_srq **srq;
	uint64_t first_wr_id;
	uint64_t address;
	Py_buffer memory;
	unsigned int lkey;
	int slots;
	int slot_size;
	int posted;
	unsigned int failed; /* receives that have failed or were flushed */
	char stopped;
};

int post_slot(struct receive_ring *ring, int slot);
void complete_receive(struct receive_ring *ring);
int count_failed_receive(struct receive_ring *ring, int is_flush, int is_closed);

/* --- receive_queue.c --- */

struct received {
	int slot; /* -1: the message was copied out of its slot */
	unsigned int length;
	unsigned int flags;
	unsigned int imm_data; /* in network byte order */
	PyObject *copy;
};

struct receive_queue {
	PyObject_HEAD struct receive_ring *ring;
	struct received *fifo;
	unsigned int capacity; /* a power of two */
	unsigned int first;
	unsigned int count;
	int backlog; /* -1: messages are never copied out */
	int error;   /* errno of a slot that could not be posted again */
	struct parking parking;
	char notify;
	PyObject *slow_recv;   /* makes the coroutine that waits for a message, or NULL */
	PyObject *slow_next;   /* the same for an iterator */
	PyObject *checkpoints; /* see make_attempt() */
	char closed;
	unsigned long long messages;
	unsigned long long nbytes;
	unsigned long long spilled;
};

int append_received(struct receive_queue *self, const struct received *message);
int peek_oldest(struct receive_queue *queue, const char **data, unsigned int *length);
int find_oldest(struct receive_queue *queue, const char **data, unsigned int *length);
void drop_oldest_and_repost(struct receive_queue *queue);
struct parking *find_receive_parking(struct receive_queue *queue);

/* --- message_credits.c, eager_path.c: message streams, see aiordma/message_streams/ --- */

struct message_credits {
	PyObject_HEAD unsigned int credits; /* wire messages that may be posted */
	unsigned int peer_window;	    /* the most credits */
	unsigned int granted;		    /* credits that the peer has */
	unsigned int freed;		    /* credits to return to the peer */
	unsigned int window;		    /* the most of these two together */
};

int is_credit_update_due(const struct message_credits *credits);
int take_credit(struct message_credits *credits);
void put_back_credit(struct message_credits *credits);
void free_granted(struct message_credits *credits);
int add_credits(struct message_credits *credits, unsigned int returned);
unsigned int return_credits(struct message_credits *credits);
void take_back_credits(struct message_credits *credits, unsigned int returned);

struct eager_path {
	PyObject_HEAD struct message_credits *credits;
	struct send_queue_core *sends;
	struct receive_queue *queue;
	PyObject *slow_send;   /* makes the coroutine that sends a message, or NULL */
	PyObject *slow_recv;   /* makes the coroutine that waits for a message, or NULL */
	PyObject *slow_next;   /* the same for an iterator */
	PyObject *on_received; /* see set_slow() */
	PyObject *checkpoints; /* see make_attempt() */
	long long eager_limit;
	unsigned int max_frames;
	unsigned long long max_nbytes;
	int followers;
	char may_send;
	char may_receive;
	char has_queued;
	unsigned long long messages_sent, bytes_sent, messages_received, bytes_received;
};

/* --- streams: the rsocket protocol, see aiordma/streams/wire.py --- */

#define STREAM_TARGETS 2
#define STREAM_SEGMENT_SIZE 16
#define STREAM_VALUE_BITS 29
#define STREAM_VALUE_MASK ((1u << STREAM_VALUE_BITS) - 1)
/* The upper bits of a message: its Op. */
#define STREAM_DATA 0u
#define STREAM_CREDIT 4u
/* The number of control messages that can be posted and not completed at once. */
#define STREAM_CONTROLS 4

/* A piece of the peer's memory. */
struct remote_segment {
	uint64_t addr;
	uint32_t key;
	uint32_t length;
};

/* A message to post, with or behind a write of `length` bytes to `target`. */
struct stream_message {
	uint32_t message;
	uint32_t length;
	uint64_t target;
	uint32_t rkey;
	int is_control;
	unsigned char payload[STREAM_SEGMENT_SIZE];
};

struct inbound {
	PyObject_HEAD uint64_t address;
	uint32_t key;
	uint64_t half;	      /* bytes in each half of the buffer */
	uint64_t announced;   /* bytes that the peer may still write */
	uint64_t announce_at; /* offset of the half that is announced next */
	uint64_t unannounced; /* bytes that were read and not announced again */
	uint64_t start;	      /* offset of the next byte to read */
	uint64_t available;   /* bytes that were received and not read */
	uint64_t nbytes;      /* bytes that were received */
	uint32_t messages;    /* receives for the peer's messages */
	uint64_t messages_received;
	uint64_t next_update; /* number of messages after which credits are sent */
	uint64_t targets;     /* address of the peer's target SGL */
	uint32_t targets_key;
	uint32_t target_count; /* entries of the peer's target SGL; 0: not known yet */
	uint32_t next_target;
	char peer_is_big_endian;
	char takes_data; /* the peer may send data, and this side takes it */
	char may_update; /* credit updates may be sent */
};

int inbound_has_room(const struct inbound *self, uint64_t nbytes);
void inbound_count_data(struct inbound *self, uint64_t nbytes);
uint64_t inbound_readable(const struct inbound *self, uint64_t limit);
void inbound_consume(struct inbound *self, uint64_t nbytes);
int inbound_has_update(const struct inbound *self);
struct stream_message inbound_take_update(struct inbound *self);

struct outbound {
	PyObject_HEAD Py_buffer sgl; /* where the peer writes its targets */
	unsigned int reserve;	     /* credits that stay unused */
	unsigned int next_target;    /* the entry that the peer writes next */
	struct remote_segment targets[STREAM_TARGETS + 1];
	unsigned int target_count;
	uint64_t nbytes; /* bytes that were sent */
	uint16_t sent;	 /* messages that have used a credit, modulo 2^16 */
	uint16_t limit;	 /* messages that may have been sent */
	int control_credits;
	char is_big_endian; /* this side, to which the peer adapts its targets */
	char may_send;
};

unsigned int outbound_credits(const struct outbound *self);
unsigned int outbound_room(const struct outbound *self);
const struct remote_segment *outbound_update(struct outbound *self, unsigned int total);
struct remote_segment outbound_use(struct outbound *self, unsigned int nbytes);
int outbound_take_control(struct outbound *self);
void outbound_release_control(struct outbound *self);

struct send_ring {
	PyObject_HEAD uint64_t size;
	uint64_t next; /* offset of the next free byte */
	uint64_t free; /* bytes that are not reserved */
};

uint64_t reserve_space(struct send_ring *ring, uint64_t nbytes, uint64_t *start);
void release_space(struct send_ring *ring, uint64_t nbytes);

/* A message that is posted and not known to have completed. */
struct stream_request {
	unsigned int number; /* of its last work request */
	uint32_t copied;     /* bytes of the send ring */
	int is_control;
};

struct stream_data_path {
	PyObject_HEAD struct send_queue_core *sends;
	struct receive_ring *receives;
	struct inbound *inbound;
	struct outbound *outbound;
	struct send_ring *ring;
	Py_buffer received; /* the receive buffer */
	Py_buffer copied;   /* the memory of the send ring */
	uint64_t send_address;
	uint32_t send_lkey;
	int max_inline;
	struct stream_request *in_flight; /* a ring of `depth` entries */
	unsigned int depth;
	unsigned int first;
	unsigned int count;
	unsigned long long messages_received;
	int error;	   /* errno of a credit update that could not be posted */
	int receive_error; /* errno of a receive that could not be posted */
	char is_iwarp;
	char swaps; /* the peer's messages have the other byte order */
	char closed;
	char has_writer;
	char notify; /* the owner is notified of the first message */
	char notify_sendable;
	char is_notified;
	PyObject *checkpoints;	/* see make_attempt() */
	PyObject *slow_receive; /* makes the coroutine that waits for bytes, or NULL */
	PyObject *slow_send;	/* makes the coroutine that sends what is not posted, or NULL */
	struct parking parking; /* of the task that waits to read */
};

void complete_stream_sends(struct stream_data_path *self, unsigned int number);
int take_stream_receive(struct stream_data_path *self, const struct ibv_wc *wc);
int advance_stream(struct stream_data_path *self, struct completion_dispatcher *dispatcher);

/* --- inline_future.c --- */

extern PyTypeObject *inline_future_type, *inline_future_factory_type;

void wake_inline_future(PyObject *self);
PyObject *make_future(PyObject *function);
PyObject *make_future_of(PyObject *module, PyObject *loop);
int is_done(PyObject *future);
void wake(PyObject *future);
int begin_wakeups(void);
int run_wakeups(void);
PyObject *run_with_inline_wakeups(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *wake_batch(PyObject *module, PyObject *futures);
PyObject *set_run_batch(PyObject *module, PyObject *function);
PyObject *set_done_future(PyObject *module, PyObject *future);
PyObject *scheduled_count(PyObject *module, PyObject *unused);
int prepare_inline_futures(PyObject *module);

/* --- completion_dispatcher.c --- */

int take_batch(struct completion_dispatcher *self, int count);

/* --- completion_events.c --- */

PyObject *completion_dispatcher_watch(PyObject *self, PyObject *address);
PyObject *completion_dispatcher_handle_event(PyObject *self, PyObject *unused);
PyObject *completion_dispatcher_arm_again(PyObject *self, PyObject *queue);
PyObject *completion_dispatcher_before_wait(PyObject *self, PyObject *timeout);

/* --- attempt.c --- */

/* What an attempt_function returns if it has started a transfer, which is the result. */
#define STARTED_TRANSFER 2

/*
 * Try to finish at once. Returns 1 with a result, STARTED_TRANSFER with a transfer to wait for, 0
 * if the coroutine of Python must do it (it gets `error`, if that is not 0), or -1 with an
 * exception.
 */
typedef int (*attempt_function)(PyObject *target, PyObject *argument, PyObject **result,
				int *error);

/* A method of Python code that returns an attempt. */
struct attempt_kind {
	const char *name;
	attempt_function function;
	/* Returns NULL if the task must wait in Python. It is called when the function has
	   returned 0 without an error. NULL: all tasks wait in Python. */
	struct parking *(*find_parking)(PyObject *target, PyObject *argument);
	char is_tuple; /* the argument is a tuple: the arguments of the coroutine of Python */
	/* Called when an awaitable ends that has not finished at once, also if its task was
	   cancelled. It leaves no exception. NULL: nothing is to be done. */
	void (*on_end)(PyObject *target);
};

/*
 * Return an awaitable that calls the function with the target and the argument. If that cannot
 * finish, it parks and tries again; if it may not park, it awaits slow(argument), or slow() if the
 * argument is NULL. `slow` is a member of the target; it is an error if that is NULL then. The
 * awaitable keeps `owner` alive, and the target keeps its member as long as the owner lives.
 *
 * `checkpoints` is NULL or None, or a tuple of the two halves of a checkpoint. Then the awaitable
 * first awaits the half that raises if the task is cancelled, and, if the function has finished,
 * the half that lets other tasks run.
 */
PyObject *make_attempt(const struct attempt_kind *kind, PyObject *target, PyObject *argument,
		       PyObject *owner, PyObject *const *slow, PyObject *checkpoints);

/* Return what an attempt_function returns, for a result that is None if it cannot finish. */
static inline int unless_none(PyObject *found, PyObject **result)
{
	if (found == Py_None) {
		Py_DECREF(found);
		return 0;
	}
	*result = found;
	return found ? 1 : -1;
}

/* --- module.c --- */

int is_instance(PyTypeObject *type, PyObject *object);
int get_buffer(PyObject *data, Py_buffer *view);

/* Providers return an errno, positive or (libsiw) negative, or -1 with errno (libsiw as well). */
static inline int positive(int result)
{
	return result == -1 && errno ? errno : abs(result);
}

/* Do what get_buffer() does, faster for bytes. End it with release_bytes(). */
static inline int get_bytes(PyObject *data, Py_buffer *view)
{
	if (!PyBytes_CheckExact(data))
		return get_buffer(data, view);
	view->obj = NULL;
	view->buf = PyBytes_AsString(data);
	view->len = PyBytes_Size(data);
	return 1;
}

static inline void release_bytes(Py_buffer *view)
{
	if (view->obj)
		PyBuffer_Release(view);
}

static inline PyObject *none_unless(int failed)
{
	return failed ? NULL : Py_NewRef(Py_None);
}

/* Do what Py_XSETREF does, which is not in the limited API, with a new reference. */
static inline void replace(PyObject **where, PyObject *what)
{
	PyObject *before = *where;

	*where = Py_NewRef(what);
	Py_XDECREF(before);
}

static inline void simple_dealloc(PyObject *self)
{
	PyTypeObject *type = Py_TYPE(self);
	freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);

	release(self);
	Py_DECREF(type);
}

#endif
