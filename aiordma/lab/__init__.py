"""A machine with a soft RDMA device, to run a command in.

`python -m aiordma lab run -- COMMAND...` boots a Linux kernel under QEMU over this machine's own
file system, runs the command as if here, and leaves nothing behind. `docs/lab.md` is the guide.

This package stands alone: it imports no other room of aiordma, so that it works before the native
module is built, and so that its `guest` half can start in the guest without importing the library.
"""

import os

__all__ = ["is_inside"]


def is_inside() -> bool:
    """Whether this process runs in the lab's machine."""
    return os.environ.get("AIORDMA_LAB") == "1"
