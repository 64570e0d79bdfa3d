"""Names the cffi builder: setuptools takes `cffi_modules` from nowhere else."""

from setuptools import setup

setup(cffi_modules=["aiordma/_native/build.py:ffibuilder"])
