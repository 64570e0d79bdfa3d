/*
 * AdaptivePolling: the policy that decides how long the next wait of a task polls.
 *
 * A parked wait needs an event, system calls and iterations of the event loop until its task goes
 * on. That takes tens of microseconds; a message takes a few. If the last wait was not much longer
 * than that, polling a little longer than the last wait took saves nearly all of this time,
 * provided that the next message arrives in time. It does when the peer waits for answers, too. So
 * a wait polls only when that pays: after short waits, and the less often, the more often polling
 * found no message. A poll lasts at least as long as parking takes. So a miss at most doubles the
 * time of a wait that is as short, and a wait that was short because its message had nearly arrived
 * does not make the next one miss. The first poll needs two short waits: many peers send one
 * message, and no other one soon. A server polled in vain for each of them.
 *
 * A single miss says little. This loop or that of the peer may have had other work for once, such
 * as a message of another connection. If both sides parked several waits for that, a busy
 * connection among others that have a message now and then would hardly ever poll. So one miss
 * after several hits is not counted. For the same reason, a task whose polls find their messages
 * goes on polling after it has let the loop run for another task. Each time costs one hit: among
 * several busy connections, one event for the messages of all costs less than polling.
 */
#include "fast_path.h"

PyTypeObject *adaptive_polling_type;

/*
 * The measured part of a wake-up is the time from reading the event until the task goes on. Before
 * that the kernel raises the event and wakes the loop's thread. The whole cost of parking is
 * assumed to be the measured part times this factor. In the lab, the measured part is 50 to 120 us,
 * and a round trip takes 700 to 900 us longer if one side parks.
 */
#define PARKING_FACTOR 8
#define MAX_WAKEUP_NS 500000
/*
 * A wait is short if it takes less than the cost of parking times this factor. A peer that parks
 * too needs that long to answer, as long as one of the two sides parks.
 */
#define SHORT_WAIT_FACTOR 4
/* The consecutive short waits before the first poll. */
#define FIRST_SHORT_WAITS 2
/* Each missed poll makes polling less frequent, up to this number of misses. */
#define MAX_MISSES 6
/* The most hits that are counted. After these, a miss is not counted. */
#define FORGIVING_HITS 4

struct adaptive_polling {
	PyObject_HEAD PyObject *state;
	struct completion_dispatcher *dispatcher;
	long long wakeup;	  /* the average measured part of a wake-up, in nanoseconds */
	unsigned int hits;	  /* polls that found what they waited for, less those spent */
	unsigned int misses;	  /* counted since the last hit */
	unsigned int short_waits; /* consecutive ones since the last counted miss */
	char is_adaptive;
	char has_polled;
};

static PyObject *name_poll_budget;

static int adaptive_polling_init(PyObject *self, PyObject *args, PyObject *kwargs)
{
	PyObject *state;

	if (!PyArg_ParseTuple(args, "O", &state))
		return -1;
	replace(&((struct adaptive_polling *)self)->state, state);
	return 0;
}

static int adaptive_polling_traverse(PyObject *self, visitproc visit, void *arg)
{
	Py_VISIT(Py_TYPE(self));
	Py_VISIT(((struct adaptive_polling *)self)->state);
	Py_VISIT(((struct adaptive_polling *)self)->dispatcher);
	return 0;
}

static int adaptive_polling_clear(PyObject *self)
{
	Py_CLEAR(((struct adaptive_polling *)self)->state);
	Py_CLEAR(((struct adaptive_polling *)self)->dispatcher);
	return 0;
}

static void adaptive_polling_dealloc(PyObject *self)
{
	PyObject_GC_UnTrack(self);
	adaptive_polling_clear(self);
	simple_dealloc(self);
}

static int set_budget(const struct adaptive_polling *self, long long nanoseconds)
{
	PyObject *value = PyLong_FromLongLong(nanoseconds);
	int failed = !value || PyObject_SetAttr(self->state, name_poll_budget, value);

	Py_XDECREF(value);
	return failed ? -1 : 0;
}

static PyObject *adaptive_polling_open(PyObject *self, PyObject *args)
{
	struct adaptive_polling *polling = (struct adaptive_polling *)self;
	long long busy_poll;
	PyObject *dispatcher;
	int adaptive;

	if (!PyArg_ParseTuple(args, "OLp", &dispatcher, &busy_poll, &adaptive) ||
	    !is_instance(completion_dispatcher_type, dispatcher))
		return NULL;
	replace((PyObject **)&polling->dispatcher, dispatcher);
	polling->is_adaptive = adaptive && !busy_poll;
	return none_unless(set_budget(polling, busy_poll));
}

static PyObject *adaptive_polling_close(PyObject *self, PyObject *unused)
{
	Py_CLEAR(((struct adaptive_polling *)self)->dispatcher);
	return none_unless(set_budget((struct adaptive_polling *)self, -1));
}

/* Note a poll, and whether it found what it waited for. See AdaptivePolling.polled(). */
void note_poll(struct adaptive_polling *polling, int found)
{
	polling->has_polled = 1;
	if (found) {
		polling->hits += polling->hits < FORGIVING_HITS;
		polling->misses = 0;
		return;
	}
	if (polling->hits < FORGIVING_HITS) {
		polling->misses += polling->misses < MAX_MISSES;
		polling->short_waits = 0;
	}
	polling->hits = 0;
}

/* True if a poll that was preempted goes on after the loop has run. It spends a hit for that. */
int may_go_on(struct adaptive_polling *polling, enum preemption preempted)
{
	if (!polling->is_adaptive || preempted == BY_LOOP)
		return 1;
	if (!polling->hits)
		return 0;
	polling->hits--;
	return 1;
}

/* Note a wait. Returns 0, or -1 with an exception. See AdaptivePolling.parked(). */
int note_wait(struct adaptive_polling *polling, long long began, long long woken, long long now)
{
	long long arrived, wait, wakeup, parking, longest, budget;
	unsigned int needed;

	if (polling->dispatcher)
		polling->dispatcher->budget_start = now;
	if (!polling->is_adaptive)
		return 0;
	arrived = woken; /* without an event if another task polled it */
	if (polling->dispatcher && polling->dispatcher->last_event_at >= began)
		arrived = polling->dispatcher->last_event_at;
	wait = arrived - began;
	wakeup = now - arrived < MAX_WAKEUP_NS ? now - arrived : MAX_WAKEUP_NS;
	polling->wakeup = polling->wakeup ? (3 * polling->wakeup + wakeup) / 4 : wakeup;
	parking = PARKING_FACTOR * polling->wakeup;
	longest = SHORT_WAIT_FACTOR * parking;
	polling->short_waits = wait < longest ? polling->short_waits + 1 : 0;
	needed = polling->has_polled ? 1U << polling->misses : FIRST_SHORT_WAITS;
	/* After a miss it does not poll even once: the completions might be those of other tasks.
	 */
	if (polling->short_waits < needed)
		return set_budget(polling, polling->misses ? -1 : 0);
	budget = wait + wait / 2 > parking ? wait + wait / 2 : parking;
	return set_budget(polling, budget < longest ? budget : longest);
}

static PyObject *adaptive_polling_polled(PyObject *self, PyObject *found)
{
	int is_found = PyObject_IsTrue(found);

	if (is_found < 0)
		return NULL;
	note_poll((struct adaptive_polling *)self, is_found);
	Py_RETURN_NONE;
}

static PyObject *adaptive_polling_may_go_on(PyObject *self, PyObject *unused)
{
	return PyBool_FromLong(may_go_on((struct adaptive_polling *)self, BY_TASK));
}

static PyObject *adaptive_polling_parked(PyObject *self, PyObject *args)
{
	long long began, woken, now = 0;

	if (!PyArg_ParseTuple(args, "LL|L", &began, &woken, &now))
		return NULL;
	return none_unless(note_wait((struct adaptive_polling *)self, began, woken,
				     now ? now : (long long)now_ns()));
}

static PyMethodDef adaptive_polling_methods[] = {
	{ "open", adaptive_polling_open, METH_VARARGS,
	  "open(dispatcher, busy_poll, adaptive): begin. Each wait polls for `busy_poll` "
	  "nanoseconds. If that is 0 and `adaptive` is true, it polls when that pays." },
	{ "close", adaptive_polling_close, METH_NOARGS,
	  "Stop polling. Called before the completion queue is destroyed. Idempotent." },
	{ "polled", adaptive_polling_polled, METH_O,
	  "polled(found): note a poll of a wait, and whether it found what it waited for." },
	{ "may_go_on", adaptive_polling_may_go_on, METH_NOARGS,
	  "Return True if a poll that has found work for another task goes on after the loop has "
	  "run. One of the last polls that found what they waited for does not count any more." },
	{ "parked", adaptive_polling_parked, METH_VARARGS,
	  "parked(began, woken, now): note that a wait parked at `began`, was woken at `woken`, "
	  "and goes on `now`, all by time.monotonic_ns(). Without `now`: at this moment." },
	{ NULL, NULL, 0, NULL },
};

static PyMemberDef adaptive_polling_members[] = {
	{ "misses", T_UINT, offsetof(struct adaptive_polling, misses), READONLY,
	  "The number of misses since the last poll that found something, up to MAX_MISSES. One "
	  "that follows FORGIVING_HITS polls that found something does not count." },
	{ NULL, 0, 0, 0, NULL },
};

static PyType_Slot adaptive_polling_slots[] = {
	{ Py_tp_doc,
	  (void *)"AdaptivePolling(state): the polling policy of the waits of one task at a time. "
		  "It sets state.poll_budget, the nanoseconds that the next wait polls: 0 polls "
		  "once, -1 does not poll." },
	{ Py_tp_new, PyType_GenericNew },
	{ Py_tp_init, adaptive_polling_init },
	{ Py_tp_traverse, adaptive_polling_traverse },
	{ Py_tp_clear, adaptive_polling_clear },
	{ Py_tp_dealloc, adaptive_polling_dealloc },
	{ Py_tp_members, adaptive_polling_members },
	{ Py_tp_methods, adaptive_polling_methods },
	{ 0, NULL },
};

PyType_Spec adaptive_polling_spec = {
	.name = "aiordma._native._fast_path.AdaptivePolling",
	.basicsize = sizeof(struct adaptive_polling),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
	.slots = adaptive_polling_slots,
};

int prepare_adaptive_polling(PyObject *module)
{
	name_poll_budget = PyUnicode_InternFromString("poll_budget");
	return !name_poll_budget || PyModule_AddIntMacro(module, PARKING_FACTOR) ||
			       PyModule_AddIntMacro(module, SHORT_WAIT_FACTOR) ||
			       PyModule_AddIntMacro(module, MAX_WAKEUP_NS) ||
			       PyModule_AddIntMacro(module, MAX_MISSES) ||
			       PyModule_AddIntMacro(module, FIRST_SHORT_WAITS) ||
			       PyModule_AddIntMacro(module, FORGIVING_HITS) ?
		       -1 :
		       0;
}
