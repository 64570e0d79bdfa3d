"""aiordma.anyio without a device: the exception for each exception of aiordma, and the imports."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from types import SimpleNamespace

import anyio
import pytest
from anyio import BrokenResourceError, BusyResourceError, ClosedResourceError, EndOfStream

from aiordma import Connection, Listener, errors
from aiordma.anyio import RdmaConnection, RdmaListener
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
FROM_SENDING: dict[type[RdmaError], type[Exception]] = {
    errors.LocalClosed: ClosedResourceError,
    errors.BusyError: BusyResourceError,
}
FROM_RECEIVING = FROM_SENDING | {errors.PeerClosed: EndOfStream}
# A lack of memory or descriptors for one peer does not end the listener.
FROM_ACCEPTING = FROM_SENDING | {errors.VerbsError: errors.VerbsError}

on_both = pytest.mark.parametrize("backend", ["asyncio", "trio"])


# A fake of both kinds at once: only the calls that fail are used.
class Failing(Connection, Listener):  # type: ignore[misc]
    """A connection and listener. All its calls raise the same error."""

    closed = True
    _accept = None  # type: ignore[assignment]
    _handshakes = SimpleNamespace(start=print)  # type: ignore[assignment]

    def __init__(self, error: BaseException) -> None:
        self.error = error

    async def fail(self, *_: object) -> None:
        raise self.error

    recv = send = accept = _next_outcome = fail  # type: ignore[assignment]

    def __del__(self) -> None: ...

    def __repr__(self) -> str:
        return "<Failing>"


async def receive(fake: Failing) -> None:
    await RdmaConnection(fake).receive()


async def send(fake: Failing) -> None:
    await RdmaConnection(fake).send(b"")


async def accept(fake: Failing) -> None:
    await RdmaListener(fake).accept()


async def serve(fake: Failing) -> None:
    await RdmaListener(fake).serve(anyio.sleep)  # type: ignore[arg-type]


async def serve_in_a_given_task_group(fake: Failing) -> None:
    async with anyio.create_task_group() as tasks:
        await RdmaListener(fake).serve(anyio.sleep, tasks)  # type: ignore[arg-type]


Call = Callable[[Failing], Coroutine[object, None, None]]
CALLS: dict[Call, dict[type[RdmaError], type[Exception]]] = {
    receive: FROM_RECEIVING,
    send: FROM_SENDING,
    accept: FROM_ACCEPTING,
    serve: FROM_ACCEPTING,
    serve_in_a_given_task_group: FROM_ACCEPTING,
}


def raised_by(backend: str, call: Call, error: Exception) -> BaseException:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - the caller checks which one
        anyio.run(call, Failing(error), backend=backend)
    if call in (serve, serve_in_a_given_task_group):
        assert isinstance(caught.value, ExceptionGroup)
        (inner,) = caught.value.exceptions
        return inner
    return caught.value


@on_both
@pytest.mark.parametrize("kind", list(error_classes()))
@pytest.mark.parametrize("call", CALLS)
def test_an_error_becomes_an_anyio_error(backend: str, kind: type[RdmaError], call: Call) -> None:
    error = kind(*ARGUMENTS.get(kind, ("what happened",)))
    caught = raised_by(backend, call, error)
    assert type(caught) is CALLS[call].get(kind, BrokenResourceError)
    assert caught is error or caught.__cause__ is error


@on_both
@pytest.mark.parametrize("call", [send, receive])
def test_an_error_that_does_not_end_the_connection_is_raised_unchanged(
    backend: str, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example the lack of memory for one message, or a mistake of the caller."""
    for error in (ValueError("too long"), BufferError("in use")):
        assert raised_by(backend, send, error) is error
    monkeypatch.setattr(Failing, "closed", False)
    lack = errors.VerbsError(12, "ibv_reg_mr")
    assert raised_by(backend, call, lack) is lack
    assert lack.__cause__ is None


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
