"""The initramfs archive, unpacked by busybox."""

from __future__ import annotations

import subprocess
from pathlib import Path

from aiordma.lab import initramfs


def test_busybox_cpio_unpacks_the_archive(tmp_path: Path) -> None:
    data = initramfs.archive({"bin/x": (0o755, b"abc"), "y": (0o644, b"")}, directories=("bin",))
    subprocess.run(["busybox", "cpio", "-i"], input=data, cwd=tmp_path, check=True)
    assert (tmp_path / "bin/x").read_bytes() == b"abc"
    assert (tmp_path / "bin/x").stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "y").read_bytes() == b""
