"""Byte views of buffers of any items, and the buffers that can be registered."""

from __future__ import annotations

import array
import ctypes
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from aiordma.memory import address_and_length, as_exporter, byte_view


class Point(ctypes.Structure):
    _fields_ = (("x", ctypes.c_int32), ("y", ctypes.c_double))


class Owned(ctypes.Structure):
    _fields_ = (("Offset", ctypes.c_int32), ("owner", ctypes.c_int32))  # "O" is no format here


class Picture(ctypes.Structure):
    _fields_ = (("pixels", ctypes.c_uint8 * 3 * 2), ("where", Point))


GRID = memoryview(bytes(range(24))).cast("B", [2, 3, 4])
CONTIGUOUS: list[Any] = [
    b"", b"abc", bytearray(b"abc"), bytearray(), array.array("d"), memoryview(b"abc"),
    memoryview(b"abcdef")[2:4], memoryview(b"abc").cast("c"), memoryview(b"abc")[1:1], GRID,
    ctypes.c_int(5), Point(1, 2.0), (Point * 3)(), (ctypes.c_int * 4)(1, 2, 3, 4), Picture(),
    Owned(1, 2), array.array("u" if sys.version_info < (3, 13) else "w", "xyz"),
    *(array.array(code, [1, 2, 3]) for code in "bBhHiIlLqQfd"),
]  # fmt: skip


@pytest.mark.parametrize(
    "buffer", CONTIGUOUS, ids=lambda buffer: f"{type(buffer).__name__} {memoryview(buffer).format}"
)
def test_a_contiguous_buffer_is_not_copied(buffer: Any) -> None:
    expected = memoryview(buffer)
    viewed = byte_view(buffer)
    assert (viewed.format, viewed.ndim, viewed.itemsize) == ("B", 1, 1)
    assert (viewed.nbytes, viewed.readonly) == (expected.nbytes, expected.readonly)
    assert bytes(viewed) == expected.tobytes()
    if expected.nbytes:
        assert address_and_length(viewed) == address_and_length(buffer)
    assert as_exporter(buffer) is buffer


@pytest.mark.parametrize(
    ("view", "expected"),
    [
        (memoryview(b"abcdef")[::2], b"ace"),
        (memoryview(b"abcdef")[::-1], b"fedcba"),
        (memoryview(bytes(range(12))).cast("i")[::2], bytes([0, 1, 2, 3, 8, 9, 10, 11])),
        (GRID[::2], bytes(range(12))),
    ],
)
def test_a_buffer_that_is_not_contiguous_is_copied(view: memoryview, expected: bytes) -> None:
    viewed = byte_view(view)
    assert (bytes(viewed), viewed.format, viewed.ndim) == (expected, "B", 1)
    if not view.contiguous:
        with pytest.raises(BufferError):
            address_and_length(view)


@pytest.mark.parametrize("code", "Bd")
def test_a_view_exports_the_buffer_until_it_is_released(code: str) -> None:
    numbers = array.array(code, [1])
    as_exporter(numbers)
    viewed = byte_view(numbers)
    viewed[:] = bytes(numbers.itemsize)
    assert list(numbers) == [0]
    with pytest.raises(BufferError):
        numbers.append(2)
    viewed.release()
    numbers.append(2)


@pytest.mark.parametrize("thing", ["text", None, 5, [b"abc"]])
def test_an_object_without_memory_is_refused(thing: Any) -> None:
    with pytest.raises(TypeError):
        byte_view(thing)
    with pytest.raises(TypeError, match="bytes-like"):
        as_exporter(thing)


def test_python_objects_are_refused() -> None:
    with pytest.raises(ValueError, match="Python objects"):
        as_exporter((ctypes.py_object * 2)())
    views: list[str] = []

    def view(kind: str) -> memoryview:
        views.append(kind)
        return memoryview(b"20260101")

    # Arrays that export only byte views of themselves, like numpy's arrays of dates.
    of_objects: Any = SimpleNamespace(dtype=SimpleNamespace(hasobject=True), view=view)
    with pytest.raises(TypeError):
        as_exporter(of_objects)
    of_dates: Any = SimpleNamespace(dtype=SimpleNamespace(hasobject=False), view=view)
    assert (bytes(as_exporter(of_dates)), views) == (b"20260101", ["u1"])


def test_address_and_length_are_in_bytes() -> None:
    memory = bytearray(100)
    address, length = address_and_length(memory)
    assert (ctypes.addressof(ctypes.c_char.from_buffer(memory)), length) == (address, 100)
    assert address_and_length(memoryview(memory)[10:30]) == (address + 10, 20)
