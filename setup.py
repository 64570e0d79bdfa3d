"""Settings that pyproject.toml cannot contain: the extensions, one wheel for 3.11 and later."""

import os
import sysconfig
from pathlib import Path

from setuptools import Extension, setup

NATIVE = Path("aiordma/_native")

if sysconfig.get_config_var("Py_GIL_DISABLED"):
    raise SystemExit(
        "aiordma does not support the free-threaded build of CPython: its C modules use the stable "
        "ABI, and rely on the interpreter's lock. Use the usual build."
    )


def extension(name: str, sources: list[Path]) -> Extension:
    """Return the extension module `aiordma._native.NAME`."""
    headers = {header for source in sources for header in source.parent.glob("*.h")}
    headers.add(NATIVE / "work_requests.h")
    return Extension(
        f"aiordma._native.{name}",
        [str(source) for source in sources],
        depends=sorted(map(str, headers)),
        define_macros=[("Py_LIMITED_API", "0x030b0000")],
        py_limited_api=True,
        # Name libc even in a module that calls none of its functions: auditwheel asks for it.
        extra_link_args=["-Wl,--no-as-needed"],
        extra_compile_args=[
            "-O2",
            "-Wall",
            "-Wextra",
            "-Wno-unused-parameter",
            "-Werror=implicit-function-declaration",
            "-fvisibility=hidden",
            *os.environ.get("CFLAGS", "").split(),  # after -O2
        ],
    )


setup(
    cffi_modules=["aiordma/_native/build.py:ffibuilder"],
    ext_modules=[
        extension("_buffer_exporter", [NATIVE / "buffer_exporter.c"]),
        extension("_fast_path", sorted((NATIVE / "fast_path").glob("*.c"))),
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
