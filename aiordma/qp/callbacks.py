"""Owner: the connection, as far as its data path needs it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from aiordma.enums import WcOpcode
from aiordma.errors import RdmaError, VerbsError
from aiordma.verbs import AsyncEvent

if TYPE_CHECKING:
    from aiordma._native._lib import IbvWc


class Owner(Protocol):
    """Knows whether the connection is open, and why not; is told of what ends it."""

    closed_here: bool
    """Whether this side has closed it."""

    @property
    def is_drained(self) -> bool:
        """Whether it has ended, and every message that arrived before has been seen."""

    def check_open(self) -> None:
        """Raise why nothing can be sent any more, if that is so."""

    def end_reason(self) -> RdmaError:
        """Why it ended."""

    async def ended(self) -> None:
        """Wait until it is known why a request that failed did, which is soon."""

    @property
    def released(self) -> bool:
        """Whether it is on its way to be destroyed: nothing is to be posted any more."""

    def not_posted(self, error: VerbsError) -> RdmaError:
        """What a refused request means."""

    def break_off(self, cause: RdmaError) -> None:
        """End it, for this cause if there was none before."""

    def request_failed(self, opcode: WcOpcode, wc: IbvWc) -> None:
        """The device reports a failed request, or one that was flushed."""

    def message_arrived(self) -> None:
        """The peer has sent something: it has seen the connection made."""

    def request_ended(self) -> None:
        """One request less is on its way."""

    def queue_pair_event(self, event: AsyncEvent) -> None:
        """The device says something about the queue pair."""

    def device_failed(self, error: VerbsError) -> None:
        """No completion will come any more: the device is gone."""
