"""`aiordma lab setup` installs missing programs, or names them."""

import os
import struct
from collections.abc import Sequence
from pathlib import Path

import pytest

from aiordma.lab import debian, packages, qemu, siw
from aiordma.lab.errors import LabError
from aiordma.lab.packages import Requirement

REQUIREMENTS = (
    Requirement("QEMU", "qemu-system-x86", lambda: False),
    Requirement("make", "make", lambda: True),
    Requirement("kmod", "kmod", lambda: False),
)


def test_ensure_runs_nothing_if_nothing_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "command", lambda *args: pytest.fail("ran something"))
    packages.ensure([need for need in REQUIREMENTS if need.is_installed()])


def test_ensure_without_apt_names_missing_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "has_apt", lambda: False)
    with pytest.raises(LabError) as caught:
        packages.ensure(REQUIREMENTS)
    sentence = "the lab needs QEMU, kmod: install it with this system's package manager"
    assert str(caught.value) == sentence


@pytest.mark.parametrize(("user", "prefix"), [(0, []), (1000, ["sudo"])])
def test_apt_runs_as_root(monkeypatch: pytest.MonkeyPatch, user: int, prefix: list[str]) -> None:
    ran: list[list[str]] = []
    installed: set[str] = set()

    def command(argv: Sequence[str], failure: str) -> None:
        ran.append(list(argv))
        installed.update(argv)

    monkeypatch.setattr(packages, "command", command)
    monkeypatch.setattr(packages, "has_apt", lambda: True)
    monkeypatch.setattr(packages, "program", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(os, "geteuid", lambda: user)
    packages.ensure([Requirement("kmod", "kmod", lambda: "kmod" in installed)])
    update, install = ran
    assert update == [*prefix, "apt-get", "update", "-q"]
    assert install[: len(prefix)] == prefix
    assert install[-2:] == ["--no-install-recommends", "kmod"]


def test_refresh_without_root_and_sudo_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(packages, "program", lambda name: None)
    with pytest.raises(LabError, match=r"needs root or sudo, and neither is available$"):
        packages.refresh()


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


def test_check_machine_on_another_architecture_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    with pytest.raises(
        LabError, match=r"^the lab needs Linux on x86_64, but this is Linux on riscv64$"
    ):
        qemu.check_machine()


def test_unpack_kernel_without_apt_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "has_apt", lambda: False)
    with pytest.raises(
        LabError, match=r"^the lab needs a kernel with the modules rdma_rxe and siw"
    ):
        debian.unpack_kernel()


def test_series_and_flavour_of_a_release() -> None:
    assert siw.series_and_flavour("6.1.0-56-amd64") == ("6.1", "amd64")
    assert siw.series_and_flavour("6.12.48+deb13-amd64") == ("6.12", "amd64")
    with pytest.raises(LabError, match=r"^cannot tell from the release custom which source"):
        siw.series_and_flavour("custom")
