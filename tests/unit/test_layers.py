"""Imports go only to the same layer or to lower ones, and modules are short."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from parsing import parse

import aiordma

PACKAGE_ROOT = Path(aiordma.__file__).parent
MODULES = sorted(PACKAGE_ROOT.rglob("*.py"))
MAX_LINES = 400
LONG_MODULES = {
    "aiordma.asyncio.transport": "one class, whose methods are those of asyncio.Transport",
    "aiordma.cm.base_id": "one class, whose operations are those of rdma_cm(7)",
    "aiordma.messages.connection": "one class, and a docstring for each of its public methods",
    "aiordma.qp.endpoint": "one class: a connection from its beginning to its end",
    "aiordma.rdmacm.cm_id": "one C struct: every call of rdma_cma.h and rdma_verbs.h on it",
    "aiordma.verbs.queue_pair": "one C struct: every call of verbs.h on it",
}
"""Modules that are longer, with the reason. The limit alone is no reason to split a module."""

LAYERS = {
    0: ["_native"],
    1: ["enums", "errors", "options", "rdmacm", "verbs"],
    2: ["loop", "memory"],
    3: ["dispatch"],
    4: ["cm", "qp"],
    5: ["", "datagrams", "messages", "message_streams", "streams"],
    6: [
        "__main__",
        "anyio",
        "asyncio",
        "bench",
        "cli",
        "dask",
        "doctor",
        "lab",
        "ping",
        "prometheus",
        "trio",
    ],
}
"""The packages and modules of each layer; "" is aiordma/__init__.py."""

LAYER_OF = {package: layer for layer, packages in LAYERS.items() for package in packages}
LOOP_FREE = ["_native", "enums", "errors", "rdmacm", "verbs"]
EVENT_LOOPS = {"asyncio", "trio", "anyio", "uvloop"}
OPTIONAL = {
    "anyio": ("aiordma.anyio.",),
    "trio": ("aiordma.loop.trio_loop", "aiordma.trio."),
    "dask": ("aiordma.dask.",),
    "distributed": ("aiordma.dask.",),
    "matplotlib": ("aiordma.bench.plot",),
    "prometheus_client": ("aiordma.prometheus.",),
    "pyverbs": ("aiordma.bench.workers.pyverbs_latency",),
}
"""Packages that are optional dependencies, and the only modules that can import them."""


def dotted_name(module: Path) -> str:
    """Return the name of a module, such as `aiordma.loop.waiting`.

    A package is `aiordma.loop.__init__`. Then the dots of relative imports count alike in packages
    and in modules.
    """
    return ".".join(module.relative_to(PACKAGE_ROOT.parent).with_suffix("").parts)


def package_of(name: str) -> str:
    """Return the first part of a name below `aiordma`; "" for `aiordma` itself."""
    package = f"{name}.".split(".")[1]
    return "" if package == "__init__" else package


def imported_names(source: str, importer: str) -> Iterator[str]:
    """Yield every module that `source` imports, also in functions and for type checkers.

    For `from aiordma import x` yield `aiordma.x` if x is a package.
    """
    for node in ast.walk(parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = importer.split(".")[: -node.level]
                base = ".".join([*parents, *base.split(".")]).rstrip(".")
            for alias in node.names:
                is_package = base == "aiordma" and alias.name in LAYER_OF
                yield f"{base}.{alias.name}" if is_package else base


def package_imports(source: str, importer: str) -> set[str]:
    """Return the packages of aiordma that a module imports, except its own."""
    names = imported_names(source, importer)
    packages = {package_of(name) for name in names if name.split(".")[0] == "aiordma"}
    return packages - {package_of(importer)}


def layer_of(package: str) -> int:
    if package not in LAYER_OF:
        pytest.fail(
            f"aiordma/{package} is in no layer: add it to LAYERS in {Path(__file__).name}, "
            "in the lowest layer that its imports allow"
        )
    return LAYER_OF[package]


def upward_imports(source: str, importer: str) -> list[str]:
    layer = layer_of(package_of(importer))
    return [
        f"{importer} (layer {layer}) imports aiordma.{target} (layer {layer_of(target)})"
        for target in sorted(package_imports(source, importer))
        if layer_of(target) > layer
    ]


SOURCES = {dotted_name(path): path.read_text() for path in MODULES}


def test_no_module_imports_from_a_higher_layer() -> None:
    assert len(SOURCES) > 30
    found = [upward_imports(source, module) for module, source in SOURCES.items()]
    assert [text for texts in found for text in texts] == []


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("import aiordma.messages", 1),
        ("import os, aiordma.messages as c", 1),
        ("import aiordma", 1),
        ("from aiordma import messages", 1),
        ("from aiordma.messages import listen", 1),
        ("from aiordma.messages.deeper import thing", 1),
        ("from ..messages import listen", 1),
        ("from .. import messages", 1),
        ("def f() -> None:\n    from aiordma.messages import listen\n", 1),
        ("if TYPE_CHECKING:\n    from aiordma.messages import listen\n", 1),
        ("try:\n    import aiordma.messages\nexcept ImportError:\n    pass\n", 1),
        ("import asyncio", 0),
        ("import aiordmax.connect", 0),
        ("from aiordma.enums import CmEventType", 0),
        ("from aiordma.loop.protocol import Loop", 0),
        ("from .protocol import Loop", 0),
        ("from . import protocol", 0),
        ("from ..errors import RdmaError", 0),
        ("from .. import errors", 0),
    ],
)
def test_an_upward_import_is_found(source: str, count: int) -> None:
    assert len(upward_imports(source, "aiordma.loop.waiting")) == count
    assert len(upward_imports(source, "aiordma.loop.__init__")) == count  # the package itself


def test_an_unknown_package_fails() -> None:
    with pytest.raises(pytest.fail.Exception, match=r"aiordma/attic .* add it to LAYERS"):
        upward_imports("", "aiordma.attic.box")


def test_no_two_packages_import_each_other() -> None:
    found = {
        (package_of(module), target)
        for module, source in SOURCES.items()
        for target in package_imports(source, module)
    }
    assert {pair for pair in found if pair[::-1] in found} == set()


def may_import(module: str, name: str) -> bool:
    """Return True if `module` may import the package `name`, which aiordma does not contain."""
    if package_of(module) in LOOP_FREE and name in EVENT_LOOPS:
        return False
    return name not in OPTIONAL or module.startswith(OPTIONAL[name])


def test_event_loops_and_optional_packages_are_imported_where_they_belong() -> None:
    found = [
        f"{module} imports {name}"
        for module, source in SOURCES.items()
        for name in {name.split(".")[0] for name in imported_names(source, module)}
        if not may_import(module, name)
    ]
    assert found == []


def test_modules_are_short_except_the_listed_ones_and_have_docstrings() -> None:
    is_long = {name for name, source in SOURCES.items() if source.count("\n") > MAX_LINES}
    assert is_long == LONG_MODULES.keys()
    assert [name for name, source in SOURCES.items() if not ast.get_docstring(parse(source))] == []
