"""What is missing is installed, or named."""

import os
import struct
from collections.abc import Sequence
from pathlib import Path

import pytest

from aiordma.lab import debian, packages, qemu, siw
from aiordma.lab.errors import LabError
from aiordma.lab.packages import Need

MISSING = (
    Need("QEMU", "qemu-system-x86", lambda: False),
    Need("make", "make", lambda: True),
    Need("kmod", "kmod", lambda: False),
)


def test_nothing_is_run_when_nothing_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "command", lambda *args: pytest.fail("ran something"))
    packages.ensure([need for need in MISSING if need.found()])


def test_missing_things_are_named_without_apt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "has_apt", lambda: False)
    with pytest.raises(LabError) as caught:
        packages.ensure(MISSING)
    sentence = "the lab needs QEMU, kmod: install it with this system's package manager"
    assert str(caught.value) == sentence


@pytest.mark.parametrize(("user", "prefix"), [(0, []), (1000, ["sudo"])])
def test_apt_installs_as_root(
    monkeypatch: pytest.MonkeyPatch, user: int, prefix: list[str]
) -> None:
    ran: list[list[str]] = []
    installed: set[str] = set()

    def command(argv: Sequence[str], failure: str) -> None:
        ran.append(list(argv))
        installed.update(argv)

    monkeypatch.setattr(packages, "command", command)
    monkeypatch.setattr(packages, "has_apt", lambda: True)
    monkeypatch.setattr(packages, "program", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(os, "geteuid", lambda: user)
    packages.ensure([Need("kmod", "kmod", lambda: "kmod" in installed)])
    update, install = ran
    assert update == [*prefix, "apt-get", "update", "-q"]
    assert install[: len(prefix)] == prefix
    assert install[-2:] == ["--no-install-recommends", "kmod"]


def test_neither_root_nor_sudo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(packages, "program", lambda name: None)
    with pytest.raises(LabError, match=r"needs root or sudo, and there is neither$"):
        packages.refresh()


def elf(*kinds: int) -> bytes:
    """A 64-bit ELF file with program headers of these kinds."""
    header = b"\x7fELF\x02".ljust(32, b"\0") + struct.pack("<Q", 64)
    header = header.ljust(54, b"\0") + struct.pack("<HH", 56, len(kinds))
    return header.ljust(64, b"\0") + b"".join(struct.pack("<I52x", kind) for kind in kinds)


def test_only_a_static_busybox_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "busybox"
    monkeypatch.setattr(packages, "program", lambda name: str(path))
    path.write_bytes(elf(1, 3))
    with pytest.raises(LabError, match=r"^a statically linked busybox is not installed"):
        packages.busybox()
    path.write_bytes(elf(1, 1))
    assert packages.busybox() == path


def test_another_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    with pytest.raises(
        LabError, match=r"^the lab runs on Linux on x86_64, and this is Linux on ri"
    ):
        qemu.check_machine()


def test_no_kernel_without_apt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "has_apt", lambda: False)
    with pytest.raises(
        LabError, match=r"^the lab needs a kernel with the modules rdma_rxe and siw"
    ):
        debian.unpack_kernel()


def test_a_kernels_name_tells_its_source() -> None:
    assert siw.series_and_flavour("6.1.0-56-amd64") == ("6.1", "amd64")
    assert siw.series_and_flavour("6.12.48+deb13-amd64") == ("6.12", "amd64")
    with pytest.raises(LabError, match=r"does not say which source it is built from$"):
        siw.series_and_flavour("custom")
