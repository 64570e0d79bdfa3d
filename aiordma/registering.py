"""Registering memory of the user's with the device of a loop."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from aiordma.dispatch import LoopDevice
from aiordma.enums import AccessFlags
from aiordma.errors import RdmaError
from aiordma.loop import Loop, hand_over, make_in_worker, workers
from aiordma.memory import MemoryRegion, exporting
from aiordma.verbs import Device, ProtectionDomain, Registration

if TYPE_CHECKING:
    from typing_extensions import Buffer

logger = logging.getLogger(__name__)

WRITE_ACCESS = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_ATOMIC


async def register(loop: Loop, device: Device, buffer: Buffer, access: AccessFlags) -> MemoryRegion:
    """Register `buffer` with the device of the loop's connections. See Connection.register."""
    _check_access(device, access)
    buffer = exporting(buffer)
    with memoryview(buffer) as view:
        if not view.nbytes:
            raise ValueError("an empty buffer cannot be registered")
        if view.readonly and access & WRITE_ACCESS:
            raise ValueError(f"a read-only buffer cannot be registered with {access!r}")
    return await _register(
        loop, device, buffer, access, lambda pd: Registration(pd, buffer, access)
    )


async def register_dmabuf(
    loop: Loop, device: Device, fd: int, part: tuple[int, int], access: AccessFlags
) -> MemoryRegion:
    """Register a part, offset and length, of a dma-buf. See Connection.register_dmabuf."""
    _check_access(device, access)
    offset, length = part
    if offset < 0 or length <= 0:
        raise ValueError(f"{length} bytes at offset {offset} cannot be registered")
    return await _register(
        loop, device, None, access, lambda pd: Registration.of_dmabuf(pd, fd, part, access)
    )


def _check_access(device: Device, access: AccessFlags) -> None:
    if access & AccessFlags.ON_DEMAND and not device.attributes.has_on_demand_paging:
        raise ValueError(
            f"{device.name} has no on-demand paging: register without AccessFlags.ON_DEMAND"
        )


async def _register(
    loop: Loop,
    device: Device,
    buffer: Buffer | None,
    access: AccessFlags,
    make: Callable[[ProtectionDomain], Registration],
) -> MemoryRegion:
    """Do it in a worker thread, in the protection domain of the loop's connections.

    Cancelling leaves nothing pinned. The region keeps the loop's share of the device until it is
    disposed of.
    """
    shared = LoopDevice.of(loop, device)

    def unpin(registration: Registration, over: Callable[[], None]) -> None:
        try:
            registration.close()
        except RdmaError:
            logger.exception("memory could not be unregistered")
        hand_over(loop, over)
        hand_over(loop, shared.release)

    def dispose(registration: Registration, over: Callable[[], None]) -> None:
        workers.submit(lambda: unpin(registration, over))

    try:
        registration = await make_in_worker(loop, lambda: make(shared.pd), Registration.close)
    except BaseException:
        shared.release()
        raise
    return MemoryRegion(registration, buffer, access, dispose)
