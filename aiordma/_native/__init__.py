"""The compiled modules: `lib` holds the C functions and constants, `ffi` makes and reads C data.

`BufferExporter` gives Python classes the buffer protocol, which Python itself can do from 3.12 on.
`fast_path` does the work for each message, in C.
"""

import sys

try:
    from aiordma._native import _fast_path as fast_path
    from aiordma._native._buffer_exporter import BufferExporter
    from aiordma._native._lib import ffi, lib
except ImportError as error:
    if "t" not in sys.abiflags:
        raise
    sentence = "aiordma does not support the free-threaded build of CPython: use the usual build"
    raise ImportError(sentence) from error

__all__ = ["BufferExporter", "fast_path", "ffi", "lib"]

fast_path.set_functions(
    int(ffi.cast("uintptr_t", ffi.addressof(lib, "aiordma_post_all"))),
    int(ffi.cast("uintptr_t", ffi.addressof(lib, "aiordma_comp_event"))),
)
