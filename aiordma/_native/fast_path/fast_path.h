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
 *	CompletionDispatcher	aiordma.dispatch.completion_reader.CompletionReader
 *	ReferenceCount		aiordma.memory.MemoryRegion
 *	Transfer		(used by aiordma.qp.Operations)
 *	InlineFuture		(made by aiordma.loop.make_future())
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
#include <structmember.h>

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

extern int is_forked_child;

/* Functions of the module _lib, which is a library of its own: aiordma_post_all(), ... */
extern int (*post_all)(struct ibv_qp **cell, struct ibv_send_wr *wr);
extern int (*comp_event)(struct ibv_comp_channel *channel, struct ibv_cq **cq);

extern PyType_Spec send_queue_core_spec, receive_ring_spec, receive_queue_spec,
	completion_dispatcher_spec, reference_count_spec, transfer_spec, inline_future_spec;
extern PyTypeObject *reference_count_type, *transfer_type;

/* --- polling.c --- */

struct send_queue_core;
struct receive_queue;
struct transfer;
struct aiordma_chain;

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
	struct receive_queue *receives;
};

struct completion_dispatcher {
	PyObject_HEAD struct dispatch_entry *entries; /* a hash table with linear probing */
	uint32_t capacity;			      /* a power of two, or 0 */
	uint32_t used;
	struct ibv_wc batch[BATCH];
	unsigned int pending;	 /* completions for Python, at the beginning of the batch */
	PyObject *notified;	 /* a list: keys of queue pairs with pending work */
	PyObject *on_pending;	 /* called if there are pending completions or notified keys */
	struct transfers ended;	 /* transfers whose waiters are not woken yet */
	long long budget_start;	 /* time when a polling task last resumed from the event loop */
	long long budget;	 /* nanoseconds of polling per loop iteration */
	long long notified_at;	 /* time when polling last produced work for other tasks */
	long long last_event_at; /* time when the last channel event was read */
	int open_post_lists; /* queue pairs with an open post list: do not poll if there are any */
};

/* The completion queue that a task polls before it takes the slow path. */
struct polling {
	struct completion_dispatcher *dispatcher;
	struct ibv_cq *cq; /* valid while `dispatcher` is set */
	long long budget;  /* nanoseconds */
	char preempted;	   /* the last poll ended early: the loop or another task has work to do */
};

uint64_t now_ns(void);
int poll_until(struct completion_dispatcher *self, struct ibv_cq *cq, uint64_t end);
int poll_within_budget(struct polling *polling, int (*is_ready)(const void *), const void *subject);
void start_budget(struct polling *polling);
PyObject *set_polling(PyObject *self, struct polling *polling, PyObject *args);

/* --- send_queue_core.c --- */

struct send_queue_core {
	PyObject_HEAD struct ibv_qp **qp;
	PyObject *keeper; /* owns the cell */
	uint64_t first_wr_id;
	unsigned int next_number;    /* of the next request */
	unsigned int oldest_pending; /* number of the oldest request that has not completed */
	long long credits;	     /* free entries in the send queue */
	int unsignaled;		     /* requests since the last signaled one */
	int signal_interval;	     /* one request in this many is signaled */
	int max_inline;
	int fence_flags; /* added to the send flags of every request */
	int in_flight;	 /* requests of Python with memory in flight */
	int waiters;	 /* tasks that need to be notified of every completion */
	char is_open;	 /* send() and start_transfer() can post */
	unsigned long long messages;
	unsigned long long nbytes;
	struct polling polling;
	/* Transfers. They can start if `make_future` is set. */
	struct transfers transfers_in_flight;
	struct transfers queued_reads; /* reads that wait for an RD/atomic credit */
	PyObject *make_future;	       /* makes the future that a task awaits */
	PyObject *pd;		       /* the protection domain of usable memory */
	PyObject *should_batch;	       /* returns true if requests are batched now */
	PyObject *on_rd_atomic_credit; /* called when credits are free and other waiters exist */
	PyObject *chain_keeper;
	struct aiordma_chain *chain; /* the batched requests */
	long long rd_atomic_credits; /* reads and atomics that can start */
	int rd_atomic_waiters; /* tasks that wait for such a credit, apart from `queued_reads` */
	char waiters_first;    /* those tasks got credits before `queued_reads` the last time */
	int read_access;       /* access flags that the target of a read needs */
	unsigned int max_message_size;
	char batching;	   /* requests are batched now */
	char has_unposted; /* batched requests wait to be posted: post nothing else before them */
	unsigned long long reads, bytes_read, writes, bytes_written, rd_atomic_waits;
	unsigned long long reads_completed; /* by this core and by Python */
};

void complete_sends(struct send_queue_core *core, unsigned int number);

/* --- reference_count.c --- */

struct reference_count {
	PyObject_HEAD PyObject *pd;
	PyObject *on_unused; /* called after the last use, once closed */
	int access;
	int count;
	char closed;
};

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
int end_transfers(struct transfers *list);
int prepare_transfers(PyObject *module);

/* --- start_transfer.c --- */

PyObject *send_queue_core_start_transfer(PyObject *self, PyObject *const *args, Py_ssize_t count);
int stop_waiting_for(struct send_queue_core *core, unsigned int count, int error);
int grant_rd_atomic_credits(struct send_queue_core *core);
int prepare_starting(PyObject *module);

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
	char stopped;
};

int post_slot(struct receive_ring *ring, int slot);

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
	char notify;
	char has_waiter;
	char closed;
	unsigned long long messages;
	unsigned long long nbytes;
	unsigned long long spilled;
	struct polling polling;
	unsigned int missed_polls; /* consecutive polls that found no message */
};

int append_received(struct receive_queue *self, const struct received *message);

/* --- inline_future.c --- */

PyObject *run_with_inline_wakeups(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *set_run_batch(PyObject *module, PyObject *function);
PyObject *count_scheduled(PyObject *module, PyObject *unused);
PyObject *scheduled_count(PyObject *module, PyObject *unused);
int prepare_inline_futures(PyObject *module);

/* --- completion_dispatcher.c --- */

int take_batch(struct completion_dispatcher *self, int count);

/* --- module.c --- */

int is_instance(PyObject *self, const char *type, PyObject *object);

/* Providers return an errno, positive or (libsiw) negative, or -1 with errno (libsiw as well). */
static inline int positive(int result)
{
	return result == -1 && errno ? errno : abs(result);
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
