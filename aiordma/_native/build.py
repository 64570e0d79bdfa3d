"""The build of `aiordma._native._lib`: cdef.h declares what Python uses, helpers.h our C functions.

cffi's API mode: the compiler checks every declaration against the installed rdma-core headers.
Nothing newer than rdma-core 44 must be referenced here, or the module would not load on Debian 12.
"""

import os
from pathlib import Path

from cffi import FFI

HERE = Path(__file__).parent
SOURCES = ["cm_events.c", "devices.c", "work_requests.c", "addresses.c"]

ffibuilder = FFI()
ffibuilder.cdef((HERE / "cdef.h").read_text())
ffibuilder.set_source(
    "aiordma._native._lib",
    '#include "helpers.h"\n',
    sources=[f"aiordma/_native/{name}" for name in SOURCES],
    include_dirs=[str(HERE)],
    depends=[str(HERE / name) for name in ("cdef.h", "helpers.h", "work_requests.h", *SOURCES)],
    libraries=["rdmacm", "ibverbs"],
    py_limited_api=True,
    extra_compile_args=[
        "-O2",
        "-Wall",
        "-Wextra",
        "-Wno-unused-parameter",
        "-Werror=implicit-function-declaration",
        *os.environ.get("CFLAGS", "").split(),  # after -O2
    ],
)

if __name__ == "__main__":
    ffibuilder.compile(verbose=True)
