"""Byte views of buffers of any items, and the buffers that can be registered."""

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


# --- byte_view ---


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
def test_a_contiguous_buffer_is_not_copied(buffer: Any) -> None:
    expected = memoryview(buffer)
    viewed = byte_view(buffer)
    assert (viewed.format, viewed.ndim, viewed.itemsize) == ("B", 1, 1)
    assert viewed.nbytes == expected.nbytes
    assert bytes(viewed) == expected.tobytes()
    assert viewed.readonly == expected.readonly
    assert address_and_length(viewed) == address_and_length(buffer)


def test_writing_to_the_view_writes_to_the_buffer() -> None:
    numbers = array.array("i", [0, 0])
    viewed = byte_view(numbers)
    viewed[:] = struct.pack("ii", 5, 6)
    assert list(numbers) == [5, 6]


@pytest.mark.parametrize("items", [b"abcdef", array.array("i", [1, 2, 3]).tobytes()])
def test_a_view_of_a_read_only_buffer_is_read_only(items: bytes) -> None:
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
def test_a_buffer_that_is_not_contiguous_is_copied(view: memoryview, expected: bytes) -> None:
    viewed = byte_view(view)
    assert bytes(viewed) == expected
    assert (viewed.format, viewed.ndim) == ("B", 1)


@pytest.mark.parametrize("empty", [b"", bytearray(), array.array("d"), memoryview(b"abc")[1:1]])
def test_a_view_of_an_empty_buffer_is_empty(empty: bytes) -> None:
    assert (bytes(byte_view(empty)), byte_view(empty).nbytes) == (b"", 0)


@pytest.mark.parametrize("code", "Bd")
def test_a_view_exports_the_buffer_until_it_is_released(code: str) -> None:
    numbers = array.array(code, [1])
    viewed = byte_view(numbers)
    with pytest.raises(BufferError):
        numbers.append(2)
    viewed.release()
    numbers.append(2)


def test_an_object_that_is_no_buffer_is_refused() -> None:
    with pytest.raises(TypeError):
        byte_view("text")  # type: ignore[arg-type]


# --- as_exporter ---


@pytest.mark.parametrize(
    "buffer",
    [b"abc", bytearray(b"abc"), array.array("d", [1.0]), grid(), Point(), (Point * 3)(), Picture()],
    ids=lambda buffer: f"{type(buffer).__name__} {memoryview(buffer).format}",
)
def test_a_buffer_is_its_own_exporter(buffer: Any) -> None:
    assert as_exporter(buffer) is buffer


def test_an_array_of_python_objects_is_refused() -> None:
    with pytest.raises(ValueError, match="Python objects"):
        as_exporter((ctypes.py_object * 2)())


def test_a_record_with_the_code_of_objects_in_a_field_name_is_accepted() -> None:
    record = Owned(1, 2)
    assert as_exporter(record) is record


@pytest.mark.parametrize("thing", ["text", None, 5, [b"abc"]])
def test_an_object_without_memory_is_refused(thing: Any) -> None:
    with pytest.raises(TypeError, match="bytes-like"):
        as_exporter(thing)


def test_as_exporter_keeps_no_export_of_the_buffer() -> None:
    memory = bytearray(3)
    as_exporter(memory)
    memory.append(1)


class FakeType:
    def __init__(self, hasobject: bool) -> None:
        self.hasobject = hasobject


class Dates:
    """An array that exports only byte views of itself, like a numpy array of dates."""

    def __init__(self, hasobject: bool = False) -> None:
        self.dtype = FakeType(hasobject)
        self.memory = bytearray(b"20260101")
        self.views: list[str] = []

    def view(self, kind: str) -> memoryview:
        self.views.append(kind)
        return memoryview(self.memory)


def test_an_array_without_a_format_is_viewed_as_bytes() -> None:
    dates: Any = Dates()
    viewed = as_exporter(dates)
    assert bytes(viewed) == b"20260101"
    assert dates.views == ["u1"]


def test_an_array_of_objects_is_not_viewed_as_bytes() -> None:
    objects: Any = Dates(hasobject=True)
    with pytest.raises(TypeError):
        as_exporter(objects)
    assert objects.views == []


# --- address_and_length ---


def test_address_and_length_are_in_bytes() -> None:
    memory = bytearray(100)
    address, length = address_and_length(memory)
    assert length == 100
    assert address_and_length(memoryview(memory)[10:30]) == (address + 10, 20)
    assert ctypes.addressof(ctypes.c_char.from_buffer(memory)) == address
    assert address_and_length(array.array("d", [1.0, 2.0]))[1] == 16


def test_a_buffer_that_is_not_contiguous_has_no_address() -> None:
    with pytest.raises(BufferError):
        address_and_length(memoryview(b"abcdef")[::2])
