"""Views of any buffer as bytes, whatever its items are."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from aiordma._native import ffi

if TYPE_CHECKING:
    from typing_extensions import Buffer

# The name of a field in the format string of a record. See PEP 3118.
_FIELD_NAME = re.compile(":[^:]*:")


def as_exporter(buffer: Buffer) -> Buffer:
    """Return `buffer`, or a byte view of it if the buffer protocol has no format for its items.

    For instance, numpy does not export arrays of dates, but it exports their views as bytes.

    Raises:
        TypeError: `buffer` does not support the buffer protocol.
        BufferError: `buffer` is not contiguous.
        ValueError: its items are Python objects, which are useless to another process.
    """
    try:
        with memoryview(buffer) as view:
            if "O" in _FIELD_NAME.sub("", view.format):
                raise ValueError("an array of Python objects cannot be sent or registered")
            if not view.c_contiguous:
                raise BufferError("the buffer is not contiguous")
    except (ValueError, TypeError):
        if getattr(getattr(buffer, "dtype", None), "hasobject", True):
            raise
        as_bytes: Buffer = getattr(buffer, "view")("u1")  # noqa: B009 - numpy has it, Buffer not
        return as_bytes
    return buffer


def address_and_length(buffer: Buffer) -> tuple[int, int]:
    """Return the address of `buffer`, and its length in bytes.

    Raises:
        BufferError: `buffer` is not contiguous.
    """
    data = ffi.from_buffer("char[]", buffer)
    return int(ffi.cast("uintptr_t", data)), len(data)


def byte_view(buffer: Buffer) -> memoryview:
    """Return a view of the bytes of `buffer`, or of a copy if `buffer` is not contiguous.

    Until the view is released, `buffer` can be neither freed nor resized, unless it was copied.
    """
    view = memoryview(buffer)
    if not view.nbytes:  # writable if `buffer` is
        return memoryview(b"" if view.readonly else bytearray())
    if not view.c_contiguous:
        return memoryview(view.tobytes())
    if view.ndim == 1 and view.format == "B":
        return view
    # memoryview.cast() supports simple items only; the items of numpy arrays can be records.
    in_bytes = memoryview(ffi.buffer(ffi.from_buffer("char[]", view), view.nbytes))
    return in_bytes.toreadonly() if view.readonly else in_bytes
