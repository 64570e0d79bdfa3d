"""The awaitable rdma_cm ids, which connect() and listen() use."""

from aiordma.cm.async_id import AsyncCmId
from aiordma.cm.base_id import RESOLVE_TIMEOUT, close_after
from aiordma.cm.states import CmState
from aiordma.cm.sync_id import SyncCmId

__all__ = ["RESOLVE_TIMEOUT", "AsyncCmId", "CmState", "SyncCmId", "close_after"]
