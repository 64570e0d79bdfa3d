"""A kernel to boot: one that the lab unpacked into its cache, or an installed one that will do."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from .errors import LabError
from .files import cache_dir
from .kernel_modules import Module, ModuleIndex

__all__ = ["IMAGE", "Kernel", "find", "in_cache", "installed", "kernels_dir", "unpacked"]

IMAGE = "image"  # the kernel image in a directory of the cache

# A kernel without one of these cannot be the lab's, whatever the device.
REQUIRED = ("virtio_pci", "virtio_console", "9p", "9pnet_virtio", "overlay", "veth", "rdma_ucm")


@dataclass(frozen=True)
class Kernel:
    """A kernel image and its modules."""

    release: str  # as `uname -r` prints it
    image: Path
    modules: Path  # what is /lib/modules/<release> for it
    siw: Path | None = None  # siw.ko, when it was built beside the kernel

    @cached_property
    def _index(self) -> ModuleIndex:
        index = ModuleIndex(self.modules)
        if self.siw is not None:
            index.add(Module(self.siw), needs=["ib_core", "libcrc32c"])
        return index

    def load_order(self, names: Iterable[str]) -> list[Module]:
        """The modules to insert for `names`, in order."""
        return self._index.load_order(names)

    def lacks(self, names: Iterable[str]) -> list[str]:
        """Which of these modules the kernel has not got."""
        return [name for name in names if name not in self._index]


def kernels_dir() -> Path:
    """Where unpacked kernels are: one directory a release, like a root directory each."""
    return cache_dir() / "kernels"


def unpacked(release: str) -> Kernel:
    """The kernel of this release in the cache (whether it is there or not)."""
    top = kernels_dir() / release
    siw = top / "siw.ko"
    return Kernel(
        release=release,
        image=top / IMAGE,
        modules=top / "lib" / "modules" / release,
        siw=siw if siw.exists() else None,
    )


def find(drivers: Sequence[str]) -> Kernel:
    """A kernel with these drivers (rxe, siw).

    Raises: LabError when there is none.
    """
    names = [*REQUIRED, *("rdma_rxe" if driver == "rxe" else driver for driver in drivers)]
    lacking: list[str] = []
    for kernel in _candidates():
        lacking = kernel.lacks(names)
        if not lacking:
            return kernel
    if lacking:
        raise LabError(f"the kernel {kernel.release} has no {lacking[0]}: run `aiordma lab setup`")
    raise LabError("there is no kernel for the lab yet: run `aiordma lab setup`")


def _candidates() -> Iterator[Kernel]:
    """Kernels on this machine, the lab's own first, newer ones first."""
    yield from in_cache()
    yield from installed()


def in_cache() -> Iterator[Kernel]:
    """Kernels that the lab unpacked, the newest first."""
    for image in sorted(kernels_dir().glob(f"[!.]*/{IMAGE}"), key=_age):
        yield unpacked(image.parent.name)


def installed(root: Path = Path("/")) -> Iterator[Kernel]:
    """Kernels installed on this machine that it can read."""
    for modules in sorted((root / "lib/modules").glob("*"), reverse=True):
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


def _age(path: Path) -> float:
    return -path.stat().st_mtime
