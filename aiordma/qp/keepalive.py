"""Keepalive: check that the peer's machine still answers.

On InfiniBand and RoCE, the peer's device acknowledges each request, and this side's device repeats
a request that is not acknowledged. When it gives up, the request fails. So nothing is needed as
long as requests are posted, and a probe on an idle connection is a request of no bytes.

On iWARP a request completes when TCP has taken it. TCP repeats it for about a quarter of an hour,
and an idle connection waits for ever. Only a message of the peer, or its reply to a read, shows
that its machine answers. So each connection on iWARP that has posted requests and hears nothing is
probed by a read of no bytes, and the time for the reply is limited here.
"""

from __future__ import annotations

from aiordma.errors import PeerTimeout
from aiordma.loop import Deadline, Loop
from aiordma.options import ConnectionOptions
from aiordma.qp.data_path import DataPath, EndpointCallbacks

# On iWARP without keepalive, this many checks are made within peer_timeout.
CHECKS = 3


class Keepalive:
    """The timer that checks a connection, and its probe."""

    def __init__(
        self,
        loop: Loop,
        options: ConnectionOptions,
        data_path: DataPath,
        callbacks: EndpointCallbacks,
    ) -> None:
        self._loop = loop
        self._options = options
        self._data_path = data_path
        self._callbacks = callbacks
        self._interval = 0.0
        self._is_iwarp = False
        self._is_probing = False
        self._answers = 0
        self._posted = 0
        """The number of requests that had been posted at the last check."""
        self._confirmed = 0
        """The number of requests that were posted before the last sign of life."""
        self._progress: tuple[int, ...] = ()
        self._check_timer: Deadline | None = None
        self._answer_timer: Deadline | None = None

    def start(self, *, is_iwarp: bool) -> None:
        """Begin to check, if the options or the transport need it: the connection is made."""
        self._is_iwarp = is_iwarp
        self._interval = self._options.keepalive
        if is_iwarp and not self._interval and self._data_path.may_probe:
            self._interval = self._options.peer_timeout / CHECKS
        if self._interval:
            self._answers = self._count_answers()
            self._check_later()

    def stop(self) -> None:
        """Stop checking: the connection is being destroyed."""
        for timer in (self._check_timer, self._answer_timer):
            if timer is not None:
                timer.cancel()

    def _check_later(self) -> None:
        self._check_timer = Deadline(self._loop, self._interval, self._check)

    def _check(self) -> None:
        if self._callbacks.closed:
            return
        answers, posted = self._count_answers(), self._data_path.sends.posted
        if answers != self._answers:
            # The peer was alive after the last check. Requests since then might not have arrived.
            self._answers = answers
            self._answered(self._posted)
        elif not self._is_probing and (self._options.keepalive or posted != self._confirmed):
            self._probe()
        self._posted = posted
        self._check_later()

    def _count_answers(self) -> int:
        """Return a number that changes with each sign of life of the peer's machine."""
        received = self._data_path.messages_received
        return received if self._is_iwarp else received + self._data_path.sends.core.oldest_pending

    def _answered(self, confirmed: int) -> None:
        """Note that the peer's machine has answered after `confirmed` requests were posted."""
        self._is_probing = False
        self._confirmed = confirmed
        if self._answer_timer is not None:
            self._answer_timer.cancel()

    def _probe(self) -> None:
        self._is_probing = True
        self._data_path.probe(lambda: self._answered(posted))
        posted = self._data_path.sends.posted  # with the probe
        if self._is_iwarp and not self._callbacks.closed:
            self._await_answer()

    def _await_answer(self) -> None:
        self._progress = self._measure_progress()
        self._answer_timer = Deadline(self._loop, self._options.peer_timeout, self._no_answer)

    def _measure_progress(self) -> tuple[int, ...]:
        sends = self._data_path.sends
        return sends.core.oldest_pending, sends.core.in_flight, self._data_path.messages_received

    def _no_answer(self) -> None:
        """End the connection, unless requests before the probe have completed meanwhile."""
        if self._callbacks.closed:
            return
        if self._progress != self._measure_progress():
            self._await_answer()
            return
        seconds = self._options.peer_timeout
        self._callbacks.fail(
            PeerTimeout(f"the peer has not answered for {seconds:g} s (peer_timeout)")
        )
