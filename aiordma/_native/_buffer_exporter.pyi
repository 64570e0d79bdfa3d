"""Types of the compiled module that lends Python classes the buffer protocol."""

from typing_extensions import Buffer

class BufferExporter:
    """A base for classes whose instances export the buffer of `_exported`."""

    _exported: Buffer
    @property
    def _views(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
