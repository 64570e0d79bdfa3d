"""Prepare this machine for the lab: packages, the kernel, the siw driver, the KVM test."""

import contextlib
import fcntl
from collections.abc import Iterator

from . import debian, kernel, kvm, packages, qemu, siw
from .errors import LabError
from .files import cache_dir
from .steps import show, step

__all__ = ["setup"]

_DRIVERS = ("rxe", "siw")
_RXE = ("rxe",)


def setup(drivers: tuple[str, ...] = _DRIVERS) -> None:
    """Install, unpack and build everything that is missing for these drivers.

    Raises: LabError that names the first thing that is missing and cannot be installed.
    """
    qemu.check_machine()
    packages.ensure(packages.RUN_REQUIREMENTS)
    with _setup_lock():
        chosen = _ensure_kernel(drivers)
        if chosen.needs_zstd:
            packages.ensure(packages.ZSTD_REQUIREMENTS)
        program = qemu.find()
        if not kvm.is_result_known():
            with step("testing KVM"):
                kvm.works(program, chosen)
    accelerator = kvm.choose(program, chosen)
    show(f"lab: ready (kernel {chosen.release}, {accelerator.upper()})\n")


def _ensure_kernel(drivers: tuple[str, ...]) -> kernel.Kernel:
    """Return a kernel with the drivers or, if siw cannot be built beside rxe, with rxe."""
    if not _has_kernel(drivers):
        try:
            _unpack_and_build(drivers)
        except LabError as error:
            if drivers != _DRIVERS or not _has_kernel(_RXE):
                raise
            details = f" (the log is in {error.log})" if error.log else ""
            show(f"lab: without siw, with rxe alone, because {error}{details}\n")
            return kernel.find(_RXE)
    return kernel.find(drivers)


def _unpack_and_build(drivers: tuple[str, ...]) -> None:
    """Unpack a kernel if there is none in the cache, and build siw for it if it is wanted.

    Debian keeps source and headers of its current kernel only. So if siw cannot be built for an
    older kernel in the cache, the current one is unpacked.

    Raises: LabError if there is no kernel, or if siw cannot be built for the current one.
    """
    cached = _unpacked_release()
    release = cached or debian.unpack_kernel()
    if _has_kernel(drivers):
        return
    try:
        siw.build(release)
    except LabError:
        if cached is None or not debian.has_newer(cached):
            raise
        siw.build(debian.unpack_kernel())


def _unpacked_release() -> str | None:
    """Return the release of the newest kernel in the cache, with or without siw; None if empty."""
    return next((found.release for found in kernel.in_cache()), None)


def _has_kernel(drivers: tuple[str, ...]) -> bool:
    try:
        kernel.find(drivers)
    except LabError:
        return False
    return True


@contextlib.contextmanager
def _setup_lock() -> Iterator[None]:
    """Hold the lock file: a second setup waits until the first has ended."""
    cache_dir().mkdir(parents=True, exist_ok=True)
    with (cache_dir() / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
