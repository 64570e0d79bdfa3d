"""Buffers of any items as bytes, and which of them can be registered."""

from __future__ import annotations

import array
import ctypes
import struct
import sys
from typing import Any

import pytest

from aiordma.memory import address_and_length, as_exporter, byte_view


class Point(ctypes.Structure):
    _fields_ = (("x", ctypes.c_int32), ("y", ctypes.c_double))


class Owned(ctypes.Structure):
    _fields_ = (("Offset", ctypes.c_int32), ("owner", ctypes.c_int32))


class Picture(ctypes.Structure):
    _fields_ = (("pixels", ctypes.c_uint8 * 3 * 2), ("where", Point))


def grid(items: bytes = bytes(range(24))) -> memoryview:
    return memoryview(items).cast("B", [2, 3, 4])


# --- as bytes ---


@pytest.mark.parametrize("code", "bBhHiIlLqQfd")
def test_arrays_of_numbers_are_their_bytes(code: str) -> None:
    numbers = array.array(code, [1, 2, 3])
    assert bytes(byte_view(numbers)) == numbers.tobytes()
    assert byte_view(numbers).nbytes == len(byte_view(numbers)) == 3 * numbers.itemsize


@pytest.mark.parametrize(
    "buffer",
    [
        b"abc",
        bytearray(b"abc"),
        memoryview(b"abc"),
        memoryview(b"abcdef")[2:4],
        memoryview(b"abc").cast("c"),
        grid(),
        ctypes.c_int(5),
        Point(1, 2.0),
        (Point * 3)(),
        (ctypes.c_int * 4)(1, 2, 3, 4),
        Picture(),
        array.array("u" if sys.version_info < (3, 13) else "w", "xyz"),
    ],
    ids=lambda buffer: f"{type(buffer).__name__} {memoryview(buffer).format}",
)
def test_what_lies_in_a_row_is_not_copied(buffer: Any) -> None:
    expected = memoryview(buffer)
    seen = byte_view(buffer)
    assert (seen.format, seen.ndim, seen.itemsize) == ("B", 1, 1)
    assert seen.nbytes == expected.nbytes
    assert bytes(seen) == expected.tobytes()
    assert seen.readonly == expected.readonly
    assert address_and_length(seen) == address_and_length(buffer)


def test_what_is_written_through_it_reaches_the_buffer() -> None:
    numbers = array.array("i", [0, 0])
    seen = byte_view(numbers)
    seen[:] = struct.pack("ii", 5, 6)
    assert list(numbers) == [5, 6]


@pytest.mark.parametrize("items", [b"abcdef", array.array("i", [1, 2, 3]).tobytes()])
def test_what_is_read_only_stays_so(items: bytes) -> None:
    for view in (memoryview(items), memoryview(items).cast("h"), memoryview(items).cast("c")):
        with pytest.raises(TypeError, match="read-only"):
            byte_view(view)[0] = 1


@pytest.mark.parametrize(
    ("view", "expected"),
    [
        (memoryview(b"abcdef")[::2], b"ace"),
        (memoryview(b"abcdef")[::-1], b"fedcba"),
        (memoryview(bytes(range(12))).cast("i")[::2], bytes([0, 1, 2, 3, 8, 9, 10, 11])),
        (grid()[::2], bytes(range(12))),
    ],
)
def test_what_does_not_lie_in_a_row_is_copied(view: memoryview, expected: bytes) -> None:
    seen = byte_view(view)
    assert bytes(seen) == expected
    assert (seen.format, seen.ndim) == ("B", 1)


@pytest.mark.parametrize("empty", [b"", bytearray(), array.array("d"), memoryview(b"abc")[1:1]])
def test_nothing_is_no_bytes(empty: bytes) -> None:
    assert (bytes(byte_view(empty)), byte_view(empty).nbytes) == (b"", 0)


@pytest.mark.parametrize("code", "Bd")
def test_it_holds_the_buffer_until_it_is_dropped(code: str) -> None:
    numbers = array.array(code, [1])
    seen = byte_view(numbers)
    with pytest.raises(BufferError):
        numbers.append(2)
    seen.release()
    numbers.append(2)


def test_what_is_no_buffer_is_refused() -> None:
    with pytest.raises(TypeError):
        byte_view("text")  # type: ignore[arg-type]


# --- to be registered ---


@pytest.mark.parametrize(
    "buffer",
    [b"abc", bytearray(b"abc"), array.array("d", [1.0]), grid(), Point(), (Point * 3)(), Picture()],
    ids=lambda buffer: f"{type(buffer).__name__} {memoryview(buffer).format}",
)
def test_what_has_memory_is_registered_as_it_is(buffer: Any) -> None:
    assert as_exporter(buffer) is buffer


def test_python_objects_are_refused() -> None:
    with pytest.raises(ValueError, match="Python objects"):
        as_exporter((ctypes.py_object * 2)())


def test_a_record_whose_field_is_only_called_so_holds_no_objects() -> None:
    record = Owned(1, 2)
    assert as_exporter(record) is record


@pytest.mark.parametrize("thing", ["text", None, 5, [b"abc"]])
def test_what_has_no_memory_is_refused(thing: Any) -> None:
    with pytest.raises(TypeError, match="bytes-like"):
        as_exporter(thing)


def test_nothing_is_held_afterwards() -> None:
    memory = bytearray(3)
    as_exporter(memory)
    memory.append(1)


class FakeType:
    def __init__(self, hasobject: bool) -> None:
        self.hasobject = hasobject


class Dates:
    """An array that exports itself as bytes only, as numpy's arrays of dates."""

    def __init__(self, hasobject: bool = False) -> None:
        self.dtype = FakeType(hasobject)
        self.memory = bytearray(b"20260101")
        self.views: list[str] = []

    def view(self, kind: str) -> memoryview:
        self.views.append(kind)
        return memoryview(self.memory)


def test_arrays_whose_items_have_no_name_are_seen_as_bytes() -> None:
    dates: Any = Dates()
    seen = as_exporter(dates)
    assert bytes(seen) == b"20260101"
    assert dates.views == ["u1"]


def test_arrays_of_objects_are_not() -> None:
    objects: Any = Dates(hasobject=True)
    with pytest.raises(TypeError):
        as_exporter(objects)
    assert objects.views == []


# --- where it is ---


def test_bounds_are_an_address_and_bytes() -> None:
    memory = bytearray(100)
    address, length = address_and_length(memory)
    assert length == 100
    assert address_and_length(memoryview(memory)[10:30]) == (address + 10, 20)
    assert ctypes.addressof(ctypes.c_char.from_buffer(memory)) == address
    assert address_and_length(array.array("d", [1.0, 2.0]))[1] == 16


def test_what_is_not_contiguous_has_no_bounds() -> None:
    with pytest.raises(BufferError):
        address_and_length(memoryview(b"abcdef")[::2])
