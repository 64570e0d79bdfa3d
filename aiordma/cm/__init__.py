"""The awaiting ids under connect() and listen()."""

from aiordma.cm.async_id import RESOLVE_TIMEOUT, AsyncCmId
from aiordma.cm.states import CmState

__all__ = ["RESOLVE_TIMEOUT", "AsyncCmId", "CmState"]
