"""The lab's files: its directory in the user's cache, and files in memory for one run."""

import os
from pathlib import Path
from types import TracebackType

__all__ = ["MemoryFile", "cache_dir"]


def cache_dir() -> Path:
    """Return the lab's directory in the user's cache.

    It might not exist yet. It is safe to delete.
    """
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "aiordma" / "lab"


class MemoryFile:
    """A file in memory. A child process that inherits `fd` can open it by `path`.

    It has no name on disk, so nothing is left even after SIGKILL.
    """

    def __init__(self, name: str, content: bytes = b"") -> None:
        self.fd = os.memfd_create(f"aiordma-lab-{name}")
        with open(self.fd, "wb", closefd=False) as file:
            file.write(content)

    @property
    def path(self) -> str:
        """The path by which a child process opens the file."""
        return f"/proc/self/fd/{self.fd}"

    def text(self) -> str:
        """Return the current content, with "\\r\\n" (from a serial console) replaced by "\\n"."""
        data = os.pread(self.fd, os.fstat(self.fd).st_size, 0)
        return data.decode(errors="replace").replace("\r\n", "\n")

    def close(self) -> None:
        """Free the file."""
        os.close(self.fd)

    def __enter__(self) -> "MemoryFile":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
