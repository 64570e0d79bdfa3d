"""Registered memory: the user's regions, the peer's buffers, and the library's buffer pool."""

from aiordma.memory.buffer_pool import SLAB_SIZE, AllocatedRegion, BufferPool, PooledBuffer
from aiordma.memory.byte_views import address_and_length, as_exporter, byte_view
from aiordma.memory.part_pool import MemoryPart, PartPool
from aiordma.memory.region import MemoryRegion, MemorySlice
from aiordma.memory.remote import RemoteBuffer

__all__ = [
    "SLAB_SIZE",
    "AllocatedRegion",
    "BufferPool",
    "MemoryPart",
    "MemoryRegion",
    "MemorySlice",
    "PartPool",
    "PooledBuffer",
    "RemoteBuffer",
    "address_and_length",
    "as_exporter",
    "byte_view",
]
