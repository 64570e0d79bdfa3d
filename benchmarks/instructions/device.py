"""The device without hardware (device.c): made a shared library, and told what to do."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import cffi

PRELOADED = "LD_PRELOAD"
LIMIT = 16384
"""The deepest queue that it has."""

_SOURCE = Path(__file__).with_name("device.c")
_DECLARATIONS = """
int device_arrive(unsigned int length);
void device_owe(unsigned int count, unsigned int length);
void device_count(void);
void device_stop(const char *name);
"""


class BuildError(Exception):
    """The device could not be compiled."""


def build(folder: Path) -> Path:
    """The device as a shared library, in `folder`.

    Raises:
        BuildError: there is no compiler, or there are no headers for it.
    """
    library = folder / "device.so"
    options = ["-O2", "-g", "-Wall", "-Werror", "-shared", "-fPIC"]
    command = ["gcc", *options, "-o", str(library), str(_SOURCE)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise BuildError("gcc is not installed: apt install gcc") from None
    if done.returncode:
        raise BuildError(
            "the device without hardware cannot be compiled: "
            f"apt install libibverbs-dev librdmacm-dev valgrind\n{done.stderr}"
        )
    return library


class CountedDevice:
    """The device of this process, which was started with the library preloaded."""

    def __init__(self) -> None:
        """Find it.

        Raises:
            BuildError: the process was started without.
        """
        ffi = cffi.FFI()
        ffi.cdef(_DECLARATIONS)
        self._lib: Any = ffi.dlopen(None)  # what is preloaded is part of the process
        if not hasattr(self._lib, "device_count"):
            raise BuildError("the device without hardware is not preloaded")

    def arrive(self, length: int) -> None:
        """A message of so many bytes has come.

        Raises:
            ValueError: there is no receive buffer for it.
        """
        if self._lib.device_arrive(length):
            raise ValueError(f"no receive buffer for a message of {length} bytes")

    def owe(self, count: int, length: int) -> None:
        """Let a message come each of the next `count` times that the loop goes to sleep."""
        self._lib.device_owe(count, length)

    def count(self) -> None:
        """Have callgrind count from here on."""
        self._lib.device_count()

    def stop(self, name: str) -> None:
        """Have it write down what it has counted, under that name, and count no more."""
        self._lib.device_stop(name.encode())
