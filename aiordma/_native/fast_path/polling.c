/* Polling a completion queue for a while, before a wait takes the long way. */
#include "fast_path.h"

#include <sched.h>
#include <time.h>

#define POLLS_A_YIELD 8
/*
 * So long a wait keeps all that it has: the processor, and the interpreter's lock. To give up either,
 * and to get it back, takes a good part of a short wait; and who gets the lock then may keep it a
 * hundred times longer.
 */
#define KEPT_NANOSECONDS 50000

uint64_t now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* With yields, others get the processor now and then. */
static int poll_until(struct completions *self, struct ibv_cq *cq, uint64_t end, int yields)
{
	unsigned int polls = 0;
	int count;

	do {
		if (yields && !(++polls % POLLS_A_YIELD))
			sched_yield();
		count = ibv_poll_cq(cq, BATCH, self->batch);
	} while (!count && now_ns() < end);
	return count;
}

/*
 * Poll until there is something, or the time has come. As ibv_poll_cq().
 *
 * If that is not soon, others get the processor: a soft device does some of its work in a kernel
 * thread, perhaps on this very processor, and a peer on this machine may be waiting for it.
 */
int spin_until(struct completions *self, struct ibv_cq *cq, uint64_t end)
{
	int count = ibv_poll_cq(cq, BATCH, self->batch);
	uint64_t now = count ? 0 : now_ns();

	if (count || now >= end)
		return count;
	count = poll_until(self, cq, end - now > KEPT_NANOSECONDS ? now + KEPT_NANOSECONDS : end, 0);
	if (count || now_ns() >= end)
		return count;
	Py_BEGIN_ALLOW_THREADS
	count = poll_until(self, cq, end, 1);
	Py_END_ALLOW_THREADS
	return count;
}

/*
 * Look out for what `is_there` says, as long as patience and the loop's turn allow, and as nobody
 * else gets something to do. What is wrong with the queue is not found here, but the next time that
 * the loop polls it. -1 with an exception.
 */
int look_out(struct outlook *outlook, int (*is_there)(const void *), const void *what)
{
	struct completions *completions = outlook->completions;
	struct ibv_cq *cq = outlook->cq;
	uint64_t now, end, last;
	int count, told = 0;

	if (!completions || outlook->patience < 0)
		return 0;
	if (completions->held > 0) {
		outlook->cut_short = 1;
		return 0;
	}
	now = now_ns();
	end = now + outlook->patience;
	last = completions->turn_began + completions->turn_length;
	if (completions->told_at > completions->turn_began)
		last = now; /* they wait for the loop */
	outlook->cut_short = last < end;
	if (last <= now)
		return 0;
	if (last < end)
		end = last;
	Py_INCREF((PyObject *)completions);
	do {
		count = spin_until(completions, cq, end);
		if (count > 0)
			told = take_batch(completions, count);
	} while (count > 0 && !told && !is_there(what) && now_ns() < end);
	if (told)
		outlook->cut_short = 1;
	if (told > 0 && !is_there(what))
		completions->told_at = now_ns();
	Py_DECREF((PyObject *)completions);
	return told < 0 ? -1 : 0;
}

/* A task comes from the loop, which has had its turn. */
void note_turn(struct outlook *outlook)
{
	if (outlook->completions)
		outlook->completions->turn_began = now_ns();
}

PyObject *set_outlook(PyObject *self, struct outlook *outlook, PyObject *args)
{
	PyObject *before = (PyObject *)outlook->completions;
	unsigned long long address;
	PyObject *completions;

	if (!PyArg_ParseTuple(args, "OKL", &completions, &address, &outlook->patience) ||
	    (completions != Py_None && !is_instance(self, "Completions", completions)))
		return NULL;
	outlook->cq = (struct ibv_cq *)(uintptr_t)address;
	outlook->completions = completions == Py_None || !address ?
				       NULL :
				       (struct completions *)Py_NewRef(completions);
	Py_XDECREF(before);
	Py_RETURN_NONE;
}
