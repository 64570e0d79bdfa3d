"""The programs of docs/tutorial.md, run as a reader runs them."""

from __future__ import annotations

import asyncio
import hashlib
import re

import pytest
from example_runs import Done, finish, interrupt, next_line, run, running
from helpers import ROOT, TIME_LIMIT

from aiordma.rdmacm import DeviceAddress

PAGE = (ROOT / "docs" / "tutorial.md").read_text()

# Starting Python takes long in the lab, and other tests cover the differences between devices.
pytestmark = pytest.mark.transport("IB")


async def wait_until_it_listens(server: asyncio.subprocess.Process) -> None:
    """Wait until the server listens."""
    assert (await next_line(server.stdout)).startswith("listening")


async def run_client(name: str, *arguments: str) -> list[str]:
    """Run a client to its end, and return the lines that it printed."""
    done = await run(f"tutorial/{name}", *arguments)
    assert (done.status, done.errors) == (0, "")
    return done.output.splitlines()


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("server", "client", "arguments", "expected"),
    [
        ("1_echo_server", "1_echo_client", [], ["b'hello'"]),
        ("2_login_server", "2_login_client", ["bob"], ["accepted: hello bob", "bob: good morning"]),
        ("2_login_server", "2_login_client", ["eve"], ["rejected: unknown name"]),
        (
            "3_sizes_server",
            "3_sizes_client",
            [],
            [
                "0 bytes came back",
                "64 bytes came back",
                "65536 bytes came back",
                "1048576 bytes came back",
                "one byte more is too large",
                "4 messages sent",
            ],
        ),
    ],
)
async def test_each_client_prints_the_lines_of_the_page(
    address: DeviceAddress, server: str, client: str, arguments: list[str], expected: list[str]
) -> None:
    async with asyncio.timeout(TIME_LIMIT), running(f"tutorial/{server}") as process:
        await wait_until_it_listens(process)
        assert await run_client(client, address.host, *arguments) == expected
        assert await interrupt(process) == Done(0, "", "")
    assert [line for line in expected if line not in PAGE] == []


@pytest.mark.asyncio
async def test_the_client_reads_and_writes_memory_of_the_server(address: DeviceAddress) -> None:
    async with asyncio.timeout(TIME_LIMIT), running("tutorial/4_memory_server") as server:
        await wait_until_it_listens(server)
        lines = await run_client("4_memory_client", address.host)
        assert lines == ["the server has 4096 bytes", "read b'hello'"]
        assert await next_line(server.stdout) == "the client wrote b'goodbye'"
        assert await interrupt(server) == Done(0, "", "")


@pytest.mark.asyncio
async def test_timeouts_and_cancelling_lose_no_message(address: DeviceAddress) -> None:
    async with asyncio.timeout(TIME_LIMIT), running("tutorial/5_slow_server") as server:
        await wait_until_it_listens(server)
        lines = await run_client("5_errors_client", address.host)
        assert [line.partition(":")[0] for line in lines] == [
            "Rejected",
            "TimeoutError",
            "received",
            "PeerClosed",
            "LocalClosed",
        ]
        assert lines[0] == "Rejected: status 8"
        assert lines[2] == "received: b'answer to question'"
        lines = await run_client("6_cancel_client", address.host)
        assert lines == ["cancelled: True", "received: b'answer to question'"]
        assert await interrupt(server) == Done(0, "", "")


@pytest.mark.asyncio
async def test_the_service_ends_on_sigterm(address: DeviceAddress) -> None:
    words = ["one", "two"]
    async with asyncio.timeout(TIME_LIMIT), running("service", "--work", "0.1") as service:
        await wait_until_it_listens(service)
        lines = await run_client("7_digest_client", address.host, *words)
        digests = [hashlib.sha256(word.encode()).hexdigest()[:16] for word in words]
        assert lines == [f"{word} {digest}" for word, digest in zip(words, digests, strict=True)]
        service.terminate()
        assert await finish(service) == Done(0, "answered 2 messages\n", "")


def test_the_page_includes_each_program() -> None:
    included = set(re.findall(r"\{literalinclude\} \.\./examples/tutorial/(\S+)", PAGE))
    assert included == {path.name for path in (ROOT / "examples" / "tutorial").glob("*.py")}
