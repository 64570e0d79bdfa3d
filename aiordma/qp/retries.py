"""The number of times that a device repeats a packet without acknowledgment.

The connecting side chooses the number for both sides. rxe repeats for ever if it is 7, so that a
peer whose machine was switched off would never be noticed.
"""

from __future__ import annotations

import logging

from aiordma.cm import AsyncCmId
from aiordma.enums import QpState
from aiordma.errors import VerbsError
from aiordma.verbs import Device

logger = logging.getLogger(__name__)

RXE_MAX_RETRIES = 6


def finite_retries(device: Device, count: int) -> int:
    """Return `count`, or the largest number of retries that ends on `device`."""
    return min(count, RXE_MAX_RETRIES) if device.attributes.is_rxe else count


def limit_retries(cm: AsyncCmId, count: int) -> None:
    """Limit the retries of an accepted connection whose peer has chosen `count`.

    Blocks: call it in a worker thread, before anything is sent.

    Raises:
        VerbsError: the device has stopped the send queue, and does not let it go on.
    """
    qp, finite = cm.handle.qp, finite_retries(cm.cm_id.device(), count)
    if qp is None or finite == count:
        return
    try:
        qp.set_retry_count(finite)
    except VerbsError as error:
        if qp.query_state() is QpState.SQD:
            raise
        logger.debug("ignored: %s", error)  # the peer has disconnected already
