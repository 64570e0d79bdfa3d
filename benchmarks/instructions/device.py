"""The device without hardware (device.c): compile it, and control it from its process."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import cffi

PRELOADED = "LD_PRELOAD"
LIMIT = 16384
"""The maximum depth of its queues."""

_SOURCE = Path(__file__).with_name("device.c")
_DECLARATIONS = """
int device_arrive(unsigned int length);
void device_arrive_on_wait(unsigned int count, unsigned int length);
void device_write_on_wait(unsigned int count, unsigned int length, uint32_t immediate_data);
void device_accept_with(const void *data, unsigned int length);
void device_signal_on_wait(unsigned int count, int fd);
void device_start_counting(void);
void device_stop_counting(const char *name);
"""


class BuildError(Exception):
    """The device could not be compiled, or is not in this process."""


def build(folder: Path) -> Path:
    """Compile the device in `folder`; return the shared library.

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
        """Find the device's functions.

        Raises:
            BuildError: the process was started without the library.
        """
        ffi = cffi.FFI()
        ffi.cdef(_DECLARATIONS)
        self._lib: Any = ffi.dlopen(None)  # a preloaded library is part of the process
        if not hasattr(self._lib, "device_start_counting"):
            raise BuildError("the device without hardware is not preloaded")

    def arrive(self, length: int) -> None:
        """Let a message of `length` bytes arrive.

        Raises:
            ValueError: there is no receive buffer for it.
        """
        if self._lib.device_arrive(length):
            raise ValueError(f"no receive buffer for a message of {length} bytes")

    def arrive_on_wait(self, count: int, length: int) -> None:
        """Let a message arrive each of the next `count` times that the loop waits for events."""
        self._lib.device_arrive_on_wait(count, length)

    def write_on_wait(self, count: int, length: int, immediate: int) -> None:
        """Let a write with immediate data arrive each of these times. It changes no memory."""
        self._lib.device_write_on_wait(count, length, immediate)

    def accept_with(self, private_data: bytes) -> None:
        """Accept the connections that are made from now on with this private data."""
        self._lib.device_accept_with(private_data, len(private_data))

    def signal_on_wait(self, count: int, fd: int) -> None:
        """Write 8 bytes to an eventfd or a socket each of these times."""
        self._lib.device_signal_on_wait(count, fd)

    def start_counting(self) -> None:
        """Let callgrind count the instructions from here on."""
        self._lib.device_start_counting()

    def stop_counting(self, name: str) -> None:
        """Let callgrind write a dump with this name and stop counting."""
        self._lib.device_stop_counting(name.encode())
