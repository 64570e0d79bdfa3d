"""FirstMessage: hold back the sends of an accepted iWARP connection until the peer is ready.

The first message of a peer says that it has the connection established. The accepting side needs
that if it has no confirmation of the connection manager yet.

On iWARP the connecting side sends first. A message that arrives there right behind the reply,
before that side is ready to receive, ends the connection. If it sends nothing, it is ready after
some time.
"""

from __future__ import annotations

from aiordma.loop import Deadline, Loop
from aiordma.qp.data_path import DataPath, EndpointCallbacks
from aiordma.verbs import Device

FIRST_MESSAGE_SECONDS = 0.05
SIW_FIRST_MESSAGE_SECONDS = 0.5  # a thread of the kernel has to run, on a machine that can be busy


class FirstMessage:
    """The first message of a peer, on the accepting side. On iWARP, sends wait for it."""

    def __init__(
        self, loop: Loop, device: Device, data_path: DataPath, callbacks: EndpointCallbacks
    ) -> None:
        self.has_arrived = False
        """True if a message of the peer has arrived."""
        self._loop = loop
        self._device = device
        self._data_path = data_path
        self._callbacks = callbacks
        self._timer: Deadline | None = None

    def expect(self) -> None:
        """Have the message reported: the connection is about to be accepted.

        On iWARP, hold back the sends until it has arrived.
        """
        self._data_path.report_message(True)
        if self._device.is_iwarp:
            self._data_path.sends.pause()

    def confirmed(self) -> None:
        """Handle the peer's confirmation, which the connection manager has received.

        On RoCE the message is not needed any more. On iWARP, wait for it a limited time.
        """
        if self._device.is_iwarp:
            is_siw = self._device.attributes.is_siw
            seconds = SIW_FIRST_MESSAGE_SECONDS if is_siw else FIRST_MESSAGE_SECONDS
            self._timer = Deadline(self._loop, seconds, self._on_timeout)
        else:
            self._data_path.report_message(False)

    def arrived(self) -> None:
        """Post the sends that were held back: the message has arrived."""
        self.has_arrived = True
        self._data_path.resume()

    def _on_timeout(self) -> None:
        """Post the sends that were held back: the peer has sent nothing in time.

        Or Linux's siw has not read it: data that arrives between its reply and the moment when it
        takes over the TCP connection stays unread until more arrives. The response to a probe is
        more data.
        """
        if self._callbacks.released:
            return
        self._data_path.resume()
        is_unread = self._device.attributes.is_siw and not self.has_arrived
        if is_unread and self._data_path.may_read and not self._callbacks.closed:
            self._data_path.probe()

    def stop(self) -> None:
        """Stop waiting: the connection is being destroyed."""
        if self._timer is not None:
            self._timer.cancel()
