"""The compiled modules: `lib` holds the C functions and constants, `ffi` makes and reads C data.

`BufferExporter` lends Python classes the buffer protocol, which Python has itself from 3.12 on.
`lanes` is what happens for each message, in C.
"""

from aiordma._native import _lanes as lanes
from aiordma._native._exporter import BufferExporter
from aiordma._native._lib import ffi, lib

__all__ = ["BufferExporter", "ffi", "lanes", "lib"]

lanes.post_by(int(ffi.cast("uintptr_t", ffi.addressof(lib, "aiordma_post_all"))))
