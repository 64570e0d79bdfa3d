"""Message: a received message in the buffer in which it arrived."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

from aiordma._native import BufferExporter

STILL_EXPORTED = "the data of the message is still in use: release slices and arrays of it first"


class BufferOwner(Protocol):
    """The owner of a message's receive buffer."""

    def release(self) -> None:
        """Take the buffer back. Called on the loop's thread."""

    def release_threadsafe(self) -> None:
        """Take the buffer back. Callable from any thread."""


class Message(BufferExporter):
    """A received message in the buffer to which the device wrote it, without a copy.

    `Connection.recv_message()` returns one. The buffer is used for other messages after release(),
    which the end of a `with` block calls too. A message that is garbage-collected, with all views
    of its data, is released as well.

    `memoryview(message)` and numpy.frombuffer() work on it without a copy. `len(message)` is its
    length in bytes.
    """

    __slots__ = ("__weakref__", "_buffer_owner", "_data", "_length", "imm", "invalidated")

    def __init__(
        self,
        memory: memoryview,
        imm: int | None,
        invalidated: int | None,
        buffer_owner: BufferOwner,
    ) -> None:
        """Called by Connection.recv_message(); not for users."""
        self._exported = memory
        self._length = memory.nbytes
        self._buffer_owner: BufferOwner | None = buffer_owner
        self._data: weakref.ref[memoryview] | None = None
        self.imm = imm
        """The immediate data, a number of 32 bits. None: the message has none."""
        self.invalidated = invalidated
        """The key (rkey) of this side that the message has invalidated. None: none."""

    @property
    def data(self) -> memoryview:
        """A view of the bytes. release() releases the view too.

        Raises:
            ValueError: the message is released.
        """
        if self._buffer_owner is None:
            raise ValueError("the message is released")
        view = self._data() if self._data is not None else None
        if view is None or _is_released(view):
            view = memoryview(self)
            self._data = weakref.ref(view)
        return view

    @property
    def released(self) -> bool:
        """True if the message is released."""
        return self._buffer_owner is None

    def release(self) -> None:
        """Release the receive buffer; `data` cannot be read any more. Idempotent.

        Call it on the loop's thread.

        Raises:
            BufferError: the data is still in use, for example by a slice of it or by a numpy array.
                The message is then not released, but the view that `data` returned before can be:
                take a new one from `data`.
        """
        if self._buffer_owner is None:
            return
        self._release_view()
        buffer_owner, self._buffer_owner = self._buffer_owner, None
        del self._exported
        buffer_owner.release()

    def _wrap_owner(self, wrap: Callable[[BufferOwner], BufferOwner]) -> None:
        """Have `wrap(owner)` take the buffer back, in place of `owner`. For message streams."""
        if self._buffer_owner is not None:
            self._buffer_owner = wrap(self._buffer_owner)

    def _release_view(self) -> None:
        view = self._data() if self._data is not None else None
        if view is not None:
            try:
                view.release()
            except BufferError:
                raise BufferError(STILL_EXPORTED) from None
            self._data = None
        if self._views:  # a slice of `data` is a view of the message, not of `data`
            raise BufferError(STILL_EXPORTED)

    def __len__(self) -> int:
        """Return the length in bytes."""
        return self._length

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()

    def __del__(self) -> None:
        buffer_owner = getattr(self, "_buffer_owner", None)
        if buffer_owner is not None:
            buffer_owner.release_threadsafe()

    def __repr__(self) -> str:
        state = "released" if self.released else f"{len(self)} bytes"
        return f"<Message {state}>"


def _is_released(view: memoryview) -> bool:
    try:
        view.nbytes  # noqa: B018 - a memoryview has no other way to find out
    except ValueError:
        return True
    return False
