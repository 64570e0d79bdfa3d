"""CallReader: has threads make calls on ids, and reads on its loop which calls have ended."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from operator import call

from aiordma.loop import Loop, call_each, note_use, run_with_inline_wakeups, watch_closed_loop
from aiordma.rdmacm import EndedCalls, IdCalls


class CallReader:
    """Threads of C make the calls, see IdCalls. Afterwards the loop calls `on_end` of each.

    If the loop is closed meanwhile, the watching thread calls it: see threadsafe_call.py.
    """

    def __init__(self, loop: Loop) -> None:
        """Start reading.

        Raises:
            VerbsError: EMFILE, ENOMEM.
        """
        note_use()
        self._loop = loop
        self._ended = EndedCalls()
        self._is_watched = False
        loop.add_reader(self._ended.fd, partial(run_with_inline_wakeups, self.run))

    def submit(self, calls: IdCalls, on_end: Callable[[], None]) -> None:
        """Have a thread make the calls, then have the loop call `on_end`. Does not block.

        Callable from any thread.
        """
        self._ended.submit(calls, on_end)
        if not self._is_watched:
            self._is_watched = True
            watch_closed_loop(self._loop, self)

    @property
    def is_claimed(self) -> bool:
        """True if no call is under way: the watching thread need not watch any more."""
        # A submit() in between either finds that this is not watched, or is found here.
        self._is_watched = False
        self._is_watched = bool(len(self._ended))
        return not self._is_watched

    def run(self) -> None:
        """Call `on_end` of the calls that have ended.

        The others belong to other ids: they are called even if one raises or is interrupted.
        """
        call_each(call, self._ended.take(), "could not handle the end of calls on an id")

    def stop(self) -> None:
        """Stop reading. Call it when no call is under way, as ChannelReader.stop()."""
        with suppress(RuntimeError):  # a closed loop watches no fd any more
            self._loop.remove_reader(self._ended.fd)
        self._ended.close()
