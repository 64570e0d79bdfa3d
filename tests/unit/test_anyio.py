"""aiordma.anyio without a device: the exception for each exception of aiordma, and the imports."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator

import anyio
import pytest
from anyio import BrokenResourceError, BusyResourceError, ClosedResourceError, EndOfStream

from aiordma import Connection, Listener, errors
from aiordma.anyio import MessageListener, MessageStream
from aiordma.enums import WcOpcode, WcStatus
from aiordma.errors import RdmaError

ARGUMENTS: dict[type[RdmaError], tuple[object, ...]] = {
    errors.VerbsError: (12, "ibv_post_send"),
    errors.Rejected: ("rejected", 28),
    errors.WorkRequestError: (WcStatus.RETRY_EXC_ERR, WcOpcode.SEND),
}


def error_classes(of: type[RdmaError] = RdmaError) -> Iterator[type[RdmaError]]:
    """Yield every class of exceptions that aiordma raises."""
    yield of
    for kind in of.__subclasses__():
        yield from error_classes(kind)


# Any other exception ends the stream or listener, and becomes a BrokenResourceError.
CLOSED_OR_BUSY = {
    errors.LocalClosed: ClosedResourceError,
    errors.BusyError: BusyResourceError,
}
FROM_RECEIVING = CLOSED_OR_BUSY | {errors.PeerClosed: EndOfStream}
FROM_SENDING = CLOSED_OR_BUSY
# A lack of memory or descriptors for one peer does not end the listener.
FROM_ACCEPTING = CLOSED_OR_BUSY | {errors.VerbsError: errors.VerbsError}

every_kind = pytest.mark.parametrize("kind", list(error_classes()))
on_both = pytest.mark.parametrize("backend", ["asyncio", "trio"])


# A fake of both kinds at once: only the calls that fail are used.
class Failing(Connection, Listener):  # type: ignore[misc]
    """A connection and listener. All its calls raise the same error."""

    closed = True

    def __init__(self, error: BaseException) -> None:
        self.error = error

    async def fail(self, *_: object) -> None:
        raise self.error

    recv = send = accept = get_request = fail  # type: ignore[assignment]

    def __del__(self) -> None: ...

    def __repr__(self) -> str:
        return "<Failing>"


def make_error(kind: type[RdmaError]) -> RdmaError:
    return kind(*ARGUMENTS.get(kind, ("what happened",)))


def raised_by(backend: str, call: Callable[[], Awaitable[object]]) -> Exception:
    async def main() -> None:
        await call()

    with pytest.raises(Exception) as caught:  # noqa: PT011 - the caller checks which one
        anyio.run(main, backend=backend)
    return caught.value


def expect(caught: Exception, error: RdmaError, table: dict[type[RdmaError], type]) -> None:
    expected = table.get(type(error), BrokenResourceError)
    assert type(caught) is expected
    if caught is not error:
        assert caught.__cause__ is error


@on_both
@every_kind
def test_an_error_of_receive_becomes_an_anyio_error(backend: str, kind: type[RdmaError]) -> None:
    error = make_error(kind)
    caught = raised_by(backend, lambda: MessageStream(Failing(error)).receive())
    expect(caught, error, FROM_RECEIVING)


@on_both
@every_kind
def test_an_error_of_send_becomes_an_anyio_error(backend: str, kind: type[RdmaError]) -> None:
    error = make_error(kind)
    caught = raised_by(backend, lambda: MessageStream(Failing(error)).send(b""))
    expect(caught, error, FROM_SENDING)


@on_both
@every_kind
@pytest.mark.parametrize("how", ["accept", "serve", "serve in a given task group"])
def test_an_error_of_accept_becomes_an_anyio_error(
    backend: str, kind: type[RdmaError], how: str
) -> None:
    error = make_error(kind)

    async def accept() -> None:
        listener = MessageListener(Failing(error))
        if how == "accept":
            await listener.accept()
        elif how == "serve":
            await listener.serve(anyio.sleep)  # type: ignore[arg-type]
        else:
            async with anyio.create_task_group() as tasks:
                await listener.serve(anyio.sleep, tasks)  # type: ignore[arg-type]

    caught = raised_by(backend, accept)
    if how != "accept":
        assert isinstance(caught, ExceptionGroup)
        (caught,) = caught.exceptions
    expect(caught, error, FROM_ACCEPTING)


@on_both
@pytest.mark.parametrize("action", ["send", "receive"])
def test_an_error_that_does_not_end_the_connection_is_raised_unchanged(
    backend: str, action: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example the lack of memory for one message."""
    monkeypatch.setattr(Failing, "closed", False)
    error = errors.VerbsError(12, "ibv_reg_mr")

    async def act() -> None:
        stream = MessageStream(Failing(error))
        await (stream.send(b"") if action == "send" else stream.receive())

    assert raised_by(backend, act) is error
    assert error.__cause__ is None


@on_both
@pytest.mark.parametrize("error", [ValueError("too long"), BufferError("in use")])
def test_errors_of_the_caller_are_raised_unchanged(backend: str, error: Exception) -> None:
    assert raised_by(backend, lambda: MessageStream(Failing(error)).send(b"")) is error


class OneRequest(Listener):
    """A listener with one peer, which cannot be accepted, and then none."""

    def __init__(self, error: RdmaError) -> None:
        self.error = error
        self.requests = [self]

    async def get_request(self) -> OneRequest:  # type: ignore[override]
        if not self.requests:
            raise errors.LocalClosed("closed on this side")
        return self.requests.pop()

    async def accept(self, private_data: bytes = b"") -> Connection:
        raise self.error

    def __repr__(self) -> str:
        return "<OneRequest>"


@on_both
@pytest.mark.parametrize(
    ("error", "level"),
    [
        (errors.Unreachable("it does not answer"), logging.INFO),
        (errors.DeviceRemoved("its device went away"), logging.INFO),
        (errors.VerbsError(12, "ibv_reg_mr"), logging.ERROR),
    ],
)
def test_a_peer_that_cannot_be_accepted_is_logged(
    backend: str, error: RdmaError, level: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "aiordma")

    async def handler(stream: MessageStream) -> None:
        pytest.fail("no peer was accepted")

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            with pytest.raises(ClosedResourceError):
                await MessageListener(OneRequest(error)).serve(handler, tasks)

    anyio.run(main, backend=backend)
    assert [record.levelno for record in caplog.records] == [level]
    assert str(error) in caplog.text


# --- imports ---

PROGRAM = """
import sys
import aiordma, aiordma.rdmacm, aiordma.verbs, aiordma.cli
print(sorted({"anyio", "trio", "sniffio", "uvloop", "aiordma.anyio"} & set(sys.modules)))
sys.modules["anyio"] = None
try:
    import aiordma.anyio
except ImportError as error:
    print(error.name)
"""


def test_anyio_is_imported_only_by_aiordma_anyio() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["[]", "anyio"]
