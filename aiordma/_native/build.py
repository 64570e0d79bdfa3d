"""The build of `aiordma._native._lib`: cdef.h declares what Python uses, helpers.h our C functions.

cffi's API mode: the compiler checks every declaration against the installed rdma-core headers.
"""

import os
from pathlib import Path

from cffi import FFI

HERE = Path(__file__).parent
SOURCES = [
    "libraries.c",
    "cm_events.c",
    "devices.c",
    "work_requests.c",
    "addresses.c",
    "id_calls.c",
]

ffibuilder = FFI()
ffibuilder.cdef((HERE / "cdef.h").read_text())
ffibuilder.set_source(
    "aiordma._native._lib",
    '#include "helpers.h"\n',
    sources=[f"aiordma/_native/{name}" for name in SOURCES],
    include_dirs=[str(HERE)],
    depends=[str(HERE / name) for name in ("cdef.h", "helpers.h", "work_requests.h", *SOURCES)],
    libraries=["dl"],  # librdmacm and libibverbs are loaded when they are needed: libraries.c
    py_limited_api=True,
    extra_compile_args=[
        "-O2",
        "-Wall",
        "-Wextra",
        "-Wno-unused-parameter",
        "-Werror=implicit-function-declaration",
        "-fvisibility=hidden",  # the functions of libraries.c have the names of the libraries'
        *os.environ.get("CFLAGS", "").split(),  # after -O2
    ],
)

if __name__ == "__main__":
    ffibuilder.compile(verbose=True)
