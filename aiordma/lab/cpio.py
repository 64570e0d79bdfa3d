"""A writer for the archive format of an initramfs ("newc" cpio)."""

import stat
from collections.abc import Iterable, Mapping

__all__ = ["archive"]


def archive(files: Mapping[str, tuple[int, bytes]], directories: Iterable[str] = ()) -> bytes:
    """An archive of `files` (path -> permissions, content) and `directories`, parents first."""
    parts = [_entry(path, stat.S_IFDIR | 0o755, b"") for path in directories]
    parts += [_entry(path, stat.S_IFREG | mode, data) for path, (mode, data) in files.items()]
    parts.append(_entry("TRAILER!!!", 0, b""))
    return b"".join(parts)


def _entry(path: str, mode: int, data: bytes) -> bytes:
    name = path.encode() + b"\0"
    # inode, mode, uid, gid, links, mtime, size, device (2), rdev (2), name length, checksum
    fields = (0, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name), 0)
    header = b"070701" + b"".join(b"%08X" % value for value in fields)
    return _aligned(header + name) + _aligned(data)


def _aligned(data: bytes) -> bytes:
    return data + bytes(-len(data) % 4)
