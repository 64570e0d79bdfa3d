"""The kernel to boot: unpacked into the cache by the lab, or installed with the needed modules."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from .errors import LabError
from .files import cache_dir
from .kernel_modules import Module, ModuleIndex

__all__ = ["IMAGE", "Kernel", "find", "in_cache", "installed", "kernels_dir", "unpacked"]

IMAGE = "image"  # the name of the kernel image in a kernel's directory in the cache

# The lab needs these modules for every device.
REQUIRED = ("virtio_pci", "virtio_console", "9p", "9pnet_virtio", "overlay", "veth", "rdma_ucm")


@dataclass(frozen=True)
class Kernel:
    """A kernel image and its modules."""

    release: str  # as `uname -r` prints it
    image: Path
    modules: Path  # the directory of its modules, such as /lib/modules/<release>
    siw: Path | None = None  # siw.ko, if the lab built it

    @cached_property
    def _index(self) -> ModuleIndex:
        index = ModuleIndex(self.modules)
        if self.siw is not None:
            index.add(Module(self.siw))
        return index

    def __contains__(self, module: str) -> bool:
        return module in self._index

    def load_order(self, names: Iterable[str]) -> list[Module]:
        """Return the modules to insert for `names`: dependencies first, each module once.

        Raises: LabError if the kernel does not have one of them.
        """
        return self._index.load_order(names)

    @property
    def needs_zstd(self) -> bool:
        """True if a module is compressed with zstd, and the program zstd must decompress it."""
        return ".zst" in self._index.suffixes

    def missing(self, names: Iterable[str]) -> list[str]:
        """Return those of the modules `names` that the kernel does not have."""
        return [name for name in names if name not in self]


def kernels_dir() -> Path:
    """Return the directory of unpacked kernels: one subdirectory per release, laid out like /."""
    return cache_dir() / "kernels"


def unpacked(release: str) -> Kernel:
    """Return the kernel of this release in the cache. Does not check that it exists."""
    top = kernels_dir() / release
    siw = top / "siw.ko"
    return Kernel(
        release=release,
        image=top / IMAGE,
        modules=top / "lib" / "modules" / release,
        siw=siw if siw.exists() else None,
    )


def find(drivers: Sequence[str]) -> Kernel:
    """Return a kernel that has these drivers ("rxe", "siw").

    Raises: LabError if there is none.
    """
    names = [*REQUIRED, *("rdma_rxe" if driver == "rxe" else driver for driver in drivers)]
    missing: list[str] = []
    for kernel in _candidates():
        missing = kernel.missing(names)
        if not missing:
            return kernel
    if missing:
        raise LabError(
            f"the kernel {kernel.release} has no module {missing[0]}: run `aiordma lab setup`"
        )
    raise LabError("the lab has no kernel yet: run `aiordma lab setup`")


def _candidates() -> Iterator[Kernel]:
    """Yield the kernels on this machine: first those in the cache, then the installed ones."""
    yield from in_cache()
    yield from installed()


def in_cache() -> Iterator[Kernel]:
    """Yield the kernels that the lab unpacked, the newest first."""
    for image in sorted(kernels_dir().glob(f"[!.]*/{IMAGE}"), key=_age):
        yield unpacked(image.parent.name)


def installed(root: Path = Path("/")) -> Iterator[Kernel]:
    """Yield the installed kernels whose image this user can read, the newest first."""
    for modules in sorted((root / "lib/modules").glob("*"), key=_numbers, reverse=True):
        release = modules.name
        for image in (root / f"boot/vmlinuz-{release}", modules / "vmlinuz"):
            if image.is_file() and _readable(image):
                yield Kernel(release, image, modules)
                break


def _readable(path: Path) -> bool:
    try:
        with path.open("rb"):
            return True
    except OSError:
        return False


def _numbers(modules: Path) -> list[int]:
    """Return the numbers in a release: as text, 6.9 would be newer than 6.12."""
    return [int(number) for number in re.findall(r"\d+", modules.name)]


def _age(path: Path) -> float:
    return -path.stat().st_mtime
