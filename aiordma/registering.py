"""Registering memory of the user's with the device of a loop."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from aiordma.dispatch import LoopDevice
from aiordma.enums import AccessFlags
from aiordma.errors import RdmaError
from aiordma.loop import Loop, hand_over, make_in_worker, workers
from aiordma.memory import MemoryRegion
from aiordma.verbs import Device, Registration

if TYPE_CHECKING:
    from typing_extensions import Buffer

logger = logging.getLogger(__name__)


async def register(loop: Loop, device: Device, buffer: Buffer, access: AccessFlags) -> MemoryRegion:
    """Pin `buffer` in a worker thread, in the protection domain of the loop's connections.

    Cancelling leaves nothing pinned. The region keeps the loop's share of the device until it is
    disposed of.
    """
    shared = LoopDevice.of(loop, device)

    def unpin(registration: Registration) -> None:
        try:
            registration.close()
        except RdmaError:
            logger.exception("memory could not be unregistered")
        hand_over(loop, shared.release)

    def dispose(registration: Registration) -> None:
        workers.submit(lambda: unpin(registration))

    try:
        registration = await make_in_worker(
            loop, lambda: Registration(shared.pd, buffer, access), Registration.close
        )
    except BaseException:
        shared.release()
        raise
    return MemoryRegion(registration, buffer, access, dispose)
