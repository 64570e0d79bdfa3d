"""What setuptools takes from nowhere else: the extensions, and one wheel for 3.11 and later."""

from setuptools import Extension, setup

EXPORTER = Extension(
    "aiordma._native._exporter",
    ["aiordma/_native/exporter.c"],
    define_macros=[("Py_LIMITED_API", "0x030b0000")],
    py_limited_api=True,
    extra_compile_args=["-O2", "-Wall", "-Wextra", "-Wno-unused-parameter"],
)

setup(
    cffi_modules=["aiordma/_native/build.py:ffibuilder"],
    ext_modules=[EXPORTER],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
