"""A virtual machine with a soft RDMA device, which runs one command.

`python -m aiordma lab run -- COMMAND...` boots a Linux kernel under QEMU with the files of this
machine, runs the command in it, and leaves nothing behind. See docs/lab.md.

This package imports no other package of aiordma. So it works before the native module is built, and
its `guest` half can start in the virtual machine without importing the library.
"""

import os

__all__ = ["is_inside"]


def is_inside() -> bool:
    """Return True if this process runs in the lab's virtual machine."""
    return os.environ.get("AIORDMA_LAB") == "1"
