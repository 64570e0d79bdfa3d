"""The choice of a kernel, the load order of modules, and the errors without a kernel."""

import gzip
import lzma
import struct
from pathlib import Path

import pytest

from aiordma.lab import kernel, vmlinux
from aiordma.lab.errors import LabError
from aiordma.lab.kernel_modules import Module, ModuleIndex

COMMON = [*kernel.REQUIRED, "ib_core", "libcrc32c"]


def make_kernel(cache: Path, release: str, modules: list[str], *, siw: bool = False) -> None:
    top = cache / "aiordma/lab/kernels" / release
    directory = top / "lib/modules" / release
    directory.mkdir(parents=True)
    (top / kernel.IMAGE).write_bytes(b"")
    (directory / "modules.dep").write_text("".join(f"kernel/{name}.ko:\n" for name in modules))
    if siw:
        (top / "siw.ko").write_bytes(b"")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kernel, "installed", lambda: iter(()))
    return tmp_path


def test_find_without_a_kernel_raises(cache: Path) -> None:
    with pytest.raises(LabError, match=r"^the lab has no kernel yet: run `aiordma lab setup`$"):
        kernel.find(["rxe"])


def test_find_with_only_a_kernel_without_the_driver_raises(cache: Path) -> None:
    make_kernel(cache, "6.1.0-cloud", COMMON)
    with pytest.raises(
        LabError, match=r"^the kernel 6.1.0-cloud has no module rdma_rxe: run `aiordma lab"
    ):
        kernel.find(["rxe"])


def test_siw_is_found_beside_the_kernel(cache: Path) -> None:
    make_kernel(cache, "6.1.0", [*COMMON, "rdma_rxe"])
    make_kernel(cache, "6.0.0", [*COMMON, "rdma_rxe"], siw=True)
    chosen = kernel.find(["rxe", "siw"])
    assert chosen.release == "6.0.0"
    order = [module.stem for module in chosen.load_order(["siw"])]
    assert order == ["ib_core", "libcrc32c", "siw"]


def test_installed_kernel_with_an_image_is_found(tmp_path: Path) -> None:
    modules = tmp_path / "lib/modules/6.5"
    modules.mkdir(parents=True)
    assert list(kernel.installed(tmp_path)) == []
    (modules / "vmlinuz").write_bytes(b"")
    (found,) = kernel.installed(tmp_path)
    assert found.image == modules / "vmlinuz"
    assert found.missing(["rdma_rxe"]) == ["rdma_rxe"]


def test_load_order_has_each_module_once_and_no_builtin(tmp_path: Path) -> None:
    (tmp_path / "modules.dep").write_text(
        "kernel/a-b.ko.xz: kernel/c.ko.xz kernel/d.ko.xz\n"
        "kernel/c.ko.xz: kernel/d.ko.xz\n"
        "kernel/d.ko.xz:\n"
    )
    (tmp_path / "modules.builtin").write_text("kernel/fs/9p/9p.ko\n")
    index = ModuleIndex(tmp_path)
    order = index.load_order(["9p", "c", "a_b"])
    assert [module.stem for module in order] == ["d", "c", "a_b"]
    assert "9p" in index
    with pytest.raises(LabError, match=r"^the kernel has no module e$"):
        index.load_order(["e"])


@pytest.mark.parametrize(
    ("suffix", "compress"), [("", bytes), (".gz", gzip.compress), (".xz", lzma.compress)]
)
def test_module_content_is_decompressed(tmp_path: Path, suffix: str, compress: type[bytes]) -> None:
    path = tmp_path / f"m.ko{suffix}"
    path.write_bytes(compress(b"module"))
    assert Module(path).content() == b"module"


def bzimage(payload: bytes) -> bytes:
    """Return a kernel image with one sector of setup code."""
    image = bytearray(1024)
    image[0x1F1] = 1
    image[0x202:0x206] = b"HdrS"
    struct.pack_into("<II", image, 0x248, 0, len(payload))
    return bytes(image) + payload


def test_kernel_is_extracted_from_its_image() -> None:
    elf = b"\x7fELF and so on"
    size = struct.pack("<I", len(elf))
    assert vmlinux.extract(bzimage(lzma.compress(elf) + size)) == elf
    assert vmlinux.extract(bzimage(gzip.compress(elf) + size)) == elf
    assert vmlinux.extract(bzimage(b"an unknown compression")) is None
    assert vmlinux.extract(b"not a kernel") is None
