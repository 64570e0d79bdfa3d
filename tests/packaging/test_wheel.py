"""The wheel and the source archive that `make wheel` has put in `dist`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest
from helpers import ROOT

import aiordma

DIST = ROOT / "dist"
OLDEST_GLIBC = (2, 34)
MODULES = {"_buffer_exporter", "_fast_path", "_lib"}


def the_file(pattern: str) -> Path:
    """Return the only file in `dist` that matches."""
    (found,) = DIST.glob(pattern)
    return found


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """Return a directory with the content of the wheel."""
    with zipfile.ZipFile(the_file("*.whl")) as archive:
        archive.extractall(tmp_path)
    return tmp_path


def metadata(wheel: Path) -> Message:
    (file,) = wheel.glob("*.dist-info/METADATA")
    return message_from_bytes(file.read_bytes())


def extensions(wheel: Path) -> list[Path]:
    return sorted(wheel.rglob("*.so*"))


def test_one_wheel_fits_each_python_and_each_distribution() -> None:
    name = re.fullmatch(
        rf"aiordma-{aiordma.__version__}-cp311-abi3-manylinux_(\d+)_(\d+)_x86_64\.whl",
        the_file("*.whl").name,
    )
    assert name is not None, the_file("*.whl").name
    assert (int(name[1]), int(name[2])) <= OLDEST_GLIBC


def test_no_library_is_in_the_wheel_or_linked_except_libc(wheel: Path) -> None:
    assert {path.name for path in wheel.iterdir()} == {
        "aiordma",
        f"aiordma-{aiordma.__version__}.dist-info",
    }
    assert {path.name for path in extensions(wheel)} == {f"{name}.abi3.so" for name in MODULES}
    for path in extensions(wheel):
        command = ["readelf", "--wide", "--dynamic", "--dyn-syms", str(path)]
        printed = subprocess.run(command, capture_output=True, check=True, text=True).stdout
        needed = set(re.findall(r"NEEDED.*\[(.+?)\]", printed))
        assert needed <= {"libc.so.6", "libdl.so.2", "libpthread.so.0"}
        versions = set(re.findall(r"@+([A-Z]+)_\S+", printed))
        assert versions <= {"GLIBC"}, "a version of rdma-core, or a private one"


def test_the_metadata_names_the_extras_and_the_version(wheel: Path) -> None:
    found = metadata(wheel)
    assert found["Version"] == aiordma.__version__
    assert found["Requires-Python"] == ">=3.11"
    assert {"anyio", "trio", "uvloop", "bench"} <= set(found.get_all("Provides-Extra", []))
    licenses = [path.name for path in wheel.glob("*.dist-info/licenses/*")]
    assert licenses == ["LICENSE"]
    assert (wheel / "aiordma/py.typed").exists()


def test_the_source_archive_has_all_sources() -> None:
    with tarfile.open(the_file("*.tar.gz")) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    listed = subprocess.run(
        ["git", "ls-files", "aiordma"], cwd=ROOT, capture_output=True, check=True, text=True
    )
    assert set(listed.stdout.split()) - names == set()
    assert {"pyproject.toml", "setup.py", "README.md", "LICENSE"} <= names
    assert [name for name in names if name.endswith((".so", "_lib.c"))] == []


def test_the_wheel_is_installed_and_runs(tmp_path: Path) -> None:
    venv.create(tmp_path, with_pip=True)
    python = tmp_path / "bin/python"
    install = [str(python), "-m", "pip", "install", "--quiet", str(the_file("*.whl"))]
    subprocess.run(install, check=True, timeout=300)
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    shown = subprocess.run(
        [tmp_path / "bin/aiordma", "--version"],
        cwd=tmp_path,
        env=clean,
        capture_output=True,
        check=True,
        text=True,
    )
    assert shown.stdout == f"aiordma {aiordma.__version__}\n"
    assert Path(sys.executable) != python
