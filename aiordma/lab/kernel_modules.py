"""Kernel modules: where they are, what they need, and what is in them."""

import gzip
import lzma
import shutil
import subprocess
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from .errors import LabError

__all__ = ["Module", "ModuleIndex"]


def _unzstd(data: bytes) -> bytes:
    if shutil.which("zstd") is None:
        raise LabError("the kernel's modules are compressed and the program zstd is missing")
    return subprocess.run(["zstd", "-dc"], input=data, stdout=subprocess.PIPE, check=True).stdout


_DECOMPRESS: Mapping[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.decompress,
    ".xz": lzma.decompress,
    ".zst": _unzstd,
}


@dataclass(frozen=True)
class Module:
    """A module's file."""

    path: Path

    @property
    def stem(self) -> str:
        """The module's name as `lsmod` shows it."""
        return self.path.name.split(".ko")[0].replace("-", "_")

    def content(self) -> bytes:
        """The module, decompressed: busybox's insmod takes nothing else."""
        decompress = _DECOMPRESS.get(self.path.suffix, bytes)
        return decompress(self.path.read_bytes())


class ModuleIndex:
    """What depmod knows about a directory of modules."""

    def __init__(self, directory: Path) -> None:
        self._needs: dict[str, tuple[Module, list[str]]] = {}
        self._builtin: set[str] = set()
        self._read_dependencies(directory)
        self._read_builtin(directory / "modules.builtin")

    def add(self, module: Module, needs: list[str]) -> None:
        """Add a module that lies elsewhere."""
        self._needs[module.stem] = (module, needs)

    def __contains__(self, name: str) -> bool:
        return name in self._needs or name in self._builtin

    def load_order(self, names: Iterable[str]) -> list[Module]:
        """The modules to insert for `names`, in order, none twice."""
        order: dict[str, Module] = {}
        for name in names:
            self._visit(name, order)
        return list(order.values())

    def _visit(self, name: str, order: dict[str, Module]) -> None:
        if name in order or name in self._builtin:
            return
        if name not in self._needs:
            raise LabError(f"the kernel has no module {name}")
        module, needs = self._needs[name]
        for need in needs:
            self._visit(need, order)
        order[name] = module

    def _read_dependencies(self, directory: Path) -> None:
        try:
            text = (directory / "modules.dep").read_text()
        except FileNotFoundError:
            return
        for line in text.splitlines():
            path, _, needs = line.partition(":")
            stems = [Module(Path(need)).stem for need in needs.split()]
            module = Module(directory / path)
            self._needs[module.stem] = (module, stems)

    def _read_builtin(self, path: Path) -> None:
        try:
            text = path.read_text()
        except FileNotFoundError:
            return
        self._builtin = {Module(Path(line)).stem for line in text.splitlines()}
