"""The lab's files: its directory in the user's cache, and files in memory for one run."""

import os
from pathlib import Path
from types import TracebackType

__all__ = ["MemoryFile", "cache_dir"]


def cache_dir() -> Path:
    """The lab's directory in the user's cache; it may not exist yet, and is safe to delete."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "aiordma" / "lab"


class MemoryFile:
    """A file in memory, which a child process that inherits `fd` can open by `path`.

    It has no name on any disk, so that nothing is left even after SIGKILL.
    """

    def __init__(self, name: str, content: bytes = b"") -> None:
        self.fd = os.memfd_create(f"aiordma-lab-{name}")
        with open(self.fd, "wb", closefd=False) as file:
            file.write(content)

    @property
    def path(self) -> str:
        """Where the child finds the file."""
        return f"/proc/self/fd/{self.fd}"

    def text(self) -> str:
        """What is in the file now, with the line ends of a serial console made plain."""
        data = os.pread(self.fd, os.fstat(self.fd).st_size, 0)
        return data.decode(errors="replace").replace("\r\n", "\n")

    def __enter__(self) -> "MemoryFile":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self.fd)
