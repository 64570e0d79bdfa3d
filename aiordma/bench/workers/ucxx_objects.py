"""Objects over ucxx, whose wheels have no RDMA: over TCP."""

from __future__ import annotations

import asyncio
import importlib
import os
from collections.abc import Callable
from typing import Any

from aiordma.bench.plan import Work
from aiordma.bench.sample import Sample
from aiordma.bench.workers.objects import Objects, measure_objects, serve_objects


class UcxxAdapter:
    """Objects over an endpoint of ucxx: send_obj() and recv_obj()."""

    def __init__(self, endpoint: Any) -> None:
        self._endpoint = endpoint

    async def prepare(self, nbytes: int) -> None:
        """See Objects."""
        self._object = bytearray(nbytes)

    async def send_all(self, count: int) -> None:
        """See Objects."""
        for _ in range(count):
            await self._endpoint.send_obj(self._object)

    async def send(self, data: bytes) -> None:
        """See Objects."""
        await self._endpoint.send_obj(bytearray(data))

    async def receive(self) -> int:
        """See Objects."""
        return len(await self._endpoint.recv_obj())

    async def receive_small(self) -> bytes:
        """See Objects."""
        return bytes(await self._endpoint.recv_obj())

    async def aclose(self) -> None:
        """See Objects."""
        await self._endpoint.close()


def _import_ucxx() -> Any:
    os.environ["UCX_TLS"] = "tcp"
    os.environ["UCX_WARN_UNUSED_ENV_VARS"] = "n"
    return importlib.import_module("ucxx")


async def serve(host: str, announce: Callable[[int], None], work: Work) -> None:
    """Serve one client over ucxx."""
    ucxx = _import_ucxx()
    accepted: asyncio.Future[Objects] = asyncio.get_running_loop().create_future()

    async def accept(endpoint: Any) -> None:
        accepted.set_result(UcxxAdapter(endpoint))

    listener = ucxx.create_listener(accept)
    announce(listener.port)
    await serve_objects(await accepted, work)


async def measure(host: str, port: int, work: Work) -> Sample:
    """Connect over ucxx and send objects."""
    endpoint = await _import_ucxx().create_endpoint(host, port)
    return await measure_objects(UcxxAdapter(endpoint), work)
