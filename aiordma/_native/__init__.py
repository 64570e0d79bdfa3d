"""The compiled modules: `lib` holds the C functions and constants, `ffi` makes and reads C data.

`BufferExporter` gives Python classes the buffer protocol, which Python itself can do from 3.12 on.
`fast_path` does the work for each message, in C.
"""

import sys

if "t" in sys.abiflags:  # its objects have another layout; CPython 3.13 loads the modules anyway
    raise ImportError(
        "aiordma does not support the free-threaded build of CPython: use the usual build"
    )

from aiordma._native import _fast_path as fast_path
from aiordma._native._buffer_exporter import BufferExporter
from aiordma._native._lib import ffi, lib

__all__ = ["BufferExporter", "fast_path", "ffi", "lib"]

fast_path.set_functions(
    int(ffi.cast("uintptr_t", ffi.addressof(lib, "aiordma_post_send"))),
    int(ffi.cast("uintptr_t", ffi.addressof(lib, "aiordma_post_all"))),
    int(ffi.cast("uintptr_t", ffi.addressof(lib, "aiordma_comp_event"))),
)
