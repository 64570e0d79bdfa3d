"""Keepalive: check that the peer's machine still answers.

On InfiniBand and RoCE, the peer's device acknowledges each request, and this side's device repeats
a request that is not acknowledged. When it gives up, the request fails. So nothing is needed as
long as requests are posted, and a probe on an idle connection is a request of no bytes.

On iWARP a request completes when TCP has taken it. TCP repeats it for about a quarter of an hour,
and an idle connection waits for ever. Only a message of the peer, or its reply to a read, shows
that its machine answers. So each connection on iWARP that has posted requests and hears nothing is
probed by a read of no bytes, and the time for the reply is limited here. A connection without reads
is checked as on InfiniBand, and TCP limits the time.

The answer can wait behind a transfer of either side, which the device does not report before its
end. So the time allows for the largest transfer that is possible, at SLOWEST_RATE.

Time is counted in checks. Each check first takes the completions that have arrived. A loop that was
stalled makes one late check, after which the peer still has the others.
"""

from __future__ import annotations

import math

from aiordma.errors import PeerTimeout
from aiordma.loop import Deadline, Loop
from aiordma.options import ConnectionOptions
from aiordma.qp.data_path import DataPath, EndpointCallbacks
from aiordma.qp.send_queue import NUMBER_MASK

# The smallest number of checks in peer_timeout.
CHECKS = 3
# Bytes per second.
SLOWEST_RATE = 1 << 24
# A work request has 32 bits for its length.
LARGEST_TRANSFER = 1 << 32


class Keepalive:
    """The timer that checks a connection, and the state of its probe."""

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
        self._limits_answer = False
        """True if the time for an answer is limited here, not by the device or TCP."""
        self._interval = 0.0
        self._timer: Deadline | None = None
        self._signs = 0
        self._quiet_checks = 0
        """The number of checks since the last sign of life."""
        self._posted = 0
        """The number of requests that had been posted at the last check."""
        self._confirmed = 0
        """The number of requests that were posted before the last sign of life."""
        self._is_probing = False
        """True if a probe was posted after the last sign of life."""
        self._before_probe = 0
        """The number of requests that were posted before the probe."""
        self._progress = 0
        self._stalled_checks = 0
        """The number of checks since the last progress towards an answer."""

    def start(self, *, is_iwarp: bool) -> None:
        """Begin to check, if the options or the transport need it: the connection is made."""
        self._limits_answer = is_iwarp and self._data_path.may_read
        self._interval = keepalive = self._options.keepalive
        if self._limits_answer:
            peer_timeout = self._options.peer_timeout
            checks = math.ceil(peer_timeout / keepalive) if keepalive else CHECKS
            self._interval = peer_timeout / max(checks, CHECKS)
        if self._interval:
            self._signs = self._count_signs()
            self._check_later()

    def stop(self) -> None:
        """Stop checking: the connection is being destroyed."""
        if self._timer is not None:
            self._timer.cancel()

    def _check_later(self) -> None:
        # A busy loop can run timers before it reads the completions that have arrived meanwhile.
        check = self._check
        self._timer = Deadline(self._loop, self._interval, lambda: self._data_path.drain(check))

    def _check(self) -> None:
        if self._callbacks.closed:
            return
        signs = self._count_signs()
        if signs != self._signs:
            # The peer was alive after the last check. Requests since then might not have arrived.
            self._signs, self._confirmed = signs, self._posted
            self._quiet_checks, self._is_probing = 0, False
        else:
            self._quiet_checks += 1
            if not self._limits_answer:
                self._is_probing = self._is_probing or self._data_path.probe()
            elif self._needs_answer():
                self._look_for_answer()
        self._posted = self._data_path.sends.posted  # with the probe
        if not self._callbacks.closed:
            self._check_later()

    def _count_signs(self) -> int:
        """Return a number that changes with each sign of life of the peer's machine."""
        path = self._data_path
        if self._limits_answer:
            return path.messages_received + path.reads_completed
        return path.messages_received + path.sends.core.oldest_pending

    def _needs_answer(self) -> bool:
        """Return True if requests are unconfirmed, or if `keepalive` seconds were quiet."""
        if self._confirmed != self._data_path.sends.posted:
            return True
        keepalive = self._options.keepalive
        return bool(keepalive) and self._quiet_checks >= keepalive / self._interval

    def _look_for_answer(self) -> None:
        """Post a probe, or end the connection if there was no progress for too long.

        The answer follows the completions of the requests before the probe: each is progress.
        Requests behind it are not, as TCP takes them even if the peer is silent. While no probe can
        be posted, each completion is progress.
        """
        sends = self._data_path.sends
        posted, progress = sends.posted, sends.core.oldest_pending
        is_new = not self._is_probing and self._data_path.probe()
        if is_new:
            self._is_probing, self._before_probe = True, posted
        if self._is_probing and (self._before_probe - progress) & NUMBER_MASK > NUMBER_MASK // 2:
            progress = self._before_probe  # it is later
        is_waiting = self._is_probing or len(sends) > 0
        if is_new or progress != self._progress or not is_waiting:
            self._progress, self._stalled_checks = progress, 0
            return
        self._stalled_checks += 1
        if self._stalled_checks >= self._checks_to_answer():
            seconds = self._stalled_checks * self._interval
            text = f"the peer has not answered for {seconds:g} s (see peer_timeout)"
            self._callbacks.fail(PeerTimeout(text))

    def _checks_to_answer(self) -> int:
        """Return the number of checks in which a peer that is alive makes progress."""
        largest = min(self._data_path.largest_transfer, LARGEST_TRANSFER)
        return round(self._options.peer_timeout / self._interval) + int(
            largest / SLOWEST_RATE / self._interval
        )
