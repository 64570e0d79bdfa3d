/*
 * Calls on an id that block, made by threads that never hold the interpreter's lock.
 *
 * A thread of Python that makes such a call has to wait for the lock after each one. If the loop's
 * thread is busy, that takes 5 ms (sys.getswitchinterval()), and both threads are switched. These
 * threads make all calls of a job, then write to an eventfd, which the loop reads.
 */
#define _GNU_SOURCE /* SCHED_BATCH */
#include "helpers.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

/* The most threads of a pool. */
#define MAX_THREADS 64
/* If this number of threads is busy, another thread takes a job only if they make no progress. */
#define BUSY_THREADS 2
/* The time without a job being taken, after which the busy threads are taken to be blocked. */
#define STALL_NS 100000000
/* The time without work after which a thread ends. */
#define IDLE_NS 10000000000

struct pool {
	pthread_mutex_t lock;
	pthread_cond_t changed;
	struct aiordma_id_calls *first, **last;
	int threads;
	int idle;      /* threads that wait, and those that are being started */
	int busy;      /* threads with a job, except those that were taken to be blocked */
	int stalls;    /* how often the busy threads were taken to be blocked */
	int is_waking; /* a thread was called, and does not run yet */
	int watching;  /* idle threads that wait for the busy ones to take a job */
	long long last_taken;
};

/* rdma_resolve_route() waits for ibacm, if that runs, one call at a time: it has its own pool. */
static struct pool pools[2];
static pthread_once_t pools_once = PTHREAD_ONCE_INIT;

/* Guards `cell` and `is_dropped` of all calls, and the list below. */
static pthread_mutex_t ownership = PTHREAD_MUTEX_INITIALIZER;

/* The calls whose ids connect when their route is resolved, linked by `next_awaiting`. */
static struct aiordma_id_calls *awaiting_route;

static void reset_ownership(void)
{
	ownership = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
}

/* A forked child frees its objects, and does not have the thread that had locked it. */
__attribute__((constructor)) static void reset_ownership_in_children(void)
{
	pthread_atfork(NULL, NULL, reset_ownership);
}

/* The calls of one loop that have ended, and that it has not taken yet. */
struct aiordma_ended_calls {
	pthread_mutex_t lock;
	struct aiordma_id_calls *first, **last;
	int fd;
	int users; /* the loop, and each call that is under way */
};

/* Returns NULL with errno (EMFILE, ENOMEM) if it cannot be made. */
struct aiordma_ended_calls *aiordma_new_ended_calls(void)
{
	struct aiordma_ended_calls *ended = calloc(1, sizeof(*ended));

	if (!ended)
		return NULL;
	ended->fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
	if (ended->fd < 0) {
		free(ended);
		return NULL;
	}
	pthread_mutex_init(&ended->lock, NULL);
	ended->last = &ended->first;
	ended->users = 1;
	return ended;
}

int aiordma_ended_calls_fd(const struct aiordma_ended_calls *ended)
{
	return ended->fd;
}

static void release(struct aiordma_ended_calls *ended)
{
	int users;

	pthread_mutex_lock(&ended->lock);
	users = --ended->users;
	pthread_mutex_unlock(&ended->lock);
	if (users)
		return;
	close(ended->fd);
	pthread_mutex_destroy(&ended->lock);
	free(ended);
}

/* Calls that are still under way are not reported any more. */
void aiordma_free_ended_calls(struct aiordma_ended_calls *ended)
{
	release(ended);
}

/* Note that calls are in no list any more. Free those that Python does not use. Returns the rest.
 */
static struct aiordma_id_calls *end_calls(struct aiordma_id_calls *first)
{
	struct aiordma_id_calls **link = &first, *calls;

	pthread_mutex_lock(&ownership);
	while ((calls = *link)) {
		calls->is_under_way = 0;
		if (calls->is_dropped) {
			*link = calls->next;
			free(calls);
		} else {
			link = &calls->next;
		}
	}
	pthread_mutex_unlock(&ownership);
	return first;
}

/* Return the calls that have ended, each with the next one in `next`; NULL if there are none. */
struct aiordma_id_calls *aiordma_take_ended_calls(struct aiordma_ended_calls *ended)
{
	struct aiordma_id_calls *first;
	uint64_t count;

	pthread_mutex_lock(&ended->lock);
	if (read(ended->fd, &count, sizeof(count)) < 0)
		count = 0; /* EAGAIN: it was read before */
	first = ended->first;
	ended->first = NULL;
	ended->last = &ended->first;
	pthread_mutex_unlock(&ended->lock);
	return end_calls(first);
}

/* Returns NULL with errno if there is no memory. */
struct aiordma_id_calls *aiordma_new_id_calls(struct rdma_cm_id *id)
{
	struct aiordma_id_calls *calls = calloc(1, sizeof(*calls));

	if (calls)
		calls->id = id;
	return calls;
}

/* Note the error of a call: an errno, or -1 with errno. Returns 0 if there is none. */
static int failed(struct aiordma_id_calls *calls, int call, int result)
{
	if (!result)
		return 0;
	calls->failed = call;
	calls->error = result == -1 ? errno : positive(result);
	return 1;
}

/* Remove calls from the list, if they are in it. */
static void stop_awaiting(const struct aiordma_id_calls *calls)
{
	struct aiordma_id_calls **link = &awaiting_route;

	while (*link && *link != calls)
		link = &(*link)->next_awaiting;
	if (*link)
		*link = calls->next_awaiting;
}

/* Return the calls of `id` that await its route; NULL if there are none. */
static struct aiordma_id_calls *awaiting(const struct rdma_cm_id *id)
{
	struct aiordma_id_calls *calls = awaiting_route;

	while (calls && calls->id != id)
		calls = calls->next_awaiting;
	return calls;
}

/* Have an id not connect when its route is resolved. */
void aiordma_forget_route(struct rdma_cm_id *id)
{
	struct aiordma_id_calls *calls;

	pthread_mutex_lock(&ownership);
	while ((calls = awaiting(id)))
		stop_awaiting(calls);
	pthread_mutex_unlock(&ownership);
}

static void await_route(struct aiordma_id_calls *calls)
{
	pthread_mutex_lock(&ownership);
	if (!calls->is_dropped) {
		calls->next_awaiting = awaiting_route;
		awaiting_route = calls;
	}
	pthread_mutex_unlock(&ownership);
}

/*
 * Connect an id whose calls ask for that: the event ROUTE_RESOLVED was read, and is not
 * acknowledged yet, so that the id exists. Returns 1 if rdma_connect() has succeeded. Python then
 * does not need the event.
 */
int aiordma_connect_resolved(struct rdma_cm_id *id)
{
	struct rdma_conn_param parameters;
	struct aiordma_id_calls *calls;
	char private_data[256];
	int is_wanted, result;

	pthread_mutex_lock(&ownership);
	calls = awaiting(id);
	is_wanted = calls && !calls->is_cancelled;
	if (is_wanted) {
		parameters = calls->parameters;
		memcpy(private_data, calls->private_data, sizeof(private_data));
		parameters.private_data = private_data;
	}
	pthread_mutex_unlock(&ownership);
	if (!is_wanted)
		return 0;
	result = rdma_connect(id, &parameters);
	pthread_mutex_lock(&ownership);
	calls = awaiting(id); /* NULL if they were dropped meanwhile */
	if (calls) {
		stop_awaiting(calls);
		failed(calls, AIORDMA_CONNECT, result);
	}
	pthread_mutex_unlock(&ownership);
	return !result;
}

int aiordma_destroy_id(struct rdma_cm_id *id)
{
	aiordma_forget_route(id); /* another id can have the address soon */
	return rdma_destroy_id(id);
}

/*
 * Free calls that Python does not use any more. If they are under way, they are freed at their end:
 * by their thread, or by aiordma_take_ended_calls() if they are in its list already.
 */
void aiordma_free_id_calls(struct aiordma_id_calls *calls)
{
	int is_under_way;

	pthread_mutex_lock(&ownership);
	is_under_way = calls->is_under_way;
	calls->is_dropped = 1;
	stop_awaiting(calls);
	calls->cell = NULL;
	pthread_mutex_unlock(&ownership);
	if (!is_under_way)
		free(calls);
}

static int create_qp(struct aiordma_id_calls *calls)
{
	int result = rdma_create_qp(calls->id, calls->pd, &calls->init);

	if (result)
		return result;
	pthread_mutex_lock(&ownership);
	if (calls->cell)
		__atomic_store_n(calls->cell, calls->id->qp, __ATOMIC_RELEASE);
	pthread_mutex_unlock(&ownership);
	return 0;
}

static int post_receives(struct aiordma_id_calls *calls)
{
	struct ibv_sge sge = { .length = calls->slot_size, .lkey = calls->lkey };
	struct ibv_recv_wr *bad, wr = { .sg_list = &sge, .num_sge = 1 };
	int slot, error = 0;

	errno = 0;
	for (slot = 0; slot < calls->slots && !error; slot++) {
		sge.addr = calls->address + (uint64_t)slot * calls->slot_size;
		wr.wr_id = calls->first_wr_id + slot;
		error = positive(ibv_post_recv(calls->id->qp, &wr, &bad));
	}
	return error;
}

/*
 * Make the calls in order, until one fails. A queue pair is also destroyed if its id could not be:
 * `failed` and `error` are then those of the last failure.
 */
void aiordma_make_id_calls(struct aiordma_id_calls *calls)
{
	if (__atomic_load_n(&calls->is_cancelled, __ATOMIC_RELAXED))
		return;
	if (calls->calls & AIORDMA_CREATE_QP && failed(calls, AIORDMA_CREATE_QP, create_qp(calls)))
		return;
	if (calls->calls & AIORDMA_POST_RECV &&
	    failed(calls, AIORDMA_POST_RECV, post_receives(calls)))
		return;
	if (calls->calls & AIORDMA_CONNECT)
		await_route(calls); /* the event can be read before rdma_resolve_route() returns */
	if (calls->calls & AIORDMA_RESOLVE_ROUTE &&
	    failed(calls, AIORDMA_RESOLVE_ROUTE,
		   rdma_resolve_route(calls->id, calls->timeout_ms))) {
		aiordma_forget_route(calls->id);
		return;
	}
	if (calls->calls & AIORDMA_ACCEPT &&
	    failed(calls, AIORDMA_ACCEPT, rdma_accept(calls->id, &calls->parameters)))
		return;
	if (calls->calls & AIORDMA_DISCONNECT &&
	    failed(calls, AIORDMA_DISCONNECT, rdma_disconnect(calls->id)))
		return;
	if (calls->calls & AIORDMA_DESTROY_ID)
		failed(calls, AIORDMA_DESTROY_ID, aiordma_destroy_id(calls->id));
	if (calls->calls & AIORDMA_DESTROY_QP)
		failed(calls, AIORDMA_DESTROY_QP, aiordma_destroy_qp(calls->qp));
}

/* Report the end of the calls to their loop. */
static void report(struct aiordma_id_calls *calls)
{
	struct aiordma_ended_calls *ended = calls->ended;
	const uint64_t one = 1;
	int is_dropped, is_first = 0;

	pthread_mutex_lock(&ended->lock);
	pthread_mutex_lock(&ownership);
	is_dropped = calls->is_dropped;
	pthread_mutex_unlock(&ownership);
	if (is_dropped) {
		free(calls);
	} else {
		is_first = !ended->first;
		calls->next = NULL;
		*ended->last = calls;
		ended->last = &calls->next;
	}
	pthread_mutex_unlock(&ended->lock);
	/* The loop takes all of them at once. */
	if (is_first && write(ended->fd, &one, sizeof(one)) < 0)
		errno = 0; /* EAGAIN: the loop has not read 2^64 - 2 reports */
	release(ended);
}

/* Make the calls in this thread, and report their end. */
void aiordma_run_id_calls(struct aiordma_id_calls *calls)
{
	aiordma_make_id_calls(calls);
	report(calls);
}

static long long monotonic_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static void prepare_pools(void)
{
	pthread_condattr_t attributes;
	struct pool *pool;

	pthread_condattr_init(&attributes);
	pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
	for (pool = pools; pool < pools + 2; pool++) {
		pthread_mutex_init(&pool->lock, NULL);
		pthread_cond_init(&pool->changed, &attributes);
		pool->last = &pool->first;
	}
	pthread_condattr_destroy(&attributes);
}

/* Wait for a change of the pool, at most until `end_at`. */
static void wait_until(struct pool *pool, long long end_at)
{
	struct timespec end = { end_at / 1000000000, end_at % 1000000000 };
	int watches = !!pool->first;

	pool->watching += watches;
	pthread_cond_timedwait(&pool->changed, &pool->lock, &end);
	pool->watching -= watches;
	pool->is_waking = 0;
}

/*
 * Wait for a job that the busy threads do not take, and return it. Returns NULL if the thread was
 * idle for too long. Called with the lock held, by a thread that is counted as idle.
 */
static struct aiordma_id_calls *next_job(struct pool *pool)
{
	long long now = monotonic_ns(), end_at = now + IDLE_NS, wait_end;
	struct aiordma_id_calls *job;

	while (!pool->first || pool->busy >= BUSY_THREADS) {
		wait_end = pool->first ? pool->last_taken + STALL_NS : end_at;
		if (now >= wait_end)
			break;
		wait_until(pool, wait_end);
		now = monotonic_ns();
	}
	pool->idle--;
	job = pool->first;
	if (!job)
		return NULL;
	if (pool->busy >= BUSY_THREADS) { /* they are blocked, and do not count any more */
		pool->stalls++;
		pool->busy = 0;
	}
	pool->first = job->next;
	if (!pool->first)
		pool->last = &pool->first;
	pool->last_taken = now;
	pool->busy++;
	return job;
}

static void *work(void *argument);

/* Returns 0 or an errno. Called with the lock held. */
static int start_thread(struct pool *pool)
{
	sigset_t all, before;
	pthread_t thread;
	int error;

	if (pool->threads >= MAX_THREADS)
		return 0;
	sigfillset(&all); /* Python handles signals in its own threads */
	pthread_sigmask(SIG_SETMASK, &all, &before);
	error = pthread_create(&thread, NULL, work, pool);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	if (error)
		return error;
	pthread_detach(thread);
	pool->threads++;
	pool->idle++;
	pool->is_waking = 1;
	return 0;
}

/*
 * Have an idle thread take the first job, or watch whether the busy threads take it. A thread that
 * wakes already does that, and calls the next one if there are more jobs. Returns 0, or an errno if
 * there is no idle thread and none can be started.
 *
 * Called with the lock held. If `signals` is set, the caller signals pool->changed after it has
 * unlocked: the thread would wake on another processor, and sleep again until then.
 */
static int call_thread(struct pool *pool, int *signals)
{
	*signals = 0;
	if (pool->is_waking || (pool->busy >= BUSY_THREADS && pool->watching))
		return 0;
	if (!pool->idle)
		return start_thread(pool);
	pool->is_waking = *signals = 1;
	return 0;
}

/*
 * Do not preempt the thread that has submitted a job. It continues, and often submits more jobs
 * before the first one begins. Two context switches less for each job.
 */
static void use_batch_scheduling(void)
{
	struct sched_param parameters;
	int policy;

	if (!pthread_getschedparam(pthread_self(), &policy, &parameters) && policy == SCHED_OTHER)
		pthread_setschedparam(pthread_self(), SCHED_BATCH, &parameters);
}

static void *work(void *argument)
{
	struct aiordma_id_calls *job;
	struct pool *pool = argument;
	int signals, stalls;

	use_batch_scheduling();
	pthread_mutex_lock(&pool->lock);
	pool->is_waking = 0;
	while ((job = next_job(pool))) {
		stalls = pool->stalls;
		signals = 0;
		if (pool->first)
			call_thread(pool, &signals);
		pthread_mutex_unlock(&pool->lock);
		if (signals)
			pthread_cond_signal(&pool->changed);
		aiordma_run_id_calls(job);
		pthread_mutex_lock(&pool->lock);
		pool->busy -= pool->stalls == stalls; /* else it was taken to be blocked */
		pool->idle++;
	}
	pool->threads--;
	pthread_mutex_unlock(&pool->lock);
	return NULL;
}

/*
 * Have a thread make the calls, and report their end to `ended`. Does not block. If the system
 * allows no thread, this thread makes them: a slow loop is better than an id that is never
 * destroyed.
 */
void aiordma_submit_id_calls(struct aiordma_id_calls *calls, struct aiordma_ended_calls *ended)
{
	struct pool *pool = &pools[!!(calls->calls & AIORDMA_RESOLVE_ROUTE)];
	int error, is_queued, signals;

	pthread_once(&pools_once, prepare_pools);
	aiordma_own_id_calls(calls, ended);
	pthread_mutex_lock(&pool->lock);
	error = call_thread(pool, &signals);
	is_queued = !error || pool->threads;
	if (is_queued) {
		*pool->last = calls;
		pool->last = &calls->next;
	}
	pthread_mutex_unlock(&pool->lock);
	if (signals)
		pthread_cond_signal(&pool->changed);
	if (!is_queued)
		aiordma_run_id_calls(calls);
}

/* Note that the calls are under way: aiordma_run_id_calls() follows. */
void aiordma_own_id_calls(struct aiordma_id_calls *calls, struct aiordma_ended_calls *ended)
{
	calls->next = NULL;
	calls->ended = ended;
	calls->is_under_way = 1;
	pthread_mutex_lock(&ended->lock);
	ended->users++;
	pthread_mutex_unlock(&ended->lock);
}
