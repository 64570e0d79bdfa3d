"""Simulation: the devices, and a program that uses them."""

from __future__ import annotations

import gc
import random
import socket
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from unittest import mock

import simulator.endpoints  # noqa: F401  it only defines functions
from simulator import loops as simulated_loops
from simulator import world as worlds
from simulator.cm import ConnectionManager
from simulator.datagrams import Datagrams
from simulator.network import Network
from simulator.verbs import Device, QueuePair
from simulator.world import RandomSchedule, Schedule, World, ffi

# isort: split
import loops

from aiordma.cm import establishing
from aiordma.dispatch import cm_events
from aiordma.loop.current import running_loop
from aiordma.loop.workers import run_in_worker
from aiordma.rdmacm import SocketAddress, parse_address
from aiordma.rdmacm import devices as rdma_devices
from aiordma.rdmacm.contexts import device_contexts

T = TypeVar("T")


class Simulation:
    """Two devices, and one program that has both. Devices of one kind are connected.

    run() runs the program. Afterwards nothing may be left of what it has made.
    """

    def __init__(
        self,
        *,
        seed: int | None = None,
        iwarp: bool = False,
        schedule: Schedule | None = None,
        devices: tuple[Device, Device] | None = None,
    ) -> None:
        if seed is not None:
            schedule = RandomSchedule(random.Random(seed))
        self.world = World(schedule)
        self.network = Network(self.world)
        self.near, self.far = devices or (
            Device("sim0", "10.0.0.1", "fd00::1", iwarp=iwarp),
            Device("sim1", "10.0.0.2", "fd00::2", iwarp=iwarp),
        )
        self.cm = ConnectionManager(self.world, [self.near, self.far])
        self.datagrams = Datagrams(self.world, self.network)
        self.names: dict[str, list[str]] = {}
        """The addresses of each host name. The system resolves no other name."""

    def run(self, body: Callable[[], Coroutine[Any, Any, T]], kind: str = "asyncio") -> T:
        """Run `body()` on a new loop of this kind, "asyncio" or "trio". Return its result.

        Raises:
            AssertionError: the program has done what it must not do, or left something behind.
        """
        from simulator.threads import simulated_threads

        worlds.enter(self.world)
        gc.freeze()  # so that collecting garbage examines only what this program makes
        try:
            with simulated_threads(self.world) as threads, self._machine():
                result = simulated_loops.run(self.world, kind, body)
                for _ in range(4):  # these calls can submit jobs, and jobs such calls
                    threads.make_guarded_calls()
                    gc.collect()
                    self.world.settle(60.0)
                assert not threads.alive, f"{threads.alive} jobs of worker threads are not done"
        finally:
            gc.unfreeze()
            worlds.enter(None)
            for device in self.cm.devices:
                device.close()
        self.cm.free_default_domains()
        self.check()
        return result

    def queue_pairs(self) -> list[QueuePair]:
        """Return the queue pairs that exist."""
        return self.world.all(QueuePair)

    @contextmanager
    def _machine(self) -> Iterator[None]:
        """Let the program see a machine with the addresses of the devices and with `names`."""

        real = socket.getaddrinfo

        def resolve(host: str | None, port: Any, *args: Any, **more: Any) -> list[tuple[Any, ...]]:
            self.world.calls.enter("getaddrinfo")
            if host in self.names:
                return [_resolved(numeric, port) for numeric in self.names[host]]
            return real(host, port, flags=socket.AI_NUMERICHOST)

        def interfaces() -> list[tuple[str, SocketAddress]]:
            hosts = [host for device in self.cm.devices for host in device.hosts]
            return [("eth0", parse_address(host)) for host in hosts]

        def run(kind: str, body: Callable[[], Coroutine[Any, Any, T]]) -> T:
            return simulated_loops.run(self.world, kind, lambda: loops.in_nursery(body))

        async def to_thread(function: Callable[..., T], *arguments: Any) -> T:
            return await run_in_worker(running_loop(), lambda: function(*arguments))

        with (
            mock.patch.multiple(
                loops,
                run=run,
                to_thread=to_thread,
                block=self.world.settle,
                block_until=lambda condition, what: self.world.threads.wait_until(condition),
            ),
            mock.patch.multiple(
                device_contexts, _lists=[], _devices={}, _removed=set(), _detached=set()
            ),
            mock.patch.object(socket, "getaddrinfo", resolve),
            mock.patch.object(cm_events, "_initialised", False),
            mock.patch.object(establishing, "interface_addresses", interfaces),
            mock.patch.object(rdma_devices, "interface_addresses", interfaces),
        ):
            yield

    def check(self) -> None:
        """Check what must hold at the end.

        Raises:
            AssertionError: a rule was violated, or an object was not destroyed.
        """
        assert not self.world.violations, "\n".join(self.world.violations)
        left = self.left()
        assert not left, f"not destroyed: {left}"

    def exit_process(self) -> None:
        """Free all C objects, as the kernel does at the end of a process."""
        self.world.objects.clear()
        self.cm.default_domains.clear()

    def left(self) -> Counter[str]:
        """Return the number of objects of each kind that exist, apart from lists of devices."""
        things = self.world.objects.values()
        return Counter(type(one).__qualname__ for one in things if not isinstance(one, ffi.CData))


def _resolved(host: str, port: Any) -> tuple[Any, ...]:
    """Return what getaddrinfo(3) returns for a numeric host."""
    address = parse_address(host, int(port or 0))
    more = (0, address.scope_id) if address.family == socket.AF_INET6 else ()
    return (address.family, socket.SOCK_STREAM, 0, "", (address.host, address.port, *more))
