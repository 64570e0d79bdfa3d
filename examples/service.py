"""Serve counters, in a way that survives faults of the network, the clients and itself.

    python examples/service.py [HOST] [PORT] [--database FILE] [--monitor PORT] [--grace SECONDS]

A client adds to a counter, and gets the new total: see service_client.py. A request is an id of 16
bytes, then a name and an amount. The answer is the id and the total.

- A client that got no answer repeats its request, over another connection. The id is stored in the
  same transaction as the total, so that the amount is added once, even if the service was killed
  in between.
- At SIGTERM or Ctrl-C the service rejects new peers, closes the idle connections, and gives the
  others time to send the answers in progress. A second signal ends it immediately.
- A client whose machine loses power is noticed by `keepalive`.
- HTTP requests for /live, /ready and /metrics are answered on the monitor port of 127.0.0.1.
  /ready makes a connection to the service through the RDMA device.
"""

import argparse
import asyncio
import contextlib
import signal
import sqlite3
import threading

from aiohttp import web
from prometheus_client import generate_latest

import aiordma
from aiordma.prometheus import StatsCollector
from aiordma.rdmacm import device_addresses

OPTIONS = aiordma.ConnectionOptions(keepalive=10, max_message_size=256)
LIMITS = aiordma.ListenerLimits(max_connections=1000)
READY_SECONDS = 2.0
ID_SIZE = 16


class Counters:
    """The totals and the answered requests, in a database."""

    def __init__(self, path: str) -> None:
        self._lock = threading.Lock()
        self._database = sqlite3.connect(path, check_same_thread=False, timeout=60)
        self._database.execute("CREATE TABLE IF NOT EXISTS counters (name PRIMARY KEY, total)")
        self._database.execute("CREATE TABLE IF NOT EXISTS answers (id PRIMARY KEY, total)")

    def add(self, request_id: bytes, name: str, amount: int) -> int:
        """Add to a counter once for each id, and return the total. Called in a worker thread."""
        with self._lock, self._database as transaction:
            query = "SELECT total FROM answers WHERE id = ?"
            if answered := transaction.execute(query, (request_id,)).fetchone():
                return int(answered[0])
            query = "SELECT total FROM counters WHERE name = ?"
            total = sum(transaction.execute(query, (name,)).fetchone() or ()) + amount
            transaction.execute("REPLACE INTO counters VALUES (?, ?)", (name, total))
            transaction.execute("INSERT INTO answers VALUES (?, ?)", (request_id, total))
            return total

    def close(self) -> None:
        with self._lock:
            self._database.close()


class Service:
    """A service that runs one task for each peer, in one task group."""

    def __init__(self, counters: Counters) -> None:
        self.is_stopping = False
        self.collector = StatsCollector()
        self._counters = counters
        self._idle: set[aiordma.Connection] = set()

    async def run(self, listener: aiordma.Listener, stop: asyncio.Event, grace: float) -> None:
        """Serve until `stop` is set, then finish within `grace` seconds."""
        with contextlib.suppress(TimeoutError), self.collector.watch("counters", listener):
            async with asyncio.timeout(None) as deadline, asyncio.TaskGroup() as tasks:
                serving = tasks.create_task(listener.serve(self._serve))
                await stop.wait()
                deadline.reschedule(asyncio.get_running_loop().time() + grace)
                self.is_stopping = True
                for connection in [*self._idle]:
                    tasks.create_task(connection.aclose())
                await listener.aclose()
                await serving

    async def _serve(self, connection: aiordma.Connection) -> None:
        # serve() logs the error of a peer that fails, and the collector counts it.
        with self.collector.watch("counters", connection):
            while not self.is_stopping:
                try:
                    message = await self._next(connection)
                except aiordma.ConnectionClosed:
                    return
                await connection.send(await self._answer(message))

    async def _next(self, connection: aiordma.Connection) -> bytes:
        """Return the next message. It is the place where a connection is idle."""
        self._idle.add(connection)
        try:
            return await connection.recv()
        finally:
            self._idle.discard(connection)

    async def _answer(self, message: bytes) -> bytes:
        if not message:  # a test of the connection
            return b""
        request_id, text = message[:ID_SIZE], message[ID_SIZE:]
        try:
            name, amount = text.decode().rsplit(" ", 1)
            total = await asyncio.to_thread(self._counters.add, request_id, name, int(amount))
        except ValueError as error:
            return request_id + f"error: {error}".encode()
        return request_id + str(total).encode()


# --- for the programs that watch the service ---


async def monitor(service: Service, address: tuple[str, int], port: int) -> web.AppRunner:
    """Start to answer HTTP requests."""

    async def live(_: web.Request) -> web.Response:
        return web.Response(text="live\n")

    async def ready(_: web.Request) -> web.Response:
        if service.is_stopping:
            return web.Response(status=503, text="stopping\n")
        try:
            async with asyncio.timeout(READY_SECONDS), aiordma.connect(*address) as connection:
                await connection.send(b"")
                await connection.recv()
        except (aiordma.RdmaError, TimeoutError) as error:
            return web.Response(status=503, text=f"{type(error).__name__}: {error}\n")
        return web.Response(text="ready\n")

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(), content_type="text/plain")

    application = web.Application()
    for handler in (live, ready, metrics):
        application.router.add_get(f"/{handler.__name__}", handler)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    return runner


# --- the program ---


def stop_on_signals() -> asyncio.Event:
    """Return an event that the first signal sets. The second signal cancels the calling task."""
    loop, stop, task = asyncio.get_running_loop(), asyncio.Event(), asyncio.current_task()
    assert task is not None

    def on_signal() -> None:
        if stop.is_set():
            task.cancel()
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    return stop


async def serve(arguments: argparse.Namespace) -> None:
    stop = stop_on_signals()
    host, port = arguments.host or device_addresses()[0].host, arguments.port
    async with aiordma.listen(host, port, options=OPTIONS, limits=LIMITS) as listener:
        with contextlib.closing(Counters(arguments.database)) as counters:
            service = Service(counters)
            monitoring = await monitor(service, listener.local_address, arguments.monitor)
            print(f"listening on port {listener.local_address[1]}", flush=True)
            print(f"monitor: http://127.0.0.1:{monitoring.addresses[0][1]}/metrics", flush=True)
            try:
                await service.run(listener, stop, arguments.grace)
            finally:
                await monitoring.cleanup()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("host", nargs="?", help="an RDMA address of this machine (default: any)")
    parser.add_argument("port", nargs="?", type=int, default=7471, help="0: any free port")
    parser.add_argument("--database", default="counters.sqlite", metavar="FILE")
    parser.add_argument("--monitor", type=int, default=9471, metavar="PORT", help="0: any free")
    parser.add_argument("--grace", type=float, default=10.0, metavar="SECONDS")
    arguments = parser.parse_args()
    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(serve(arguments))


if __name__ == "__main__":
    main()
