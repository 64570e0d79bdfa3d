"""Where the lab keeps what it fetched and built."""

import os
from pathlib import Path

__all__ = ["cache_dir"]


def cache_dir() -> Path:
    """The lab's directory in the user's cache; it may not exist yet, and is safe to delete."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "aiordma" / "lab"
