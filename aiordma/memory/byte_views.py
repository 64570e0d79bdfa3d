"""Buffers of any items, as bytes."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from aiordma._native import ffi

if TYPE_CHECKING:
    from typing_extensions import Buffer

# In the format of a record, as of PEP 3118.
_FIELD_NAME = re.compile(":[^:]*:")


def as_exporter(buffer: Buffer) -> Buffer:
    """The buffer itself, or the same memory as bytes if its items have no name in the protocol.

    numpy, for one, exports no arrays of dates, but views of them as bytes.

    Raises:
        TypeError: it has no memory of its own.
        BufferError: it is not contiguous.
        ValueError: it holds Python objects, which are of no use to anybody else.
    """
    try:
        with memoryview(buffer) as view:
            if "O" in _FIELD_NAME.sub("", view.format):
                raise ValueError("an array of Python objects has no data to be sent or registered")
            if not view.c_contiguous:
                raise BufferError("the buffer is not contiguous")
    except (ValueError, TypeError):
        if getattr(getattr(buffer, "dtype", None), "hasobject", True):
            raise
        viewed: Buffer = getattr(buffer, "view")("u1")  # noqa: B009 - of numpy, not of Buffer
        return viewed
    return buffer


def address_and_length(buffer: Buffer) -> tuple[int, int]:
    """The address of a buffer, and its length in bytes.

    Raises:
        BufferError: it is not contiguous.
    """
    data = ffi.from_buffer("char[]", buffer)
    return int(ffi.cast("uintptr_t", data)), len(data)


def byte_view(buffer: Buffer) -> memoryview:
    """The bytes of a buffer, copied only if they do not lie in a row. Holds the buffer."""
    view = memoryview(buffer)
    if not view.c_contiguous or not view.nbytes:
        return memoryview(view.tobytes())
    if view.ndim == 1 and view.format == "B":
        return view
    # memoryview.cast() knows simple items only, and numpy's may be records.
    in_bytes = memoryview(ffi.buffer(ffi.from_buffer("char[]", view), view.nbytes))
    return in_bytes.toreadonly() if view.readonly else in_bytes
