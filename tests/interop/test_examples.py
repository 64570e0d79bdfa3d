"""The examples and the programs of docs/tutorial.md, run as a reader runs them.

Other examples have a file of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
import sys

import pytest
from example_runs import (
    Done,
    finish,
    interrupt,
    next_line,
    run,
    run_program,
    running,
    running_program,
    serving,
    serving_by,
)
from helpers import ROOT
from programs import PRELOAD, running_peer

import aiordma
from aiordma import PeerClosed, Rejected
from aiordma.rdmacm import DeviceAddress

# Starting Python takes long in the lab, and other tests cover the differences between devices.
pytestmark = [
    pytest.mark.loops("asyncio"),
    pytest.mark.may_block,
    pytest.mark.transport("IB"),
]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("demo", ["device: ", "echoed: hello", "round trip of 64 bytes: ", "echo was right"]),
        ("async_id", ["device: ", "received: hello from an asynchronous id", "DISCONNECTED"]),
        ("sync_id", ["no request yet", "accepted with: welcome", "hello from a synchronous id"]),
        ("endpoint", ["received: hello from an endpoint"]),
        ("migration", ["a request that a thread waited for", "that the event loop waited for"]),
    ],
)
async def test_an_example_prints_its_lines(
    address: DeviceAddress, name: str, expected: list[str]
) -> None:
    done = await run(name, *([] if name == "demo" else [address.host]))
    assert (done.status, done.errors) == (0, "")
    assert [text for text in expected if text not in done.output] == []


async def test_the_programs_of_the_readme(address: DeviceAddress) -> None:
    """Run the client and the server of the README, with another address and another port."""
    client, server = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    serve = "        await listener.serve(echo)"
    server = server.replace(serve, f"        print('listening', flush=True)\n{serve}")
    server = f"import asyncio, aiordma\n{server}\nasyncio.run(main())".replace("7471", "7489")
    client = client.replace("10.7.1.1", address.host).replace("7471", "7489")
    async with running_program(sys.executable, "-c", server) as process:
        assert await next_line(process.stdout) == "listening"
        assert await run_program(sys.executable, "-c", client) == Done(0, "b'hello'\n", "")


# --- echo servers and clients, on the same or on different event loops ---

STREAMS = ("stream_echo_server", "stream_echo_client")
ANYIO = "anyio_echo_server", "anyio_echo_client"
ON_ASYNCIO, ON_TRIO = ["--backend", "asyncio"], ["--backend", "trio"]


@pytest.mark.parametrize(
    ("server", "client"),
    [
        ([STREAMS[0]], [STREAMS[1]]),
        ([ANYIO[0], *ON_ASYNCIO], [ANYIO[1], *ON_TRIO]),
        ([ANYIO[0], *ON_TRIO], [ANYIO[1], *ON_ASYNCIO]),
        (["trio_echo_server"], ["echo_client"]),
        (["echo_server"], ["trio_echo_client"]),
    ],
    ids=lambda words: "-".join(words),
)
async def test_echo_after_a_client_was_killed(
    address: DeviceAddress, server: list[str], client: list[str]
) -> None:
    """One client is killed, and the next one gets its echoes. Ctrl-C ends the server."""
    async with serving(*server, address.host, "0") as (process, port):
        command = (*client, address.host, port)
        count = 20 if client == ["trio_echo_client"] else 2000  # it has a connection for each
        async with running(*command, *["x" * 100] * count) as killed:
            assert await next_line(killed.stdout) == "echoed: " + "x" * 100
        done = await run(*command, "grüße", "y" * 5000)
        assert (done.status, done.errors) == (0, "")
        echoed = [line for line in done.output.splitlines() if line.startswith("echoed: ")]
        assert sorted(echoed) == ["echoed: grüße", "echoed: " + "y" * 5000]
        assert await interrupt(process) == (0, "", "")


async def test_a_tcp_program_and_an_idle_client_of_the_stream_server(
    address: DeviceAddress,
) -> None:
    """Run rstream under librspreload, as in docs/streams.md. Ctrl-C closes the idle stream."""
    test = ["-T", "s", "-T", "b", "-T", "v", "-S", "1000", "-C", "10", "-I", "1"]
    async with serving(STREAMS[0], address.host, "0") as (server, port):
        async with running_peer(
            *("rstream", "-s", address.host, "-p", port, *test), environment=PRELOAD
        ):
            pass
        async with aiordma.connect_stream(address.host, int(port)) as idle:
            await idle.send(b"hello")
            assert await idle.receive() == b"hello"
            assert await interrupt(server) == (0, "", "")
            assert await idle.receive() == b""


@pytest.mark.parametrize(
    "client",
    [
        ["echo_client"],
        ["trio_echo_client"],
        [STREAMS[1]],
        [ANYIO[1], *ON_ASYNCIO],
        [ANYIO[1], *ON_TRIO],
    ],
    ids=lambda words: "-".join(words),
)
async def test_a_client_fails_without_a_server(address: DeviceAddress, client: list[str]) -> None:
    done = await run(*client, address.host, "1")
    assert (done.status, done.output) == (1, "")
    assert done.errors.startswith(f"{client[0]}: ")
    assert "rejected the connection" in done.errors


# --- the tutorial's service that ends on SIGTERM ---


async def test_sigterm_loses_no_answer(address: DeviceAddress) -> None:
    """The answer in progress arrives, idle connections are closed, new peers are rejected."""
    options = ("--work", "2", "--grace", "600")
    async with (
        serving("tutorial/7_digest_server", address.host, "0", *options) as (process, port),
        aiordma.connect(address.host, int(port)) as idle,
        aiordma.connect(address.host, int(port)) as busy,
    ):
        await busy.send(b"work")
        # The service has taken the message before it accepts a later peer.
        await (await aiordma.connect(address.host, int(port))).aclose()
        process.terminate()
        with pytest.raises(PeerClosed):
            await idle.recv()
        assert await busy.recv() == hashlib.sha256(b"work").digest()
        with pytest.raises(PeerClosed):
            await busy.recv()
        with pytest.raises(Rejected):
            await aiordma.connect(address.host, int(port))
        assert await finish(process) == (0, "answered 1 messages\n", "")


@pytest.mark.parametrize("end", ["the grace period ends", "a second signal"])
async def test_an_unfinished_answer_is_cancelled(address: DeviceAddress, end: str) -> None:
    grace = "0.1" if end == "the grace period ends" else "3600"
    options = ("--grace", grace, "--work", "3600")
    async with (
        serving("tutorial/7_digest_server", address.host, "0", *options) as (process, port),
        aiordma.connect(address.host, int(port)) as busy,
    ):
        await busy.send(b"work")
        # The service has taken the message before it accepts a later peer.
        await (await aiordma.connect(address.host, int(port))).aclose()
        process.terminate()
        if end == "a second signal":
            with contextlib.suppress(Rejected):
                while True:  # until it handles the first one
                    await (await aiordma.connect(address.host, int(port))).aclose()
            process.terminate()
        with pytest.raises((PeerClosed, aiordma.WorkRequestError)):
            await busy.recv()
        ended = await finish(process)
    assert (ended.status, ended.errors) == (0, "")


# --- multicast_chat.py, with three members in the group ---


async def test_each_member_receives_the_lines_of_the_others(address: DeviceAddress) -> None:
    async with contextlib.AsyncExitStack() as stack:
        chats = []
        for name in ("ann", "bob", "eve"):
            program = running("multicast_chat", address.host, "--name", name)
            chats.append(await stack.enter_async_context(program))
            assert await next_line(chats[-1].stdout) == "in the group 239.17.18.19"
        for number, text in ((0, "ann: hello"), (1, "bob: hi ann")):
            stdin = chats[number].stdin
            assert stdin is not None
            stdin.write(f"{text.partition(': ')[2]}\n".encode())
            for other in chats[:number] + chats[number + 1 :]:
                assert await next_line(other.stdout) == f"{address.host}: {text}"
        for chat in chats:
            assert await finish(chat) == (0, "", "")  # at the end of its input


@pytest.mark.transport("IWARP")
async def test_a_device_without_datagrams(address: DeviceAddress) -> None:
    done = await run("multicast_chat", address.host)
    assert done.status == 1
    assert done.errors.startswith("multicast_chat: ")
    assert "no datagrams" in done.errors


# --- the programs of docs/tutorial.md ---

PAGE = (ROOT / "docs" / "tutorial.md").read_text()


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


async def run_with_late_answer(client: str, host: str, last_line: str) -> list[str]:
    """Run a client of the slow server to its end, and return the lines that it printed.

    A server here answers when the client has printed `last_line`: the slow server could be too
    early for a client that the machine has stopped.
    """
    may_answer, lines = asyncio.Event(), list[str]()

    async def answer(connection: aiordma.Connection) -> None:
        question = await connection.recv()
        await may_answer.wait()
        await connection.send(b"answer to " + question)

    program = str(ROOT / "examples" / "tutorial" / f"{client}.py")
    async with (
        serving_by(aiordma.listen(host, 7471), answer),
        running_program(sys.executable, "-u", program, host) as process,
    ):
        while line := await next_line(process.stdout):
            lines.append(line)
            if line == last_line:
                may_answer.set()
        assert await finish(process) == Done(0, "", "")
    return lines


async def test_timeouts_lose_no_message(address: DeviceAddress) -> None:
    last_line = "TimeoutError: no answer yet"
    assert await run_with_late_answer("5_errors_client", address.host, last_line) == [
        "Rejected: status 8",
        last_line,
        "received: b'answer to question'",
        f"PeerClosed: {address.host}:7471 closed the connection",
        "LocalClosed: the connection is closed on this side",
    ]


async def test_a_cancelled_receive_loses_no_message(address: DeviceAddress) -> None:
    lines = ["cancelled: True", "received: b'answer to question'"]
    assert await run_with_late_answer("6_cancel_client", address.host, lines[0]) == lines
    assert [line for line in lines if line not in PAGE] == []


async def test_the_slow_server_answers_and_closes(address: DeviceAddress) -> None:
    async with (
        serving("tutorial/5_slow_server") as (process, _),
        aiordma.connect(address.host, 7471) as connection,
    ):
        await connection.send(b"question")
        assert await connection.recv() == b"answer to question"
        with pytest.raises(PeerClosed):
            await connection.recv()
        assert await interrupt(process) == Done(0, "", "")


async def test_the_service_ends_on_sigterm(address: DeviceAddress) -> None:
    words = ["one", "two"]
    async with serving("tutorial/7_digest_server", "--work", "0.1") as (service, _):
        lines = await run_client("7_digest_client", address.host, *words)
        digests = [hashlib.sha256(word.encode()).hexdigest()[:16] for word in words]
        assert lines == [f"{word} {digest}" for word, digest in zip(words, digests, strict=True)]
        service.terminate()
        assert await finish(service) == Done(0, "answered 2 messages\n", "")


def test_the_page_includes_each_program() -> None:
    included = set(re.findall(r"\{literalinclude\} \.\./examples/tutorial/(\S+)", PAGE))
    assert included == {path.name for path in (ROOT / "examples" / "tutorial").glob("*.py")}
