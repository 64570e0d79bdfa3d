"""Kernel modules: their files, their dependencies and their content."""

import gzip
import lzma
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from .errors import LabError

__all__ = ["Module", "ModuleIndex"]


def _unzstd(data: bytes) -> bytes:
    if shutil.which("zstd") is None:
        raise LabError(
            "the program zstd, which decompresses the kernel's modules, is not installed: "
            "run `aiordma lab setup`"
        )
    return subprocess.run(["zstd", "-dc"], input=data, stdout=subprocess.PIPE, check=True).stdout


_DECOMPRESS: Mapping[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.decompress,
    ".xz": lzma.decompress,
    ".zst": _unzstd,
}


@dataclass(frozen=True)
class Module:
    """The file of a kernel module."""

    path: Path

    @property
    def stem(self) -> str:
        """The module's name, in the form that lsmod(8) prints."""
        return self.path.name.split(".ko")[0].replace("-", "_")

    def content(self) -> bytes:
        """Return the module, decompressed. busybox's insmod cannot decompress it.

        Raises: LabError if it is compressed with zstd and that program is missing.
        """
        decompress = _DECOMPRESS.get(self.path.suffix, bytes)
        return decompress(self.path.read_bytes())

    def dependencies(self) -> list[str]:
        """Return the names of the modules that this one needs, which the module itself lists."""
        listed = re.search(rb"\0depends=([^\0]*)\0", self.content())
        return [name for name in listed[1].decode().split(",") if name] if listed else []


class ModuleIndex:
    """The modules in a directory and their dependencies, read from the files of depmod(8)."""

    def __init__(self, directory: Path) -> None:
        self._modules: dict[str, tuple[Module, list[str]]] = {}
        self._builtin: set[str] = set()
        self._read_dependencies(directory)
        self._read_builtin(directory / "modules.builtin")

    def add(self, module: Module) -> None:
        """Add a module that is outside the directory."""
        self._modules[module.stem] = (module, module.dependencies())

    def __contains__(self, name: str) -> bool:
        return name in self._modules or name in self._builtin

    @property
    def suffixes(self) -> set[str]:
        """The ends of the modules' file names: ".ko", or the one of a compression."""
        return {module.path.suffix for module, _ in self._modules.values()}

    def load_order(self, names: Iterable[str]) -> list[Module]:
        """Return the modules to insert for `names`: dependencies first, each module once.

        Modules that are built into the kernel are left out.

        Raises: LabError if the kernel does not have one of them.
        """
        order: dict[str, Module] = {}
        for name in names:
            self._visit(name, order)
        return list(order.values())

    def _visit(self, name: str, order: dict[str, Module]) -> None:
        if name in order or name in self._builtin:
            return
        if name not in self._modules:
            raise LabError(f"the kernel has no module {name}")
        module, dependencies = self._modules[name]
        for dependency in dependencies:
            self._visit(dependency, order)
        order[name] = module

    def _read_dependencies(self, directory: Path) -> None:
        try:
            text = (directory / "modules.dep").read_text()
        except FileNotFoundError:
            return
        for line in text.splitlines():
            path, _, dependencies = line.partition(":")
            stems = [Module(Path(dependency)).stem for dependency in dependencies.split()]
            module = Module(directory / path)
            self._modules[module.stem] = (module, stems)

    def _read_builtin(self, path: Path) -> None:
        try:
            text = path.read_text()
        except FileNotFoundError:
            return
        self._builtin = {Module(Path(line)).stem for line in text.splitlines()}
