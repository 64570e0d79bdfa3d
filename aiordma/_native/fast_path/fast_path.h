/*
 * What happens for each message, without a Python frame: posting short sends, taking completions,
 * keeping what has arrived until a task takes it, posting its slot again. All of it with the
 * interpreter's lock held, as none of it waits; only polling for a while lets go of it, and posting
 * what may be long.
 *
 * The types are the bottom half of Python classes, which decide everything that is not for every
 * message: aiordma.datapath's SendQueue (SendLane), ReceiveRing (SlotRing) and Receiver (Arrivals),
 * aiordma.dispatch's CompletionReader (Completions), and aiordma.memory's MemoryRegion (Pin).
 *
 * A queue pair is known by the cell that its QueuePair keeps its pointer in, which becomes NULL when
 * it is destroyed: nothing is posted any more from then on.
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

/* A wr_id: the key of its owner above, below it RECEIVE and a slot, or the number of a request. */
#define KEY_SHIFT 32
#define RECEIVE 0x80000000u
#define NUMBER_MASK 0x7fffffffu
#define BATCH 64
/*
 * So long one turn of the loop may be spent on polling, timers and other tasks waiting meanwhile,
 * unless its owner says otherwise.
 */
#define TURN_NANOSECONDS 1000000

extern int lanes_is_forked_child;

extern PyType_Spec send_lane_spec, slot_ring_spec, arrivals_spec, completions_spec, pin_spec,
	transfer_spec;
extern PyTypeObject *pin_type, *transfer_type;

/* --- polling.c --- */

struct send_lane;
struct arrivals;
struct transfer;
struct aiordma_chain;

/* A list of transfers, each of which it has a reference to. */
struct transfers {
	struct transfer *first;
	struct transfer *last;
	unsigned int count;
};

struct lane {
	uint32_t key; /* 0: none */
	struct send_lane *sends;
	struct arrivals *arrivals;
};

struct completions {
	PyObject_HEAD
	struct lane *lanes; /* a hash table with linear probing */
	uint32_t capacity; /* a power of two, or 0 */
	uint32_t used;
	struct ibv_wc batch[BATCH];
	unsigned int left; /* of the batch: what is for Python */
	PyObject *told; /* keys of those who are to look */
	PyObject *deliver; /* called when there is either */
	struct transfers ended; /* which those who wait for them do not know yet */
	long long turn_began; /* of the loop, when a task that polls last came from there */
	long long turn_length; /* what of it may be spent on polling, nanoseconds */
	long long told_at; /* when polling by a task last gave somebody something to do */
	long long event_came; /* when the last event was read */
	int held; /* queue pairs with requests that wait to be posted together: nobody polls */
};

/* Where one waits for completions, and for how long before it takes the long way. */
struct outlook {
	struct completions *completions;
	struct ibv_cq *cq; /* there as long as `completions` is set */
	long long patience; /* nanoseconds */
	char cut_short; /* by the end of the loop's turn, or by what others have to do */
};

uint64_t now_ns(void);
int spin_until(struct completions *self, struct ibv_cq *cq, uint64_t end);
int look_out(struct outlook *outlook, int (*is_there)(const void *), const void *what);
void note_turn(struct outlook *outlook);
PyObject *set_outlook(PyObject *self, struct outlook *outlook, PyObject *args);

/* --- send_lane.c --- */

struct send_lane {
	PyObject_HEAD
	struct ibv_qp **qp;
	PyObject *keeper; /* of the cell */
	uint64_t first_wr_id;
	unsigned int number; /* of the next request */
	unsigned int ended; /* of the first request that has not ended */
	long long free;
	int unsignalled;
	int interval;
	int max_inline;
	int order;
	int lent;
	int waiting;
	char is_open;
	unsigned long long messages;
	unsigned long long nbytes;
	struct outlook outlook;
	/* Transfers, which may begin if `make_future` is set. */
	struct transfers under_way;
	struct transfers queued; /* reads that wait for their turn */
	PyObject *make_future; /* for who waits for one */
	PyObject *domain; /* where their memory is to be registered */
	PyObject *join; /* called: whether requests go together now */
	PyObject *on_turn; /* called when there are turns for those who wait for one */
	PyObject *chain_keeper;
	struct aiordma_chain *chain; /* of the requests that go together */
	long long turns; /* reads that may begin */
	int turn_waiters; /* elsewhere than in `queued` */
	char others_first; /* the last time that there were such */
	int read_access; /* needed of what is read into */
	unsigned int max_message;
	char gathering; /* requests go together now */
	char is_due; /* some wait for that: nothing else may be posted */
	unsigned long long reads, bytes_read, writes, bytes_written, turn_waits;
};

void sends_ended(struct send_lane *lane, unsigned int number);

/* --- pin.c --- */

struct pin {
	PyObject_HEAD
	PyObject *domain;
	PyObject *on_unused; /* called after the last use of one that is closed */
	int access;
	int uses;
	char closed;
};

int unpin(struct pin *pin);

/* --- transfer.c --- */

struct transfer {
	PyObject_HEAD
	struct transfer *next, *previous; /* in the list where it is */
	struct send_lane *lane;
	struct pin *pin; /* until the device is done with it */
	PyObject *memory; /* likewise */
	PyObject *future;
	PyObject *on_stray_end;
	uint64_t address;
	uint64_t remote;
	unsigned int length;
	unsigned int lkey;
	unsigned int rkey;
	unsigned int number;
	int opcode; /* of the work request */
	int error;
	char reads;
	char queued;
	char over;
	char succeeded;
};

/* What has gone wrong, while what is to be done after it is done all the same. */
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

PyObject *send_lane_transfer(PyObject *self, PyObject *const *args, Py_ssize_t count);
PyObject *lanes_post_by(PyObject *module, PyObject *address);
int stop_waiting_for(struct send_lane *lane, unsigned int count, int error);
int hand_out_turns(struct send_lane *lane);
int prepare_starting(PyObject *module);

/* --- slot_ring.c --- */

struct slot_ring {
	PyObject_HEAD
	PyObject *queue;
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

int post_slot(struct slot_ring *ring, int slot);

/* --- arrivals.c --- */

struct arrival {
	int slot; /* -1: copied away */
	unsigned int length;
	unsigned int flags;
	unsigned int imm_data; /* as the device gave it */
	PyObject *copy;
};

struct arrivals {
	PyObject_HEAD
	struct slot_ring *ring;
	struct arrival *fifo;
	unsigned int capacity; /* a power of two */
	unsigned int first;
	unsigned int count;
	int backlog; /* -1: nothing is copied away */
	int error; /* why a slot could not be given back */
	char tell;
	char waited;
	char closed;
	unsigned long long messages;
	unsigned long long nbytes;
	unsigned long long spilled;
	struct outlook outlook;
	unsigned int missed; /* times in a row that looking out was in vain */
};

int add_arrival(struct arrivals *self, const struct arrival *what);

/* --- completions.c --- */

int take_batch(struct completions *self, int count);

/* --- module.c --- */

int is_instance(PyObject *self, const char *type, PyObject *object);

/* Providers return an errno, positive or (libsiw) negative, or -1 with errno (libsiw as well). */
static inline int positive(int result)
{
	return result == -1 && errno ? errno : abs(result);
}

/* Py_XSETREF is not in the limited API. */
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
