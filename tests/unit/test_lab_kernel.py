"""The kernel that the lab boots, its image, and its modules."""

import gzip
import lzma
import os
import struct
from collections.abc import Sequence
from pathlib import Path

import pytest

from aiordma.lab import debian, kernel, packages, qemu, siw, vmlinux
from aiordma.lab.errors import LabError
from aiordma.lab.kernel_modules import Module, ModuleIndex
from aiordma.lab.packages import Requirement

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


def test_find_without_a_kernel_or_without_the_driver_raises(cache: Path) -> None:
    with pytest.raises(LabError, match=r"^the lab has no kernel yet: run `aiordma lab setup`$"):
        kernel.find(["rxe"])
    make_kernel(cache, "6.1.0-cloud", COMMON)
    error = r"^the kernel 6.1.0-cloud has no module rdma_rxe: run `aiordma lab"
    with pytest.raises(LabError, match=error):
        kernel.find(["rxe"])


def test_siw_is_found_beside_the_kernel(cache: Path) -> None:
    make_kernel(cache, "6.1.0", [*COMMON, "rdma_rxe"])
    make_kernel(cache, "6.0.0", [*COMMON, "rdma_rxe"], siw=True)
    chosen = kernel.find(["rxe", "siw"])
    order = [module.stem for module in chosen.load_order(["siw"])]
    assert (chosen.release, order) == ("6.0.0", ["ib_core", "libcrc32c", "siw"])


def test_installed_kernel_with_an_image_is_found(tmp_path: Path) -> None:
    modules = tmp_path / "lib/modules/6.5"
    modules.mkdir(parents=True)
    assert list(kernel.installed(tmp_path)) == []
    (modules / "vmlinuz").write_bytes(b"")
    (found,) = kernel.installed(tmp_path)
    assert found.image == modules / "vmlinuz"
    assert found.missing(["rdma_rxe"]) == ["rdma_rxe"]


def test_load_order_has_each_module_once_and_no_builtin(tmp_path: Path) -> None:
    lines = ("a-b.ko.xz: kernel/c.ko.xz kernel/d.ko.xz", "c.ko.xz: kernel/d.ko.xz", "d.ko.xz:")
    (tmp_path / "modules.dep").write_text("".join(f"kernel/{line}\n" for line in lines))
    (tmp_path / "modules.builtin").write_text("kernel/fs/9p/9p.ko\n")
    index = ModuleIndex(tmp_path)
    assert [module.stem for module in index.load_order(["9p", "c", "a_b"])] == ["d", "c", "a_b"]
    assert "9p" in index
    with pytest.raises(LabError, match=r"^the kernel has no module e$"):
        index.load_order(["e"])


def bzimage(payload: bytes) -> bytes:
    """Return a kernel image with one sector of setup code."""
    image = bytearray(1024)
    image[0x1F1] = 1
    image[0x202:0x206] = b"HdrS"
    struct.pack_into("<II", image, 0x248, 0, len(payload))
    return bytes(image) + payload


def test_modules_and_kernels_are_decompressed(tmp_path: Path) -> None:
    for suffix, compress in (("", bytes), (".gz", gzip.compress), (".xz", lzma.compress)):
        path = tmp_path / f"m.ko{suffix}"
        path.write_bytes(compress(b"module"))
        assert Module(path).content() == b"module"
    elf = b"\x7fELF and so on"
    size = struct.pack("<I", len(elf))
    assert vmlinux.extract(bzimage(lzma.compress(elf) + size)) == elf
    assert vmlinux.extract(bzimage(gzip.compress(elf) + size)) == elf
    assert vmlinux.extract(bzimage(b"an unknown compression")) is None
    assert vmlinux.extract(b"not a kernel") is None


# --- programs ---

REQUIREMENTS = (
    Requirement("QEMU", "qemu-system-x86", lambda: False),
    Requirement("make", "make", lambda: True),
    Requirement("kmod", "kmod", lambda: False),
)


def test_ensure_without_apt_names_missing_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "command", lambda *args: pytest.fail("ran something"))
    packages.ensure([need for need in REQUIREMENTS if need.is_installed()])
    monkeypatch.setattr(packages, "has_apt", lambda: False)
    sentence = "^the lab needs QEMU, kmod: install it with this system's package manager$"
    with pytest.raises(LabError, match=sentence):
        packages.ensure(REQUIREMENTS)


@pytest.mark.parametrize(("user", "prefix"), [(0, []), (1000, ["sudo"])])
def test_apt_runs_as_root(monkeypatch: pytest.MonkeyPatch, user: int, prefix: list[str]) -> None:
    ran: list[list[str]] = []

    def command(argv: Sequence[str], failure: str) -> None:
        ran.append(list(argv))

    monkeypatch.setattr(packages, "command", command)
    monkeypatch.setattr(packages, "has_apt", lambda: True)
    monkeypatch.setattr(packages, "program", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(os, "geteuid", lambda: user)
    packages.ensure([Requirement("kmod", "kmod", lambda: any("kmod" in argv for argv in ran))])
    update, install = ran
    assert update == [*prefix, "apt-get", "update", "-q"]
    assert install[: len(prefix)] == prefix
    assert install[-2:] == ["--no-install-recommends", "kmod"]


def elf(*kinds: int) -> bytes:
    """Return a 64-bit ELF file with program headers of these kinds."""
    header = b"\x7fELF\x02".ljust(32, b"\0") + struct.pack("<Q", 64)
    header = header.ljust(54, b"\0") + struct.pack("<HH", 56, len(kinds))
    return header.ljust(64, b"\0") + b"".join(struct.pack("<I52x", kind) for kind in kinds)


def test_dynamic_busybox_is_not_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "busybox"
    monkeypatch.setattr(packages, "program", lambda name: str(path))
    path.write_bytes(elf(1, 3))
    with pytest.raises(LabError, match=r"^a statically linked busybox is not installed"):
        packages.busybox()
    path.write_bytes(elf(1, 1))
    assert packages.busybox() == path


def test_a_machine_without_what_the_lab_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(packages, "program", lambda name: None)
    monkeypatch.setattr(packages, "has_apt", lambda: False)
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    for call, error in (
        (packages.refresh, r"needs root or sudo, and neither is available$"),
        (debian.unpack_kernel, r"^the lab needs a kernel with the modules rdma_rxe and siw"),
        (qemu.check_machine, r"^the lab needs Linux on x86_64, but this is Linux on riscv64$"),
    ):
        with pytest.raises(LabError, match=error):
            call()


def test_series_and_flavour_of_a_release() -> None:
    assert siw.series_and_flavour("6.1.0-56-amd64") == ("6.1", "amd64")
    assert siw.series_and_flavour("6.12.48+deb13-amd64") == ("6.12", "amd64")
    with pytest.raises(LabError, match=r"^cannot tell from the release custom which source"):
        siw.series_and_flavour("custom")
