"""Message: its buffer is released once, and not while its data is in use."""

from __future__ import annotations

import ctypes
import gc
import threading
import weakref
from collections.abc import Callable

import pytest

from aiordma import Message


class Owner:
    """A BufferOwner that counts the releases of both kinds."""

    def __init__(self) -> None:
        self.counts = [0, 0]

    def release(self) -> None:
        self.counts[0] += 1

    def release_threadsafe(self) -> None:
        self.counts[1] += 1


@pytest.fixture
def owner() -> Owner:
    return Owner()


def message_of(owner: Owner, data: bytes | bytearray = b"hello", imm: int | None = None) -> Message:
    return Message(memoryview(data), imm, None, owner)


@pytest.mark.parametrize("data", [b"", b"hello"])
def test_data_is_a_view_until_the_message_is_released(owner: Owner, data: bytes) -> None:
    memory = bytearray(data)
    message = message_of(owner, memory, 0)
    view = message.data
    memory[:1] = b"j"[: len(data)]
    assert bytes(view) == bytes(memoryview(message)) == bytes(memory)
    assert (view is message.data, message.imm, message.invalidated) == (True, 0, None)
    assert (len(message), repr(message)) == (len(data), f"<Message {len(data)} bytes>")
    with message.data:  # the next one is a new view
        pass
    assert bytes(message.data) == bytes(memory)
    with pytest.raises(RuntimeError, match="mine"), message:
        raise RuntimeError("mine")
    with message:  # a message is released once
        message.release()
    memory.append(0)
    assert (message.released, owner.counts) == (True, [1, 0])
    with pytest.raises(ValueError, match="released"):
        message.data  # noqa: B018
    with pytest.raises(ValueError, match="released memoryview"):
        bytes(view)
    with pytest.raises(BufferError):
        memoryview(message)
    assert (len(message), repr(message)) == (len(data), "<Message released>")
    del message
    gc.collect()
    assert owner.counts == [1, 0]


Export = Callable[[Message], object]
EXPORTS: list[Export] = [
    lambda message: message.data[1:3],
    lambda message: memoryview(message.data),
    memoryview,
    lambda message: message.data.cast("c"),
    # Like numpy.frombuffer(), this exports the view itself.
    lambda message: (ctypes.c_char * 5).from_buffer(message.data),
    lambda message: (ctypes.c_char * 5).from_buffer(message),
    lambda message: (ctypes.c_char * 2).from_buffer(message.data[1:3]),
]


@pytest.mark.parametrize("is_kept", [False, True], ids=["data dropped", "data kept"])
@pytest.mark.parametrize("make_export", EXPORTS)
def test_a_message_in_use_is_not_released(owner: Owner, make_export: Export, is_kept: bool) -> None:
    message = message_of(owner, bytearray(b"hello"))
    kept = message.data if is_kept else None
    export = make_export(message)
    for _ in range(2):
        with pytest.raises(BufferError, match="still in use"):
            message.release()
    with pytest.raises(BufferError, match="still in use"), message:
        pass
    assert (message.released, bytes(message.data), owner.counts) == (False, b"hello", [0, 0])
    del export
    gc.collect()
    message.release()
    assert (message.released, owner.counts) == (True, [1, 0])
    del kept


@pytest.mark.parametrize("make_export", [lambda message: message.data, *EXPORTS])
def test_views_of_the_data_keep_the_message_alive(owner: Owner, make_export: Export) -> None:
    message = message_of(owner, bytearray(b"hello"))
    alive = weakref.ref(message)
    export = make_export(message)
    del message
    gc.collect()
    assert (alive() is None, owner.counts) == (False, [0, 0])
    del export
    gc.collect()
    assert (alive() is None, owner.counts) == (True, [0, 1])


def test_a_message_that_is_dropped_anywhere_is_released(owner: Owner) -> None:
    cycle: list[object] = [message_of(owner)]
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert owner.counts == [0, 1]
    messages = [message_of(owner)]
    thread = threading.Thread(target=messages.clear)
    thread.start()
    thread.join()
    assert owner.counts == [0, 2]
    Message.__new__(Message)  # not initialized: there is nothing to release
    gc.collect()
