"""Message: its buffer is released once, and not while its data is in use."""

from __future__ import annotations

import ctypes
import gc
import threading
import weakref

import pytest

from aiordma import Message

IN_USE = "still in use"


class FakeOwner:
    """A BufferOwner that counts the releases of both kinds."""

    def __init__(self) -> None:
        self.releases = 0
        self.threadsafe_releases = 0

    def release(self) -> None:
        self.releases += 1

    def release_threadsafe(self) -> None:
        self.threadsafe_releases += 1

    @property
    def counts(self) -> tuple[int, int]:
        return self.releases, self.threadsafe_releases


@pytest.fixture
def owner() -> FakeOwner:
    return FakeOwner()


def message_of(
    owner: FakeOwner, memory: bytearray | bytes = b"hello", imm: int | None = None
) -> Message:
    return Message(memoryview(memory), imm, None, owner)


def test_data_is_a_view_of_the_buffer(owner: FakeOwner) -> None:
    memory = bytearray(b"hello")
    message = message_of(owner, memory, 7)
    assert (bytes(message.data), len(message), message.imm) == (b"hello", 5, 7)
    assert message.invalidated is None
    view = message.data
    assert view is message.data
    memory[0] = ord("j")
    assert bytes(view) == b"jello"
    assert bytes(memoryview(message)) == b"jello"
    assert repr(message) == "<Message 5 bytes>"


@pytest.mark.parametrize("data", [b"", b"hello"])
def test_a_released_message_has_no_data(owner: FakeOwner, data: bytes) -> None:
    memory = bytearray(data)
    message = message_of(owner, memory, 0)
    view = message.data
    assert (bytes(view), message.imm) == (data, 0)
    message.release()
    memory.append(0)
    with pytest.raises(ValueError, match="released memoryview"):
        bytes(view)
    assert message.released
    assert owner.counts == (1, 0)
    with pytest.raises(ValueError, match="released"):
        message.data  # noqa: B018
    with pytest.raises(BufferError):
        memoryview(message)
    assert len(message) == len(data)
    assert repr(message) == "<Message released>"


def test_a_message_is_released_once(owner: FakeOwner) -> None:
    message = message_of(owner)
    for _ in range(3):
        message.release()
    del message
    gc.collect()
    assert owner.counts == (1, 0)


def test_the_end_of_a_block_releases_the_message(owner: FakeOwner) -> None:
    with message_of(owner) as message:
        assert bytes(message.data) == b"hello"
        assert owner.counts == (0, 0)
    assert message.released
    with message_of(owner) as message:
        message.release()
    with pytest.raises(RuntimeError, match="mine"), message_of(owner):
        raise RuntimeError("mine")
    assert owner.counts == (3, 0)


def slice_of(message: Message) -> object:
    return message.data[1:3]


def view_of_the_view(message: Message) -> object:
    return memoryview(message.data)


def view_of_the_message(message: Message) -> object:
    return memoryview(message)


def cast_of(message: Message) -> object:
    return message.data.cast("c")


def array_of(message: Message) -> object:
    """Return an array like that of numpy.frombuffer(), which exports the view itself."""
    return (ctypes.c_char * 5).from_buffer(message.data)


def array_of_the_message(message: Message) -> object:
    return (ctypes.c_char * 5).from_buffer(message)


def array_of_a_slice(message: Message) -> object:
    return (ctypes.c_char * 2).from_buffer(message.data[1:3])


@pytest.mark.parametrize("is_kept", [False, True], ids=["data dropped", "data kept"])
@pytest.mark.parametrize(
    "make_export",
    [
        slice_of,
        view_of_the_view,
        view_of_the_message,
        cast_of,
        array_of,
        array_of_the_message,
        array_of_a_slice,
    ],
)
def test_a_message_is_not_released_while_its_data_is_in_use(
    owner: FakeOwner, make_export: object, is_kept: bool
) -> None:
    assert callable(make_export)
    message = message_of(owner, bytearray(b"hello"))
    kept = message.data if is_kept else None
    export = make_export(message)
    for _ in range(2):
        with pytest.raises(BufferError, match=IN_USE):
            message.release()
        assert not message.released
        assert bytes(message.data) == b"hello"
    assert owner.counts == (0, 0)
    del export
    gc.collect()
    message.release()
    assert message.released
    assert owner.counts == (1, 0)
    del kept


def test_the_end_of_a_block_with_a_slice_in_use_raises(owner: FakeOwner) -> None:
    message = message_of(owner)
    with pytest.raises(BufferError, match=IN_USE), message:
        part = message.data[1:3]
    assert not message.released
    assert bytes(part) == b"el"
    part.release()
    message.release()
    assert owner.counts == (1, 0)


def test_a_dropped_message_in_a_reference_cycle_is_released(owner: FakeOwner) -> None:
    holder: list[object] = [message_of(owner)]
    holder.append(holder)
    del holder
    gc.collect()
    assert owner.counts == (0, 1)


def test_a_message_that_another_thread_drops_is_released(owner: FakeOwner) -> None:
    messages = [message_of(owner)]
    thread = threading.Thread(target=messages.clear)
    thread.start()
    thread.join()
    assert owner.counts == (0, 1)


@pytest.mark.parametrize(
    "make_export",
    [lambda message: message.data, slice_of, view_of_the_view, view_of_the_message, array_of],
)
def test_views_of_the_data_keep_the_message_alive(owner: FakeOwner, make_export: object) -> None:
    assert callable(make_export)
    message = message_of(owner, bytearray(b"hello"))
    alive = weakref.ref(message)
    export = make_export(message)
    del message
    gc.collect()
    assert alive() is not None
    assert owner.counts == (0, 0)
    assert bytes(export)
    del export
    gc.collect()
    assert alive() is None
    assert owner.counts == (0, 1)


def test_data_after_its_view_was_released_is_a_new_view(owner: FakeOwner) -> None:
    message = message_of(owner)
    with message.data as view:
        assert bytes(view) == b"hello"
    assert bytes(message.data) == b"hello"
    message.release()
    assert owner.counts == (1, 0)


def test_an_uninitialized_message_is_not_released() -> None:
    message = Message.__new__(Message)
    del message
    gc.collect()
