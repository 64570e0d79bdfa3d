"""Simulation: the devices, and a program that uses them."""

from __future__ import annotations

import gc
import random
import socket
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from unittest import mock

from simulator import world as worlds
from simulator.cm import Channel, ConnectionManager, Event, Id
from simulator.datagrams import Datagrams
from simulator.endpoints import AddrInfo
from simulator.network import Network
from simulator.verbs import (
    AddressHandle,
    CompletionQueue,
    Device,
    Domain,
    QueuePair,
    Region,
    SharedReceives,
    Window,
)
from simulator.verbs import (
    Channel as CompletionChannel,
)
from simulator.world import RandomSchedule, World

# isort: split
from aiordma.cm import establishing
from aiordma.dispatch import cm_events
from aiordma.rdmacm import SocketAddress, parse_address

T = TypeVar("T")

_KINDS = (
    AddrInfo, AddressHandle, Channel, Event, Id, CompletionChannel, CompletionQueue, Domain,
    QueuePair, Region, SharedReceives, Window,
)  # fmt: skip


class Simulation:
    """Two connected devices of a kind, and one program that has both.

    run() runs the program. Afterwards nothing may be left of what it has made.
    """

    def __init__(self, *, seed: int | None = None, iwarp: bool = False) -> None:
        schedule = None if seed is None else RandomSchedule(random.Random(seed))
        self.world = World(schedule)
        self.network = Network(self.world)
        self.near = Device("sim0", "10.0.0.1", "fd00::1", iwarp=iwarp)
        self.far = Device("sim1", "10.0.0.2", "fd00::2", iwarp=iwarp)
        self.cm = ConnectionManager(self.world, [self.near, self.far])
        self.datagrams = Datagrams(self.world, self.network)
        self.names: dict[str, list[str]] = {}
        """The addresses of each host name. The system resolves no other name."""

    def run(self, body: Callable[[], Coroutine[Any, Any, T]], kind: str = "asyncio") -> T:
        """Run `body()` on a new loop of this kind, "asyncio" or "trio". Return its result.

        Raises:
            AssertionError: the program has done what it must not do, or left something behind.
        """
        from simulator import loops
        from simulator.threads import simulated_threads

        worlds.enter(self.world)
        gc.freeze()  # so that collecting garbage examines only what this program makes
        try:
            with self._machine(), simulated_threads(self.world) as threads:
                result = loops.run(self.world, kind, body)
                gc.collect()
                for _ in range(2):  # these calls can submit jobs, and jobs such calls
                    for loop, call in threads.guarded:
                        if loop.is_closed():
                            call.run()
                    self.world.settle(60.0)
                assert not threads.alive, f"{threads.alive} jobs of worker threads are not done"
        finally:
            gc.unfreeze()
            worlds.enter(None)
        self.cm.free_default_domains()
        self.check()
        return result

    def queue_pairs(self) -> list[QueuePair]:
        """Return the queue pairs that exist."""
        return self.world.all(QueuePair)

    @contextmanager
    def _machine(self) -> Iterator[None]:
        """Let the program see a machine with the addresses of the devices and with `names`."""

        def resolve(host: str, port: Any, **more: Any) -> list[tuple[Any, ...]]:
            self.world.calls.enter("getaddrinfo")
            if host not in self.names:
                raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
            return [_resolved(numeric, port) for numeric in self.names[host]]

        def interfaces() -> list[tuple[str, SocketAddress]]:
            hosts = [host for device in self.cm.devices for host in device.hosts]
            return [("eth0", parse_address(host)) for host in hosts]

        with (
            mock.patch.object(socket, "getaddrinfo", resolve),
            mock.patch.object(cm_events, "_initialised", False),
            mock.patch.object(establishing, "interface_addresses", interfaces),
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

    def left(self) -> dict[str, int]:
        """Return the number of objects of each kind that exist."""
        counts = {kind.__qualname__: len(self.world.all(kind)) for kind in _KINDS}
        return {name: count for name, count in counts.items() if count}


def _resolved(host: str, port: Any) -> tuple[Any, ...]:
    """Return what getaddrinfo(3) returns for a numeric host."""
    address = parse_address(host, int(port or 0))
    more = (0, address.scope_id) if address.family == socket.AF_INET6 else ()
    return (address.family, socket.SOCK_STREAM, 0, "", (address.host, address.port, *more))
