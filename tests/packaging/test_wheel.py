"""The wheels and the source archive in `dist`: of `make wheel`, or of cibuildwheel."""

from __future__ import annotations

import os
import platform
import re
import subprocess
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
WHEELS = sorted(DIST.glob("*.whl"))
NAME = re.compile(
    re.escape(f"aiordma-{aiordma.__version__}-cp311-abi3-manylinux_2_")
    + r"(\d+)_(x86_64|aarch64)\.whl"
)
OLDEST_GLIBC = 34
"""The minor version of glibc 2, of which `make wheel` on Debian 12 needs nothing newer."""
MODULES = {"_buffer_exporter", "_fast_path", "_lib"}


@pytest.fixture(params=WHEELS, ids=[path.name for path in WHEELS])
def wheel(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return a directory with the content of a wheel."""
    with zipfile.ZipFile(request.param) as archive:
        archive.extractall(tmp_path)
    return tmp_path


def metadata(wheel: Path) -> Message:
    (file,) = wheel.glob("*.dist-info/METADATA")
    return message_from_bytes(file.read_bytes())


def extensions(wheel: Path) -> list[Path]:
    return sorted(wheel.rglob("*.so*"))


def test_one_wheel_of_a_processor_fits_each_python_and_each_distribution() -> None:
    processors = []
    for path in WHEELS:
        found = NAME.fullmatch(path.name)
        assert found is not None, path.name
        assert int(found[1]) <= OLDEST_GLIBC
        processors.append(found[2])
    assert platform.machine() in processors
    assert len(processors) == len(set(processors))


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
        versions = set(re.findall(r"@+(\S+)", printed))
        others = [name for name in versions if not re.fullmatch(r"GLIBC_[\d.]+", name)]
        assert others == [], "a version of rdma-core, or a private one"


def test_the_metadata_names_the_extras_and_the_version(wheel: Path) -> None:
    found = metadata(wheel)
    assert found["Version"] == aiordma.__version__
    assert found["Requires-Python"] == ">=3.11"
    extras = set(found.get_all("Provides-Extra", []))
    assert {"anyio", "trio", "uvloop", "prometheus", "bench"} <= extras
    licenses = [path.name for path in wheel.glob("*.dist-info/licenses/*")]
    assert licenses == ["LICENSE"]
    assert (wheel / "aiordma/py.typed").exists()


def test_no_source_of_c_is_in_the_wheel(wheel: Path) -> None:
    assert [path.name for path in wheel.rglob("*") if path.suffix in (".c", ".h")] == []
    assert (wheel / "aiordma/_native/_lib.pyi").exists()


def test_the_source_archive_has_all_sources() -> None:
    (path,) = DIST.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    listed = subprocess.run(
        ["git", "ls-files", "aiordma"], cwd=ROOT, capture_output=True, check=True, text=True
    )
    assert set(listed.stdout.split()) - names == set()
    assert {"pyproject.toml", "setup.py", "README.md", "LICENSE"} <= names
    assert [name for name in names if name.endswith((".so", "_lib.c"))] == []


def test_the_wheel_of_this_processor_is_installed_and_runs(tmp_path: Path) -> None:
    (wheel,) = (path for path in WHEELS if path.stem.endswith(platform.machine()))
    venv.create(tmp_path, with_pip=True)
    python = tmp_path / "bin/python"
    install: list[str | Path] = [python, "-m", "pip", "install", "--quiet", wheel]
    subprocess.run(install, check=True, timeout=300)
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def output(*command: str | Path) -> str:
        done = subprocess.run(
            command, cwd=tmp_path, env=clean, capture_output=True, check=True, text=True
        )
        return done.stdout

    assert output(tmp_path / "bin/aiordma", "--version") == f"aiordma {aiordma.__version__}\n"
    imported = output(python, "-c", "import aiordma; print(aiordma.__file__)")
    assert Path(imported).is_relative_to(tmp_path / "lib")
