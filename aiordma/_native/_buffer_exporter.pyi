"""Types of the compiled module that gives Python classes the buffer protocol."""

from typing_extensions import Buffer

class BufferExporter:
    """A base class whose instances export the buffer of their attribute `_exported`."""

    _exported: Buffer
    @property
    def _views(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
