"""The compiled module: `lib` holds the C functions and constants, `ffi` makes and reads C data."""

from aiordma._native._lib import ffi, lib

__all__ = ["ffi", "lib"]
