"""Message: the buffer that it arrived in goes back once, and not while anybody looks at it."""

from __future__ import annotations

import ctypes
import gc
import threading
import weakref

import pytest

from aiordma import Message

STILL = "still in use"


class BufferOwner:
    """Counts what comes back, and how."""

    def __init__(self) -> None:
        self.given_back = 0
        self.dropped = 0

    def release(self) -> None:
        self.given_back += 1

    def release_threadsafe(self) -> None:
        self.dropped += 1

    @property
    def returns(self) -> tuple[int, int]:
        return self.given_back, self.dropped


@pytest.fixture
def lender() -> BufferOwner:
    return BufferOwner()


def message_of(
    lender: BufferOwner, memory: bytearray | bytes = b"hello", imm: int | None = None
) -> Message:
    return Message(memoryview(memory), imm, None, lender)


def test_the_data_is_what_arrived(lender: BufferOwner) -> None:
    memory = bytearray(b"hello")
    message = message_of(lender, memory, 7)
    assert (bytes(message.data), len(message), message.imm) == (b"hello", 5, 7)
    assert message.invalidated is None
    memory[0] = ord("j")
    assert bytes(message.data) == b"jello"
    assert bytes(memoryview(message)) == b"jello"
    assert repr(message) == "<Message 5 bytes>"


def test_the_data_is_the_same_view_each_time(lender: BufferOwner) -> None:
    message = message_of(lender)
    assert message.data is message.data
    view = message.data
    assert message.data is view


def test_an_empty_message_has_data_too(lender: BufferOwner) -> None:
    message = message_of(lender, b"", 0)
    assert (bytes(message.data), len(message), message.imm) == (b"", 0, 0)
    message.release()
    assert lender.returns == (1, 0)


def test_a_released_message_has_no_data(lender: BufferOwner) -> None:
    message = message_of(lender)
    message.release()
    assert message.released
    assert lender.returns == (1, 0)
    with pytest.raises(ValueError, match="released"):
        message.data  # noqa: B018
    with pytest.raises(BufferError):
        memoryview(message)
    assert len(message) == 5
    assert repr(message) == "<Message released>"


def test_data_that_was_looked_at_can_be_read_no_more(lender: BufferOwner) -> None:
    message = message_of(lender)
    view = message.data
    message.release()
    with pytest.raises(ValueError, match="released memoryview"):
        view[0]
    assert lender.returns == (1, 0)


def test_it_is_released_once(lender: BufferOwner) -> None:
    message = message_of(lender)
    for _ in range(3):
        message.release()
    del message
    gc.collect()
    assert lender.returns == (1, 0)


def test_a_block_releases_it(lender: BufferOwner) -> None:
    with message_of(lender) as message:
        assert bytes(message.data) == b"hello"
        assert lender.returns == (0, 0)
    assert message.released
    with message_of(lender) as message:
        message.release()
    assert lender.returns == (2, 0)


def test_a_block_that_fails_releases_it(lender: BufferOwner) -> None:
    def fail() -> None:
        with message_of(lender):
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        fail()
    assert lender.returns == (1, 0)


def slice_of(message: Message) -> object:
    return message.data[1:3]


def view_of_the_view(message: Message) -> object:
    return memoryview(message.data)


def view_of_the_message(message: Message) -> object:
    return memoryview(message)


def cast_of(message: Message) -> object:
    return message.data.cast("c")


def array_of(message: Message) -> object:
    """As numpy.frombuffer() makes one, with an export of the view itself."""
    return (ctypes.c_char * 5).from_buffer(message.data)


def array_of_the_message(message: Message) -> object:
    return (ctypes.c_char * 5).from_buffer(message)


def array_of_a_slice(message: Message) -> object:
    return (ctypes.c_char * 2).from_buffer(message.data[1:3])


@pytest.mark.parametrize("is_kept", [False, True], ids=["data dropped", "data kept"])
@pytest.mark.parametrize(
    "look",
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
def test_it_is_not_released_while_something_looks_at_the_data(
    lender: BufferOwner, look: object, is_kept: bool
) -> None:
    assert callable(look)
    message = message_of(lender, bytearray(b"hello"))
    kept = message.data if is_kept else None
    looking = look(message)
    for _ in range(2):
        with pytest.raises(BufferError, match=STILL):
            message.release()
        assert not message.released
        assert bytes(message.data) == b"hello"
    assert lender.returns == (0, 0)
    del looking
    gc.collect()
    message.release()
    assert message.released
    assert lender.returns == (1, 0)
    del kept


def test_what_looks_at_the_data_still_reads_it_after_the_refusal(lender: BufferOwner) -> None:
    message = message_of(lender)
    part = message.data[1:3]
    with pytest.raises(BufferError, match=STILL):
        message.release()
    assert bytes(part) == b"el"
    part.release()
    message.release()


def test_a_block_that_leaves_a_slice_behind_says_so(lender: BufferOwner) -> None:
    message = message_of(lender)
    with pytest.raises(BufferError, match=STILL), message:
        part = message.data[:2]
    assert not message.released
    part.release()
    message.release()
    assert lender.returns == (1, 0)


def test_a_dropped_message_goes_back_by_another_way(lender: BufferOwner) -> None:
    message = message_of(lender)
    assert bytes(message.data) == b"hello"
    del message
    gc.collect()
    assert lender.returns == (0, 1)


def test_a_message_in_a_cycle_goes_back_too(lender: BufferOwner) -> None:
    holder: list[object] = [message_of(lender)]
    holder.append(holder)
    del holder
    gc.collect()
    assert lender.returns == (0, 1)


def test_a_message_that_another_thread_drops_goes_back(lender: BufferOwner) -> None:
    messages = [message_of(lender)]
    thread = threading.Thread(target=messages.clear)
    thread.start()
    thread.join()
    assert lender.returns == (0, 1)


@pytest.mark.parametrize("look", [slice_of, view_of_the_view, view_of_the_message, array_of])
def test_what_looks_at_the_data_keeps_the_message(lender: BufferOwner, look: object) -> None:
    assert callable(look)
    message = message_of(lender, bytearray(b"hello"))
    alive = weakref.ref(message)
    looking = look(message)
    del message
    gc.collect()
    assert alive() is not None
    assert lender.returns == (0, 0)
    assert bytes(looking)
    del looking
    gc.collect()
    assert alive() is None
    assert lender.returns == (0, 1)


def test_the_data_alone_keeps_the_message(lender: BufferOwner) -> None:
    view = message_of(lender).data
    gc.collect()
    assert bytes(view) == b"hello"
    assert lender.returns == (0, 0)
    del view
    gc.collect()
    assert lender.returns == (0, 1)


def test_data_that_the_user_released_can_be_had_again(lender: BufferOwner) -> None:
    message = message_of(lender)
    with message.data as view:
        assert bytes(view) == b"hello"
    assert bytes(message.data) == b"hello"
    message.release()
    assert lender.returns == (1, 0)


def test_the_memory_is_let_go_of(lender: BufferOwner) -> None:
    memory = bytearray(b"hello")
    message = message_of(lender, memory)
    with pytest.raises(BufferError):
        memory.append(0)
    message.release()
    memory.append(0)


def test_one_that_was_not_made_is_not_given_back() -> None:
    message = Message.__new__(Message)
    del message
    gc.collect()
