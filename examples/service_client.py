"""Add to a counter of service.py, however often the connection ends meanwhile.

    python examples/service_client.py HOST NAME [AMOUNT] [--port PORT] [--times N] [--limit SECONDS]

Each request has an id. When the connection ends, the client connects again, and repeats the
requests that have no answer. The service adds the amount of each id once. Between two attempts to
connect, the client waits for a random time, whose limit grows from 0.1 s to 5 s, so that a thousand
clients do not come back in the same moment.
"""

import argparse
import asyncio
import contextlib
import random
import sys
import uuid
from collections.abc import AsyncIterator

import aiordma

OPTIONS = aiordma.ConnectionOptions(keepalive=2, peer_timeout=6, max_message_size=256)
CONNECT_SECONDS = 5.0
"""Connecting to a machine without power would take more than a minute."""
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0
MAX_REQUESTS = 16
"""Requests under way at the same time. Both sides have more receives, so that no send waits."""
ID_SIZE = 16


class Client:
    """Requests to the service, over one connection at a time."""

    def __init__(self, host: str, port: int) -> None:
        self._address = host, port
        self._connection: aiordma.Connection | None = None
        self._limit = asyncio.Semaphore(MAX_REQUESTS)
        self._requests: dict[bytes, bytes] = {}
        self._answers: dict[bytes, asyncio.Future[str]] = {}
        self.connections = 0

    async def add(self, name: str, amount: int) -> int:
        """Add to a counter, and return the total.

        It waits for an answer without a time limit: use `asyncio.timeout()`. After a timeout the
        amount may have been added, or not.

        Raises:
            ValueError: the service refuses the request.
        """
        request_id = uuid.uuid4().bytes
        async with self._limit:
            answer = self._answers[request_id] = asyncio.get_running_loop().create_future()
            self._requests[request_id] = request_id + f"{name} {amount}".encode()
            try:
                if self._connection is not None:
                    with contextlib.suppress(aiordma.RdmaError):  # run() repeats it
                        await self._connection.send(self._requests[request_id])
                text = await answer
            finally:
                del self._answers[request_id], self._requests[request_id]
        if text.startswith("error: "):
            raise ValueError(text.removeprefix("error: "))
        return int(text)

    async def run(self) -> None:
        """Keep a connection to the service, until cancelled."""
        pause = FIRST_PAUSE
        while True:
            try:
                async with self._connected() as connection:
                    pause = FIRST_PAUSE
                    for request in [*self._requests.values()]:
                        await connection.send(request)
                    async for answer in connection:
                        self._take(answer)
            except (aiordma.RdmaError, TimeoutError) as error:
                print(f"service_client: {type(error).__name__}: {error}", file=sys.stderr)
            await asyncio.sleep(random.uniform(0, pause))
            pause = min(2 * pause, LONGEST_PAUSE)

    @contextlib.asynccontextmanager
    async def _connected(self) -> AsyncIterator[aiordma.Connection]:
        """Connect. Until the block ends, add() sends its requests."""
        async with asyncio.timeout(CONNECT_SECONDS):
            connection = await aiordma.connect(*self._address, options=OPTIONS)
        self.connections += 1
        async with connection:
            self._connection = connection
            try:
                yield connection
            finally:
                self._connection = None

    def _take(self, message: bytes) -> None:
        """Give an answer to its request. It may come twice, or when add() was cancelled."""
        answer = self._answers.get(message[:ID_SIZE])
        if answer is not None and not answer.done():
            answer.set_result(message[ID_SIZE:].decode())


async def add_all(arguments: argparse.Namespace) -> None:
    client = Client(arguments.host, arguments.port)
    keeping = asyncio.create_task(client.run())
    try:
        async with asyncio.timeout(arguments.limit), asyncio.TaskGroup() as tasks:
            adding = [
                tasks.create_task(client.add(arguments.name, arguments.amount))
                for _ in range(arguments.times)
            ]
    finally:
        keeping.cancel()
        await asyncio.wait([keeping])
    total = max(task.result() for task in adding)
    print(f"{arguments.name}: {total}, connections: {client.connections}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("host")
    parser.add_argument("name")
    parser.add_argument("amount", nargs="?", type=int, default=1)
    parser.add_argument("--port", type=int, default=7471)
    parser.add_argument("--times", type=int, default=1, help="add this often")
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="for all requests together")
    arguments = parser.parse_args()
    try:
        asyncio.run(add_all(arguments))
    except* (ValueError, TimeoutError) as errors:
        reason = str(errors.exceptions[0]) or f"no answer within {arguments.limit} s"
        sys.exit(f"service_client: {reason}")


if __name__ == "__main__":
    main()
