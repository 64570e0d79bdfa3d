"""The kernel that the lab boots, its image, and its modules."""

import gzip
import lzma
import os
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from aiordma.lab import debian, kernel, kvm, packages, qemu, run, setup, siw, vmlinux
from aiordma.lab.devices import DEVICES
from aiordma.lab.errors import LabError
from aiordma.lab.kernel_modules import Module, ModuleIndex
from aiordma.lab.packages import Requirement

COMMON = [*kernel.REQUIRED, "ib_core", "libcrc32c"]


def make_kernel(
    cache: Path,
    release: str,
    modules: list[str],
    *,
    siw: bool = False,
    suffix: str = "",
    version: str = "1",
) -> None:
    top = cache / "aiordma/lab/kernels" / release
    directory = top / "lib/modules" / release
    directory.mkdir(parents=True)
    (top / kernel.IMAGE).write_bytes(b"")
    (directory / "modules.dep").write_text(
        "".join(f"kernel/{name}.ko{suffix}:\n" for name in modules)
    )
    (top / debian.VERSION_FILE).write_text(version)
    if siw:
        (top / "siw.ko").write_bytes(b"\0license=GPL\0depends=ib_core,libcrc32c\0name=siw\0")


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


def test_the_newest_installed_kernel_is_the_first(tmp_path: Path) -> None:
    for release in ("6.9.12-amd64", "6.12.9+deb13-amd64", "6.12.107+deb13-amd64", "7.0-rc3-amd64"):
        modules = tmp_path / "lib/modules" / release
        modules.mkdir(parents=True)
        (modules / "vmlinuz").write_bytes(b"")
    found = [one.release for one in kernel.installed(tmp_path)]
    assert found[:2] == ["7.0-rc3-amd64", "6.12.107+deb13-amd64"]
    assert found[2:] == ["6.12.9+deb13-amd64", "6.9.12-amd64"]


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


# --- Debian's packages ---

# What apt prints for the kernel of Debian 12, and of Debian unstable in 2026.
DEBIAN_12 = """
Inst linux-base (4.12.1~deb12u1 Debian:12.15/oldstable [all])
Inst linux-image-6.1.0-56-amd64 (6.1.192-2 Debian-Security:12/oldstable-security [amd64])
Inst linux-image-amd64 (6.1.192-2 Debian-Security:12/oldstable-security [amd64])
Conf linux-base (4.12.1~deb12u1 Debian:12.15/oldstable [all])
"""
UNSTABLE = """
Inst libc6 (2.43-7 Debian:unstable [amd64])
Inst linux-base (4.17 Debian:unstable [all])
Inst linux-base-7.2.13+deb14-amd64 (7.2.13-1 Debian:unstable [amd64])
Inst linux-binary-7.2.13+deb14-amd64 (7.2.13-1 Debian:unstable [amd64])
Inst linux-modules-7.2.13+deb14-amd64 (7.2.13-1 Debian:unstable [amd64])
Inst linux-image-7.2.13+deb14-amd64 (7.2.13-1 Debian:unstable [amd64])
Inst linux-image-amd64 (7.2.13-1 Debian:unstable [amd64])
"""
# Debian publishes the programs that build modules before the kernel, which waits for its signature.
HEADERS = """
Inst gcc-12 (12.2.0-14+deb12u1 Debian:12.15/oldstable [amd64])
Inst linux-compiler-gcc-12-x86 (6.1.192-3 Debian-Security:12/oldstable-security [amd64])
Inst linux-headers-6.1.0-56-common (6.1.192-2 Debian-Security:12/oldstable-security [all])
Inst linux-kbuild-6.1 (6.1.192-3 Debian-Security:12/oldstable-security [amd64])
Inst linux-headers-6.1.0-56-amd64 (6.1.192-2 Debian-Security:12/oldstable-security [amd64])
"""


def make_apt(directory: Path, monkeypatch: pytest.MonkeyPatch, prints: str) -> None:
    """Make an apt-get that knows only linux-image-amd64 and prints `prints` for it."""
    (directory / "printed").write_text(prints)
    script = f'#!/bin/sh\n[ "$5" = linux-image-amd64 ] && cat {directory}/printed || exit 100\n'
    (directory / "apt-get").write_text(script)
    (directory / "apt-get").chmod(0o755)
    monkeypatch.setenv("PATH", str(directory), prepend=os.pathsep)
    monkeypatch.setattr(packages, "refresh", lambda: None)


@pytest.mark.parametrize(("prints", "count"), [(DEBIAN_12, 2), (UNSTABLE, 5)])
def test_the_packages_of_a_kernel_are_those_of_its_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prints: str, count: int
) -> None:
    make_apt(tmp_path, monkeypatch, prints)
    found = debian.same_source("linux-image-amd64")
    assert (len(found), found[-1].name) == (count, "linux-image-amd64")
    assert {one.version for one in found} in ({"6.1.192-2"}, {"7.2.13-1"})
    with pytest.raises(LabError, match=r"^apt has no package linux-source$"):
        debian.same_source("linux-source")


def test_headers_come_with_the_programs_of_a_later_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_apt(tmp_path, monkeypatch, HEADERS)
    found = {one.name: one.version for one in debian.same_source("linux-image-amd64")}
    assert found == {
        "linux-headers-6.1.0-56-common": "6.1.192-2",
        "linux-kbuild-6.1": "6.1.192-3",
        "linux-headers-6.1.0-56-amd64": "6.1.192-2",
    }


@pytest.mark.parametrize(
    ("modules", "image"),
    [
        ("lib/modules/6.1-amd64", "boot/vmlinuz-6.1-amd64"),
        ("usr/lib/modules/6.1-amd64", "usr/lib/modules/6.1-amd64/vmlinuz"),
    ],
    ids=["Debian 12", "unstable"],
)
def test_the_kernel_of_each_layout_is_unpacked(
    cache: Path, monkeypatch: pytest.MonkeyPatch, modules: str, image: str
) -> None:
    make_apt(cache, monkeypatch, DEBIAN_12)
    tree = cache / "tree"
    files = {
        f"{modules}/modules.builtin": b"",
        f"{modules}/modules.order": b"",
        f"{modules}/kernel/sound/left_out.ko": b"",
        image: bzimage(b"not compressed"),
        "usr/share/doc/left-out": b"",
        "DEBIAN/control": b"Package: kernel\nVersion: 1\nArchitecture: all\n"
        b"Maintainer: a\nDescription: a\n",
    }
    for path, content in files.items():
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).write_bytes(content)

    def download(wanted: Sequence[debian.Package], into: Path) -> list[Path]:
        subprocess.run(["dpkg-deb", "-b", str(tree), str(into / "kernel.deb")], check=True)
        return [into / "kernel.deb"]

    monkeypatch.setattr(debian, "download", download)
    assert debian.unpack_kernel() == "6.1-amd64"
    (found,) = kernel.in_cache()
    (found.image.parent / debian.VERSION_FILE).write_text("older")
    assert debian.has_newer("6.1-amd64")
    assert debian.unpack_kernel() == "6.1-amd64"
    assert not debian.has_newer("6.1-amd64")
    assert list(kernel.in_cache()) == [found]
    assert (found.modules / "modules.dep").exists()
    assert found.image.read_bytes() == files[image]
    top = found.image.parent
    assert [path for path in top.rglob("*") if "left" in path.name] == []
    assert (top / debian.VERSION_FILE).read_text() == "6.1.192-2"


# --- setup ---


@pytest.fixture
def installed(cache: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let all of setup but the kernel succeed. Return the programs that it asks for."""
    names: list[str] = []

    def ensure(requirements: Sequence[Requirement]) -> None:
        names.extend(requirement.name for requirement in requirements)

    monkeypatch.setattr(packages, "ensure", ensure)
    monkeypatch.setattr(qemu, "find", lambda: "qemu")
    monkeypatch.setattr(kvm, "is_result_known", lambda: True)
    monkeypatch.setattr(kvm, "choose", lambda program, chosen: "tcg")
    return names


@pytest.mark.parametrize("suffix", [".xz", ".zst"])
def test_setup_installs_zstd_for_a_kernel_that_needs_it(
    cache: Path, installed: list[str], suffix: str
) -> None:
    make_kernel(cache, "6.8.0", [*COMMON, "rdma_rxe"], suffix=suffix)
    setup.setup(("rxe",))
    assert ("zstd" in installed) == (suffix == ".zst")


def test_a_module_that_needs_zstd_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "m.ko.zst").write_bytes(b"")
    with pytest.raises(LabError, match=r"^the program zstd, .* run `aiordma lab setup`$"):
        Module(tmp_path / "m.ko.zst").content()


def make_siw(
    cache: Path, monkeypatch: pytest.MonkeyPatch, *, current: str, builds_for: str
) -> list[str]:
    """Let the distribution have one kernel, of version 2. Return the releases siw is built for."""
    tried: list[str] = []

    def build(release: str) -> None:
        tried.append(release)
        if release != builds_for:
            raise LabError(f"apt has no package linux-headers-{release}")
        (kernel.kernels_dir() / release / "siw.ko").write_bytes(b"\0depends=\0")

    def unpack() -> str:
        make_kernel(cache, current, [*COMMON, "rdma_rxe"], version="2")
        return current

    make_apt(cache, monkeypatch, f"Inst linux-image-{current} (2 x)\nInst linux-image-amd64 (2 x)")
    monkeypatch.setattr(siw, "build", build)
    monkeypatch.setattr(debian, "unpack_kernel", unpack)
    return tried


def test_setup_takes_the_current_kernel_when_siw_cannot_be_built_for_an_old_one(
    cache: Path, installed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = make_siw(cache, monkeypatch, current="6.2.0", builds_for="6.2.0")
    make_kernel(cache, "6.1.0", [*COMMON, "rdma_rxe"], version="1")
    setup.setup()
    assert tried == ["6.1.0", "6.2.0"]
    assert kernel.find(["rxe", "siw"]).release == "6.2.0"


def test_setup_tries_no_other_kernel_than_the_current_one(
    cache: Path,
    installed: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tried = make_siw(cache, monkeypatch, current="6.2.0", builds_for="none")
    setup.setup()
    setup.setup()
    assert tried == ["6.2.0", "6.2.0"]
    reason = "because apt has no package linux-headers-6.2.0"
    assert capsys.readouterr().err.count(f"lab: without siw, with rxe alone, {reason}\n") == 2


def test_the_lab_falls_back_to_rxe_when_siw_cannot_be_built(
    cache: Path,
    installed: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def cannot_build(release: str) -> None:
        raise LabError("the siw driver could not be built", log="/log")

    monkeypatch.setattr(siw, "build", cannot_build)
    make_apt(cache, monkeypatch, "Inst linux-image-amd64 (1 x)")
    make_kernel(cache, "6.1.0", COMMON)
    with pytest.raises(LabError, match=r"^the siw driver could not be built$"):
        setup.setup()
    make_kernel(cache, "6.2.0", [*COMMON, "rdma_rxe"])
    setup.setup()
    assert capsys.readouterr().err == (
        "lab: without siw, with rxe alone, because the siw driver could not be built "
        "(the log is in /log)\nlab: ready (kernel 6.2.0, TCG)\n"
    )
    chosen, devices = run.choose_kernel(DEVICES["both"])
    assert (chosen.release, devices) == ("6.2.0", DEVICES["rxe"])
    assert capsys.readouterr().err.startswith("lab: with rxe alone: siw could not be built")
    with pytest.raises(LabError, match="has no module siw"):
        run.choose_kernel(DEVICES["siw"])
