/* Polling a completion queue before a wait takes the slow path. */
#include "fast_path.h"

#include <sched.h>
#include <time.h>

#define POLLS_PER_YIELD 8
/*
 * Polling keeps the processor and the interpreter's lock for this time. Releasing either of them
 * and getting it back takes a large part of a short wait. Another thread that gets the lock might
 * keep it a hundred times longer.
 */
#define HOT_POLL_NS 50000

uint64_t now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Poll until the time `end`. With `yields`, other threads get the processor from time to time. */
static int poll_loop(struct completion_dispatcher *self, struct ibv_cq *cq, uint64_t end,
		     int yields)
{
	unsigned int polls = 0;
	int count;

	do {
		if (yields && !(++polls % POLLS_PER_YIELD))
			sched_yield();
		count = ibv_poll_cq(cq, BATCH, self->batch);
	} while (!count && now_ns() < end);
	return count;
}

/*
 * Poll until there are completions, or until the time `end`. Returns what ibv_poll_cq() returns.
 *
 * After HOT_POLL_NS it yields the processor between polls. A soft device does some of its work in a
 * kernel thread, perhaps on the same processor, and a peer on this machine might need it too.
 */
int poll_until(struct completion_dispatcher *self, struct ibv_cq *cq, uint64_t end)
{
	int count = ibv_poll_cq(cq, BATCH, self->batch);
	uint64_t now = count ? 0 : now_ns();

	if (count || now >= end)
		return count;
	count = poll_loop(self, cq, end - now > HOT_POLL_NS ? now + HOT_POLL_NS : end, 0);
	if (count || now_ns() >= end)
		return count;
	Py_BEGIN_ALLOW_THREADS
	count = poll_loop(self, cq, end, 1);
	Py_END_ALLOW_THREADS
	return count;
}

/* Note that a poll has ended early, `unused` nanoseconds before its end. Returns 0. */
static int preempt(struct polling *polling, enum preemption preempted, long long unused)
{
	polling->preempted = (char)preempted;
	polling->unused = unused;
	return 0;
}

/*
 * Poll until `is_ready(subject)`. Stop early when the poll budget or the loop's budget is used up,
 * or when a completion produced work for another task. An error of the queue is not reported here:
 * the event loop finds it the next time it polls. Returns 0, or -1 with an exception.
 *
 * A poll that goes on after the loop has run takes what is left of its time, less the polls of
 * other tasks meanwhile: those served this task, too. Otherwise 1,000 tasks that wait for nothing
 * would keep the loop busy for seconds.
 */
int poll_within_budget(struct polling *polling, int (*is_ready)(const void *), const void *subject)
{
	struct completion_dispatcher *dispatcher = polling->dispatcher;
	struct ibv_cq *cq = polling->cq;
	long long time = polling->left, began, now, end, loop_end;
	int count, others_wait, notified = 0;

	polling->left = 0;
	polling->preempted = NOT_PREEMPTED;
	if (!dispatcher || polling->budget < 0 || is_forked_child)
		return 0;
	if (!time)
		time = polling->budget;
	else if ((time -= dispatcher->polled - polling->polled) <= 0)
		return 0;
	if (dispatcher->open_post_lists > 0 || dispatcher->is_dispatching)
		return preempt(polling, BY_LOOP, time);
	now = began = (long long)now_ns();
	end = now + time;
	loop_end = dispatcher->budget_start + dispatcher->budget;
	others_wait = dispatcher->notified_at > dispatcher->budget_start;
	if (others_wait || loop_end <= now)
		return preempt(polling, others_wait ? BY_TASK : BY_LOOP, time);
	if (loop_end > end)
		loop_end = end;
	Py_INCREF((PyObject *)dispatcher);
	do {
		count = poll_until(dispatcher, cq, loop_end);
		if (count > 0)
			notified = take_batch(dispatcher, count);
	} while (count > 0 && !notified && !is_ready(subject) && (long long)now_ns() < loop_end);
	if (!is_ready(subject)) {
		now = (long long)now_ns();
		dispatcher->polled += now - began;
		if (notified > 0)
			dispatcher->notified_at = now;
		if (notified > 0 || loop_end < end)
			preempt(polling, notified > 0 ? BY_TASK : BY_LOOP,
				now < end ? end - now : 1);
	}
	Py_DECREF((PyObject *)dispatcher);
	return notified < 0 ? -1 : 0;
}

/* Start a new budget: a task has resumed from the event loop. */
void start_budget(struct polling *polling)
{
	if (polling->dispatcher)
		polling->dispatcher->budget_start = now_ns();
}

/* Note how long an iteration of the loop took. The usual time falls fast, and rises slowly. */
static void note_iteration(struct completion_dispatcher *self, long long took)
{
	long long rise = took - self->usual, most;

	if (took < self->shortest)
		self->shortest = took;
	most = BUSY_ITERATION_FACTOR * self->shortest;
	if (rise < 0)
		self->usual += rise / 2;
	else
		self->usual += rise < self->usual / 16 ? rise : self->usual / 16;
	if (self->usual > most)
		self->usual = most;
}

/* The loop has run. Start a new budget, unless another task has done so in this iteration. */
void end_loop_yield(struct completion_dispatcher *self, const struct loop_yield *yield,
		    long long now)
{
	long long took = now - yield->began, budget;

	if (self->budget_start != yield->budget_start)
		return;
	self->budget_start = now;
	note_iteration(self, took);
	budget = BUDGET_FACTOR * self->usual;
	if (budget > MAX_LOOP_BUDGET_NS)
		budget = MAX_LOOP_BUDGET_NS;
	if (budget < LOOP_BUDGET_NS)
		budget = LOOP_BUDGET_NS;
	/* Other tasks that have work get at least as much time as polling. */
	if (took > BUSY_ITERATION_FACTOR * self->usual && took < budget)
		budget = took;
	self->budget = budget;
}

PyObject *set_polling(PyObject *self, struct polling *polling, PyObject *args)
{
	PyObject *before = (PyObject *)polling->dispatcher;
	unsigned long long address;
	PyObject *dispatcher;

	if (!PyArg_ParseTuple(args, "OKL", &dispatcher, &address, &polling->budget) ||
	    (dispatcher != Py_None && !is_instance(completion_dispatcher_type, dispatcher)))
		return NULL;
	polling->cq = (struct ibv_cq *)(uintptr_t)address;
	polling->dispatcher = dispatcher == Py_None || !address ?
				      NULL :
				      (struct completion_dispatcher *)Py_NewRef(dispatcher);
	Py_XDECREF(before);
	Py_RETURN_NONE;
}
