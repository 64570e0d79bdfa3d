"""The exceptions: their hierarchy, their messages, and that they can be copied and pickled."""

from __future__ import annotations

import ast
import copy
import copyreg
import errno
import inspect
import os
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from parsing import parse

import aiordma
from aiordma import errors
from aiordma._native import ffi, lib
from aiordma.enums import WcOpcode, WcStatus

# An example of each exception, and its parents.
EXAMPLES: dict[errors.RdmaError, tuple[type[Exception], ...]] = {
    errors.RdmaError("plain"): (Exception,),
    errors.VerbsError(errno.ENOMEM, "ibv_reg_mr"): (errors.RdmaError, OSError),
    errors.ConnectError("could not connect"): (errors.RdmaError, ConnectionError),
    errors.AddressError("no RDMA path"): (errors.ConnectError,),
    errors.RouteError("no route"): (errors.ConnectError,),
    errors.Unreachable("no answer"): (errors.ConnectError,),
    errors.Rejected("refused", 28, b"not today"): (errors.ConnectError,),
    errors.ConnectionClosed("closed"): (errors.RdmaError,),
    errors.LocalClosed("closed here"): (errors.ConnectionClosed,),
    errors.PeerClosed("closed there"): (errors.ConnectionClosed,),
    errors.PeerTimeout("silent"): (errors.ConnectionClosed,),
    errors.DeviceRemoved("unplugged"): (errors.ConnectionClosed,),
    errors.ReceiveOverrun("too fast"): (errors.RdmaError,),
    errors.ProtocolError("not rsocket"): (errors.RdmaError, ConnectionError),
    errors.WorkRequestError(WcStatus.RETRY_EXC_ERR, WcOpcode.SEND, 0x81): (errors.RdmaError,),
    errors.BusyError("busy"): (errors.RdmaError,),
}


def through_pickle(error: errors.RdmaError) -> errors.RdmaError:
    duplicated = pickle.loads(pickle.dumps(error))
    assert isinstance(duplicated, errors.RdmaError)
    return duplicated


def test_every_exception_is_public_and_in_the_docstring() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    bases = {kind: kind.__bases__ for kind in kinds if issubclass(kind, Exception)}
    assert bases == {type(error): parents for error, parents in EXAMPLES.items()}
    for kind in bases:
        assert kind.__name__ in (errors.__doc__ or "")
        assert kind.__name__ in aiordma.__all__


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, through_pickle])
@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_a_copy_has_the_same_message_and_attributes(
    error: errors.RdmaError, duplicate: Callable[[errors.RdmaError], errors.RdmaError]
) -> None:
    duplicated = duplicate(error)
    assert duplicated is not error
    assert type(duplicated) is type(error)
    assert str(duplicated) == str(copy.copy(duplicated)) == str(error)
    for name in ("errno", "function", "status", "private_data", "opcode", "vendor_err"):
        assert getattr(duplicated, name, None) == getattr(error, name, None)


def keep_traceback(error: BaseException) -> Any:
    """Reduce an exception as tblib does, which distributed installs for all exceptions."""
    return BaseException.with_traceback, (error, error.__traceback__)


@pytest.mark.parametrize("reduce", [None, keep_traceback])
def test_a_copy_has_no_traceback(
    monkeypatch: pytest.MonkeyPatch, reduce: Callable[[BaseException], Any] | None
) -> None:
    if reduce is not None:
        monkeypatch.setitem(copyreg.dispatch_table, errors.PeerClosed, reduce)
    with pytest.raises(errors.PeerClosed) as caught:
        raise errors.PeerClosed("closed there")
    assert caught.value.__traceback__ is not None
    caught.value.add_note("a note")
    copied = copy.copy(caught.value)
    assert copied.__traceback__ is None
    assert copied.__notes__ == ["a note"]


def test_an_unknown_status_can_be_pickled() -> None:
    duplicated = through_pickle(errors.WorkRequestError(WcStatus(99), WcOpcode(77), 5))
    assert isinstance(duplicated, errors.WorkRequestError)
    assert (duplicated.status, duplicated.opcode, duplicated.vendor_err) == (99, 77, 5)
    assert "UNKNOWN_99" in str(duplicated)


def test_a_verbs_error_has_the_functions_name() -> None:
    error = errors.VerbsError(errno.EPERM, "ibv_destroy_qp")
    assert (error.errno, error.function) == (errno.EPERM, "ibv_destroy_qp")
    assert error.strerror == f"ibv_destroy_qp: {os.strerror(errno.EPERM)}"
    assert type(error) is errors.VerbsError  # OSError itself would make a PermissionError


def test_rejected_has_the_status_and_the_private_data_of_the_peer() -> None:
    error = errors.Rejected("refused", 28, b"not today")
    assert (error.status, error.private_data) == (28, b"not today")
    assert errors.Rejected("refused", 8).private_data == b""


NEWER = {"rdma_resolve_addrinfo", "rdma_query_addrinfo", "rdma_write_cm_event"}
HINTED = [
    ("RLIMIT_MEMLOCK", errno.ENOMEM, ["ibv_reg_mr", "rdma_create_qp", "ibv_create_cq"]),
    ("RLIMIT_MEMLOCK", errno.EPERM, ["ibv_reg_mr", "rdma_create_qp", "ibv_create_cq"]),
    ("ulimit -n", errno.EMFILE, ["rdma_create_event_channel", "ibv_create_comp_channel"]),
    ("rdma.max", errno.EAGAIN, ["rdma_create_qp", "ibv_create_cq", "ibv_reg_mr"]),
    ("max_inline", errno.EINVAL, ["rdma_create_qp"]),
    ("aiordma lab", errno.ENODEV, ["rdma_create_event_channel", "rdma_get_devices"]),
    ("aiordma lab", errno.ENODEV, ["rdma_create_id", "rdma_getaddrinfo"]),
    ("aiordma lab", errno.ENOENT, ["rdma_create_event_channel"]),
    ("port is in use", errno.EADDRINUSE, ["rdma_bind_addr", "rdma_listen"]),
    ("does not have the address", errno.EADDRNOTAVAIL, ["rdma_bind_addr"]),
    ("aiordma devices", errno.ENODEV, ["rdma_bind_addr", "rdma_resolve_addr"]),
    ("does not have the function: rdma-core 60 or later", errno.ENOSYS, [*NEWER]),
    ("older than Linux 6.18", errno.EINVAL, ["rdma_resolve_addrinfo", "rdma_write_cm_event"]),
]


@pytest.mark.parametrize(("advice", "code", "functions"), HINTED)
def test_an_error_comes_with_advice(advice: str, code: int, functions: list[str]) -> None:
    for function in functions:
        text = str(errors.VerbsError(code, function))
        assert text.startswith(f"[Errno {code}] {function}: {os.strerror(code)} (")
        assert advice in text
        assert errors.reason(function, errno.EBUSY) == os.strerror(errno.EBUSY)


def test_every_hint_is_for_an_existing_function() -> None:
    functions = {function for function, _ in errors._HINTS}
    bound = {name for name in functions if hasattr(lib, name) or hasattr(lib, f"aio{name}")}
    assert functions == bound > NEWER


def test_no_dictionary_of_the_module_has_a_duplicate_key() -> None:
    for node in ast.walk(parse(inspect.getsource(errors))):
        if isinstance(node, ast.Dict):
            keys = [ast.dump(key) for key in node.keys if key is not None]
            assert len(keys) == len(set(keys))


@pytest.mark.parametrize(
    ("status", "advice"),
    [
        (WcStatus.LOC_LEN_ERR, "larger than the receive buffer"),
        (WcStatus.REM_ACCESS_ERR, "key, bounds or permission"),
        (WcStatus.RETRY_EXC_ERR, "stopped answering"),
        (WcStatus.RNR_RETRY_EXC_ERR, "no receive posted"),
    ],
)
def test_a_failed_work_request_is_explained(status: WcStatus, advice: str) -> None:
    text = str(errors.WorkRequestError(status, WcOpcode.SEND))
    assert text.startswith(f"SEND failed: {status.name} (")
    assert advice in text
    other = errors.WorkRequestError(WcStatus.WR_FLUSH_ERR, WcOpcode.RECV)
    assert str(other) == "RECV failed: WR_FLUSH_ERR"


@pytest.mark.parametrize("sign", [1, -1])
def test_check_accepts_either_sign_of_an_errno(sign: int) -> None:
    errors.check(0, "rdma_listen")
    errors.check_errno(0, "ibv_dereg_mr")
    with pytest.raises(errors.VerbsError) as caught:
        errors.check_errno(sign * errno.EBUSY, "ibv_dealloc_pd")
    assert caught.value.errno == errno.EBUSY
    ffi.errno = sign * errno.EINVAL
    with pytest.raises(errors.VerbsError, match="rdma_connect: Invalid argument") as caught:
        errors.check(-1, "rdma_connect")
    assert caught.value.errno == errno.EINVAL


def test_the_errno_of_a_c_call_reaches_the_exception() -> None:
    assert lib.aiordma_set_nonblocking(-1) == -1
    error = errors.last_error("fcntl")
    assert (error.errno, error.function) == (errno.EBADF, "fcntl")
    ffi.errno = 0
    assert errors.last_error("ibv_create_cq").errno == errno.EIO
