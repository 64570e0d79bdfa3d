"""The number of times that a device repeats a packet without acknowledgment.

The connecting side chooses the number for both sides. rxe repeats for ever if it is 7, so that a
peer whose machine was switched off would never be noticed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from aiordma.cm import AsyncCmId
from aiordma.enums import QpState
from aiordma.errors import VerbsError
from aiordma.verbs import Device

logger = logging.getLogger(__name__)

RXE_MAX_RETRIES = 6


def finite_retries(device: Device, count: int) -> int:
    """Return `count`, or the largest number of retries that ends on `device`."""
    return min(count, RXE_MAX_RETRIES) if device.attributes.is_rxe else count


def retry_limit(cm: AsyncCmId, count: int) -> Callable[[], None] | None:
    """Return a function that limits the retries of an accepted connection; None if none is needed.

    `count` is the number that the peer has chosen. The function blocks: call it in a worker thread,
    before anything is sent. It raises VerbsError if the device has stopped the send queue, and does
    not let it go on.
    """
    finite = finite_retries(cm.device(), count)
    return None if finite == count else lambda: _set_retry_count(cm, finite)


def _set_retry_count(cm: AsyncCmId, finite: int) -> None:
    qp = cm.handle.qp
    if qp is None:
        return
    try:
        qp.set_retry_count(finite)
    except VerbsError as error:
        if qp.query_state() is QpState.SQD:
            raise
        logger.debug("ignored: %s", error)  # the peer has disconnected already
