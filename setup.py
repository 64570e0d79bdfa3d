"""What setuptools takes from nowhere else: the cffi builder, and one wheel for 3.11 and later."""

from setuptools import setup

setup(
    cffi_modules=["aiordma/_native/build.py:ffibuilder"],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
