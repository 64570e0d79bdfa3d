"""Serve until SIGTERM, then finish the answers in progress, so that none is lost.

    python examples/tutorial/7_digest_server.py [HOST] [PORT] [--grace SECONDS] [--work SECONDS]

The service answers each message with its SHA-256 digest, slowly. At SIGTERM or Ctrl-C it stops
accepting peers, closes the idle connections, and gives the others time to send their answers.
A second signal ends the service immediately.
"""

import argparse
import asyncio
import contextlib
import hashlib
import signal

import aiordma


class Service:
    """A service that runs one task for each peer, in one task group."""

    def __init__(self, work_seconds: float) -> None:
        self.answered = 0
        self._work_seconds = work_seconds
        self._is_stopping = False
        self._idle: set[aiordma.Connection] = set()

    async def run(self, listener: aiordma.Listener, stop: asyncio.Event, grace: float) -> None:
        """Serve until `stop` is set, then finish within `grace` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None) as deadline, asyncio.TaskGroup() as tasks:
                tasks.create_task(self._accept_all(listener, tasks))
                await stop.wait()
                deadline.reschedule(asyncio.get_running_loop().time() + grace)
                self._is_stopping = True
                await listener.aclose()
                for connection in [*self._idle]:
                    tasks.create_task(connection.aclose())

    async def _accept_all(self, listener: aiordma.Listener, tasks: asyncio.TaskGroup) -> None:
        async for request in listener:
            tasks.create_task(self._serve(request))

    async def _serve(self, request: aiordma.ConnectRequest) -> None:
        # An exception would cancel the whole group, so a peer that fails must not raise one.
        with contextlib.suppress(aiordma.RdmaError):
            async with request.accept() as connection:
                while not self._is_stopping:
                    message = await self._next(connection)
                    await connection.send(await self._answer(message))
                    self.answered += 1

    async def _answer(self, message: bytes) -> bytes:
        await asyncio.sleep(self._work_seconds)
        return hashlib.sha256(message).digest()

    async def _next(self, connection: aiordma.Connection) -> bytes:
        """Return the next message.

        Raises:
            LocalClosed: the service stopped before a message came.
        """
        self._idle.add(connection)
        try:
            return await connection.recv()
        finally:
            self._idle.discard(connection)


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


async def serve(host: str | None, port: int, grace: float, work: float) -> None:
    service = Service(work)
    stop = stop_on_signals()
    async with aiordma.listen(host, port) as listener:
        print(f"listening on port {listener.local_address[1]}", flush=True)
        await service.run(listener, stop, grace)
    print(f"answered {service.answered} messages", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("host", nargs="?", help="an RDMA address of this machine (default: all)")
    parser.add_argument("port", nargs="?", type=int, default=7471, help="0: any free port")
    parser.add_argument("--grace", type=float, default=10.0, metavar="SECONDS")
    parser.add_argument(
        "--work", type=float, default=0.5, metavar="SECONDS", help="for each message"
    )
    arguments = parser.parse_args()
    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(serve(arguments.host, arguments.port, arguments.grace, arguments.work))


if __name__ == "__main__":
    main()
