"""Messages and one-sided operations on reliable connections."""

from aiordma.messages.connect import connect, listen
from aiordma.messages.connection import Connection
from aiordma.messages.listener import ConnectRequest, Listener
from aiordma.messages.memory_windows import MemoryWindow
from aiordma.messages.message import Message

__all__ = [
    "ConnectRequest",
    "Connection",
    "Listener",
    "MemoryWindow",
    "Message",
    "connect",
    "listen",
]
