"""The programs of docs/tutorial.md, run as a reader runs them."""

from __future__ import annotations

import hashlib
import re

import pytest
from example_runs import Done, finish, interrupt, run, serving
from helpers import ROOT

from aiordma.rdmacm import DeviceAddress

PAGE = (ROOT / "docs" / "tutorial.md").read_text()

# Starting Python takes long in the lab, and other tests cover the differences between devices.
pytestmark = [
    pytest.mark.loops("asyncio"),
    pytest.mark.may_block,
    pytest.mark.transport("IB"),
]


async def run_client(name: str, *arguments: str) -> list[str]:
    """Run a client to its end, and return the lines that it printed."""
    done = await run(f"tutorial/{name}", *arguments)
    assert (done.status, done.errors) == (0, "")
    return done.output.splitlines()


@pytest.mark.parametrize(
    ("server", "client", "arguments", "expected"),
    [
        ("1_echo", "1_echo", [], ["b'hello'"]),
        ("2_login", "2_login", ["bob"], ["accepted: hello bob", "bob: good morning"]),
        ("2_login", "2_login", ["eve"], ["rejected: unknown name"]),
        (
            *("3_sizes", "3_sizes", []),
            [f"{size} bytes came back" for size in (0, 64, 65536, 1048576)]
            + ["one byte more is too large", "4 messages sent"],
        ),
        ("4_memory", "4_memory", [], ["the server has 4096 bytes", "read b'hello'"]),
        ("5_slow", "6_cancel", [], ["cancelled: True", "received: b'answer to question'"]),
    ],
)
async def test_each_client_prints_the_lines_of_the_page(
    address: DeviceAddress, server: str, client: str, arguments: list[str], expected: list[str]
) -> None:
    written = "the client wrote b'goodbye'\n" if server == "4_memory" else ""
    async with serving(f"tutorial/{server}_server") as (process, _):
        assert await run_client(f"{client}_client", address.host, *arguments) == expected
        assert await interrupt(process) == Done(0, written, "")
    assert [line for line in expected if line not in PAGE] == []


async def test_timeouts_lose_no_message(address: DeviceAddress) -> None:
    async with serving("tutorial/5_slow_server"):
        lines = await run_client("5_errors_client", address.host)
    errors = ["Rejected", "TimeoutError", "received", "PeerClosed", "LocalClosed"]
    assert [line.partition(":")[0] for line in lines] == errors
    assert (lines[0], lines[2]) == ("Rejected: status 8", "received: b'answer to question'")


async def test_the_service_ends_on_sigterm(address: DeviceAddress) -> None:
    words = ["one", "two"]
    async with serving("service", "--work", "0.1") as (service, _):
        lines = await run_client("7_digest_client", address.host, *words)
        digests = [hashlib.sha256(word.encode()).hexdigest()[:16] for word in words]
        assert lines == [f"{word} {digest}" for word, digest in zip(words, digests, strict=True)]
        service.terminate()
        assert await finish(service) == Done(0, "answered 2 messages\n", "")


def test_the_page_includes_each_program() -> None:
    included = set(re.findall(r"\{literalinclude\} \.\./examples/tutorial/(\S+)", PAGE))
    assert included == {path.name for path in (ROOT / "examples" / "tutorial").glob("*.py")}
