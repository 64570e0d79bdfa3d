"""Putting everything in place, once."""

import contextlib
import fcntl
from collections.abc import Iterator

from . import debian, kernel, kvm, packages, qemu, siw
from .errors import LabError
from .files import cache_dir
from .steps import say, step

__all__ = ["setup"]

_DRIVERS = ("rxe", "siw")


def setup() -> None:
    """Install, unpack and build what is missing; do nothing when nothing is.

    Raises: LabError naming what is missing and cannot be had.
    """
    qemu.check_machine()
    packages.ensure(packages.RUN_NEEDS)
    with _alone():
        _ensure_kernel()
        chosen = kernel.find(_DRIVERS)
        program = qemu.find()
        if not kvm.is_known():
            with step("trying KVM"):
                kvm.works(program, chosen)
    accelerator = kvm.choose(program, chosen)
    say(f"lab: ready (kernel {chosen.release}, {accelerator.upper()})\n")


def _ensure_kernel() -> None:
    if _found(_DRIVERS):
        return
    release = _unpacked_release() or debian.unpack_kernel()
    if not _found(_DRIVERS):
        siw.build(release)


def _unpacked_release() -> str | None:
    """The newest kernel that an earlier call unpacked, perhaps without siw yet."""
    return next((found.release for found in kernel.in_cache()), None)


def _found(drivers: tuple[str, ...]) -> bool:
    try:
        kernel.find(drivers)
    except LabError:
        return False
    return True


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Let a second `setup` wait for the first."""
    cache_dir().mkdir(parents=True, exist_ok=True)
    with (cache_dir() / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
