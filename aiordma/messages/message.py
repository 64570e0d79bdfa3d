"""Message: what arrived, where it arrived."""

from __future__ import annotations

import weakref
from types import TracebackType
from typing import Protocol, Self

from aiordma._native import BufferExporter

STILL_EXPORTED = "the message is still looked at: let go of slices and arrays of its data first"


class BufferOwner(Protocol):
    """Who owns the buffer."""

    def release(self) -> None:
        """The message is not needed any more. On the loop's thread."""

    def release_threadsafe(self) -> None:
        """Likewise, from any thread."""


class Message(BufferExporter):
    """A message in the receive buffer that the device put it in: nothing is copied.

    From `Connection.recv_message()`. release() gives the buffer back, as does the end of a `with`
    block, and the garbage collector once nothing looks at the message any more.
    """

    __slots__ = ("__weakref__", "_buffer_owner", "_data", "_length", "imm", "invalidated")

    def __init__(
        self,
        memory: memoryview,
        imm: int | None,
        invalidated: int | None,
        buffer_owner: BufferOwner,
    ) -> None:
        """For Connection; not to be called by others."""
        self._exported = memory
        self._length = memory.nbytes
        self._buffer_owner: BufferOwner | None = buffer_owner
        self._data: weakref.ref[memoryview] | None = None
        self.imm = imm
        """The number of 32 bits that came beside the data, or None."""
        self.invalidated = invalidated
        """The key of this side's that the peer has invalidated with it, or None."""

    @property
    def data(self) -> memoryview:
        """The bytes, until release().

        Raises:
            ValueError: it is released.
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
        """Whether the buffer was given back."""
        return self._buffer_owner is None

    def release(self) -> None:
        """Give the buffer back; `data` cannot be read any more. Idempotent. On the loop's thread.

        Raises:
            BufferError: something else still looks at the data, such as a slice of it or a numpy
                array. The message is not released, but `data` has to be had anew.
        """
        if self._buffer_owner is None:
            return
        self._release_view()
        buffer_owner, self._buffer_owner = self._buffer_owner, None
        del self._exported
        buffer_owner.release()

    def _release_view(self) -> None:
        view = self._data() if self._data is not None else None
        if view is not None:
            try:
                view.release()
            except BufferError:
                raise BufferError(STILL_EXPORTED) from None
            self._data = None
        if self._views:  # a slice of `data` is no view of `data`, but one of the message
            raise BufferError(STILL_EXPORTED)

    def __len__(self) -> int:
        """Its length in bytes."""
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
        view.nbytes  # noqa: B018 - which is all there is to ask
    except ValueError:
        return True
    return False
