"""World: one simulated machine room, with its clock, its events and everything in it.

A world decides the order of everything that happens outside the program under test: when a message
arrives, when a worker thread runs, when a call of librdmacm or libibverbs fails. It draws all of
that from one seed. So the same seed gives the same run.

Time is virtual. It advances only when the program waits and nothing can happen earlier.
"""

from __future__ import annotations

import errno
import heapq
import itertools
import random
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from simulator import build

_module = build.load()
ffi: Any = _module.ffi
lib: Any = _module.lib

LATENCY = 10e-6
"""Seconds that a message takes, if the schedule does not decide otherwise."""


class Failure(Exception):
    """A failure of a simulated call, with its errno."""

    def __init__(self, code: int) -> None:
        super().__init__(errno.errorcode.get(code, str(code)))
        self.errno = code


class Stuck(BaseException):
    """The program waits, and nothing will ever happen."""


SPINS = 100
"""The iterations of a loop that do not wait, and take no time."""


class Schedule:
    """The moments of events: all take LATENCY. See RandomSchedule for those of a seed."""

    slowness = 1e-3
    """The longest time in seconds that a slow loop needs to notice an event."""

    def latency(self) -> float:
        """Return the seconds that a message takes."""
        return LATENCY

    def gap(self) -> float:
        """Return the seconds between the execution of two requests of a queue."""
        return self.latency()

    def is_late(self) -> bool:
        """Return True if a completion comes after the program has polled, and before it arms."""
        return False

    def is_slow(self) -> bool:
        """Return True if another event happens before the loop handles those that have happened."""
        return False

    def start(self) -> float:
        """Return the seconds until a worker thread begins a job."""
        return 0.0

    def call(self, name: str) -> float:
        """Return the seconds that a call of a worker thread takes."""
        return 0.0

    def answer(self, name: str) -> float:
        """Return the seconds after which a call of a worker thread returns what it has done."""
        return 0.0


class RandomSchedule(Schedule):
    """Moments that are drawn from a seed: most are short, some are long."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance

    def latency(self) -> float:
        return self._chance.choice((0.0, LATENCY, LATENCY, 1e-4, 1e-3))

    def is_late(self) -> bool:
        return self._chance.random() < 0.3

    def is_slow(self) -> bool:
        return self._chance.random() < 0.3

    def start(self) -> float:
        return self._chance.choice((0.0, 0.0, LATENCY, 1e-3, 0.05))

    def call(self, name: str) -> float:
        return self._chance.choice((0.0, 0.0, 0.0, LATENCY, 1e-3, 0.05))

    def answer(self, name: str) -> float:
        return self.call(name)


class LabSchedule(Schedule):
    """Moments as in the lab. The loop sees everything at once that happens at one moment."""

    slowness = 0.0

    def latency(self) -> float:
        return 1e-3

    def gap(self) -> float:
        return 0.0

    def is_slow(self) -> bool:
        return True


class SlowCalls(Schedule):
    """As Schedule, but some calls take a while in a worker thread: `seconds` by their names."""

    def __init__(self, **seconds: float) -> None:
        self._seconds = seconds

    def call(self, name: str) -> float:
        return self._seconds.get(name, 0.0)


@dataclass
class Calls:
    """The calls of the libraries: their counts, and those that must fail."""

    counts: Counter[str] = field(default_factory=Counter)
    failures: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    """By name: (the number of calls that succeed first, errno)."""
    hooks: dict[str, Callable[[], None]] = field(default_factory=dict)
    """By name: called at the beginning of each call. It can raise Failure."""
    log: list[str] = field(default_factory=list)
    """The names of all calls, in their order."""
    delays: dict[str, tuple[float, float]] = field(default_factory=dict)
    """By name: the seconds before and after the effect of a call in a worker thread."""
    any_hook: Callable[[str], None] | None = None
    """Called at the beginning of each call with its name. It can raise Failure."""

    def fail(self, name: str, code: int, *, after: int = 0) -> None:
        """Make the call of `name` fail with errno `code`, once, after `after` more calls."""
        self.failures.setdefault(name, []).append((self.counts[name] + after, code))

    def delay(self, name: str, before: float = 0.0, after: float = 0.0) -> None:
        """Make each call of `name` take that long before, and after, it has its effect."""
        self.delays[name] = (before, after)

    def enter(self, name: str) -> None:
        """Count a call.

        Raises:
            Failure: the call must fail.
        """
        number = self.counts[name]
        self.counts[name] += 1
        self.log.append(name)
        for entry in self.failures.get(name, ()):
            if entry[0] == number:
                self.failures[name].remove(entry)
                raise Failure(entry[1])
        if name in self.hooks:
            self.hooks[name]()
        if self.any_hook is not None:
            self.any_hook(name)


class World:
    """The events of a simulation, in the order of their virtual time."""

    def __init__(self, schedule: Schedule | None = None) -> None:
        self.now = 1000.0
        self.schedule = schedule or Schedule()
        self.calls = Calls()
        self.objects: dict[int, Any] = {}
        """The C objects of the program by their addresses."""
        self.keys: dict[int, Any] = {}
        """The memory regions and windows by their keys."""
        self.network: Any = None
        self.cm: Any = None
        self.datagrams: Any = None
        self.violations: list[str] = []
        """Violations of the rules of the C libraries, with their stacks."""
        self.before_step: list[Callable[[], bool | None]] = []
        """Called when the program waits. They start what the program has asked for, and return
        True if a thread of the program has run meanwhile."""
        self.steps = 0
        """The number of events that have happened."""
        self.threads: Any = None
        self._spins = 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    # --- events ---

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Call `action` at this time from now. Events of the same time keep their order."""
        heapq.heappush(self._events, (self.now + seconds, next(self._order), action))

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Call `action` at the time `when`."""
        heapq.heappush(self._events, (max(when, self.now), next(self._order), action))

    def step(self, limit: float | None) -> bool:
        """Advance the clock to the next event and make it happen.

        Return False if there is none before the time `limit`. The clock is then at `limit`.
        """
        self._spins = 0
        if any(start() for start in self.before_step):
            return True
        if self._events and (limit is None or self._events[0][0] <= limit):
            when, _, action = heapq.heappop(self._events)
            self.now = max(self.now, when)
            self.steps += 1
            action()
            return True
        if limit is not None:
            self.now = max(self.now, limit)
        return False

    def spin(self) -> None:
        """Note that the loop goes on without waiting. After SPINS times, each takes LATENCY."""
        self._spins += 1
        if self._spins > SPINS:
            if self.threads.is_worker:
                self.threads.park(LATENCY)
            else:
                self.step(self.now + LATENCY)
            self._spins = SPINS

    def overtake(self) -> None:
        """Let further events happen before the loop handles those that have happened."""
        while self.schedule.is_slow() and self.step(self.now + self.schedule.slowness):
            pass

    def settle(self, seconds: float = 1.0) -> None:
        """Let everything happen that happens within this time without the program."""
        limit = self.now + seconds
        while self.step(limit):
            pass

    def stuck(self, tasks: str) -> Stuck:
        """Return the exception for a program that waits though nothing can happen."""
        rules = "".join(f"\na rule was violated before: {text}" for text in self.violations)
        return Stuck(f"nothing can happen any more, and these wait: {tasks}{rules}")

    # --- objects ---

    def add(self, pointer: Any, thing: Any) -> Any:
        """Note a C object that the program has made. Return `pointer`."""
        self.objects[address_of(pointer)] = thing
        return pointer

    def get(self, pointer: Any, kind: type[Any]) -> Any:
        """Return the object of a C pointer.

        Raises:
            Failure: EINVAL, the object does not exist. That is a violation, too.
        """
        found = self.objects.get(address_of(pointer))
        if not isinstance(found, kind):
            self.violate(f"a call with a {kind.__name__} that does not exist")
            raise Failure(errno.EINVAL)
        return found

    def remove(self, pointer: Any, kind: type[Any]) -> Any:
        """Forget an object that the program destroys, and return it. Raises: as get()."""
        found = self.get(pointer, kind)
        del self.objects[address_of(pointer)]
        return found

    def all(self, kind: type[Any]) -> list[Any]:
        """Return the objects of this type."""
        return [thing for thing in self.objects.values() if isinstance(thing, kind)]

    def violate(self, text: str) -> None:
        """Note that the program has done something that it must not do."""
        stack = "".join(traceback.format_stack(limit=14)[:-1])
        self.violations.append(f"{text}\n{stack}")


def address_of(pointer: Any) -> int:
    """Return the address that a C pointer points to."""
    return int(ffi.cast("uintptr_t", pointer))


# --- the functions of the libraries ---

current: World | None = None
"""The world of this process. Without one, the machine has no RDMA device."""


def enter(world: World | None) -> None:
    """Make `world` the current one. None: there is none any more."""
    global current
    current = world


def park(seconds: float) -> None:
    """Let a worker thread wait inside a call. simulator.threads replaces this function."""


def define(name: str, function: Callable[..., Any]) -> None:
    """Define a function of librdmacm or libibverbs. `function` gets the world and its arguments.

    It raises Failure to fail with an errno. None as the result means success.
    """
    kind = ffi.typeof(getattr(lib, f"sim_{name}")).result.kind
    success = {"pointer": ffi.NULL, "void": None}.get(kind, 0)
    returns_errno = name.startswith("ibv_") and name not in ("ibv_query_gid", "ibv_init_ah_from_wc")

    def fail(code: int) -> Any:
        ffi.errno = code
        if kind in ("pointer", "void"):
            return success
        return code if returns_errno else -1

    def enter_call(*arguments: Any) -> Any:
        world = current
        if world is None:
            return fail(errno.ENODEV)
        try:
            world.calls.enter(name)
            before, after = world.calls.delays.get(name, (0.0, 0.0))
            park(world.schedule.call(name) + before)
            value = function(world, *arguments)
            park(world.schedule.answer(name) + after)
        except Failure as failure:
            return fail(failure.errno)
        except BaseException:
            world.violations.append(f"{name} failed in the simulator:\n{traceback.format_exc()}")
            return fail(errno.EFAULT)
        return success if value is None else value

    ffi.def_extern(name=f"sim_{name}")(enter_call)


def define_all(functions: dict[str, Any]) -> None:
    """Define the functions of a module that have names of librdmacm or libibverbs."""
    for name, function in functions.items():
        if name.startswith(("rdma_", "ibv_")):
            define(name, function)


def _not_simulated(world: World, *arguments: Any) -> None:
    raise Failure(errno.ENOSYS)


# Functions that the other modules of the simulator do not define fail with ENOSYS.
for _name in dir(lib):
    if _name.startswith(("sim_rdma_", "sim_ibv_")):
        define(_name.removeprefix("sim_"), _not_simulated)
