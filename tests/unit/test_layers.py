"""Imports go downwards only, and modules stay small."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from parsing import parse

import aiordma

PACKAGE = Path(aiordma.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
MAX_LINES = 400
LONG = {
    "aiordma.cm.base_id": "one class, whose operations are those of rdma_cm(7)",
    "aiordma.messages.connection": "one class, and a docstring for each of its public methods",
    "aiordma.rdmacm.cm_id": "one C struct: every call of rdma_cma.h and rdma_verbs.h on it",
}
"""Modules that are longer, and why. Neither splits nor joins are made for a count."""

LAYERS = {
    0: ["_native"],
    1: ["enums", "errors", "options", "rdmacm", "verbs"],
    2: ["loop", "memory"],
    3: ["dispatch"],
    4: ["cm", "qp"],
    5: ["", "datagrams", "messages", "streams"],
    6: ["__main__", "anyio", "asyncio", "bench", "cli", "lab", "ping", "trio"],
}
"""The rooms of each floor; "" is aiordma/__init__.py."""

LAYER_OF = {room: layer for layer, rooms in LAYERS.items() for room in rooms}
LOOP_FREE = ["_native", "enums", "errors", "rdmacm", "verbs"]
EVENT_LOOPS = {"asyncio", "trio", "anyio", "uvloop"}
OPTIONAL = {
    "anyio": ("aiordma.anyio.",),
    "trio": ("aiordma.loop.trio_loop", "aiordma.trio."),
    "matplotlib": ("aiordma.bench.plot",),
    "pyverbs": ("aiordma.bench.workers.pyverbs_latency",),
}
"""Packages that need not be installed, and the only modules that import them."""


def dotted_name(module: Path) -> str:
    """`aiordma.loop.waiting`; a package is `aiordma.loop.__init__`, whose relative imports then
    count their dots as a module's do."""
    relative = module.relative_to(PACKAGE.parent).with_suffix("")
    return ".".join(relative.parts)


def room_of(name: str) -> str:
    """The first part below `aiordma`: "" for the package itself."""
    room = f"{name}.".split(".")[1]
    return "" if room == "__init__" else room


def imported_names(source: str, importer: str) -> Iterator[str]:
    """Every module that is imported anywhere in `source`, in functions and for type checkers too.

    What `from aiordma import x` names is given as `aiordma.x` where x is a room.
    """
    for node in ast.walk(parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = importer.split(".")[: -node.level]
                base = ".".join([*package, *base.split(".")]).rstrip(".")
            for alias in node.names:
                is_room = base == "aiordma" and alias.name in LAYER_OF
                yield f"{base}.{alias.name}" if is_room else base


def arrows(source: str, importer: str) -> set[str]:
    """The rooms of aiordma, other than its own, that a module imports."""
    names = imported_names(source, importer)
    rooms = {room_of(name) for name in names if name.split(".")[0] == "aiordma"}
    return rooms - {room_of(importer)}


def layer_of(room: str) -> int:
    if room not in LAYER_OF:
        pytest.fail(
            f"aiordma/{room} stands on no floor: add it to LAYERS in {Path(__file__).name}, "
            "as low as what it imports allows"
        )
    return LAYER_OF[room]


def upward_arrows(source: str, importer: str) -> list[str]:
    room = room_of(importer)
    floor = layer_of(room)
    return [
        f"{importer} (floor {floor}) imports aiordma.{target} (floor {layer_of(target)})"
        for target in sorted(arrows(source, importer))
        if layer_of(target) > floor
    ]


def test_there_are_modules_to_look_at() -> None:
    assert len(MODULES) > 30
    assert {"", "_native", "cm", "messages"} <= {room_of(dotted_name(path)) for path in MODULES}


@pytest.mark.parametrize("path", MODULES, ids=dotted_name)
def test_no_import_goes_up(path: Path) -> None:
    assert upward_arrows(path.read_text(), dotted_name(path)) == []


@pytest.mark.parametrize(
    "source",
    [
        "import aiordma.messages",
        "import os, aiordma.messages as c",
        "import aiordma",
        "from aiordma import messages",
        "from aiordma.messages import listen",
        "from aiordma.messages.deeper import thing",
        "from ..messages import listen",
        "from .. import messages",
        "def f() -> None:\n    from aiordma.messages import listen\n",
        "if TYPE_CHECKING:\n    from aiordma.messages import listen\n",
        "try:\n    import aiordma.messages\nexcept ImportError:\n    pass\n",
    ],
)
def test_an_upward_arrow_is_found(source: str) -> None:
    assert len(upward_arrows(source, "aiordma.loop.waiting")) == 1


@pytest.mark.parametrize(
    "source",
    [
        "import asyncio",
        "import aiordmax.connect",
        "from aiordma.enums import CmEventType",
        "from aiordma.loop.protocol import Loop",
        "from .protocol import Loop",
        "from . import protocol",
        "from ..errors import RdmaError",
        "from .. import errors",
    ],
)
def test_other_arrows_are_allowed(source: str) -> None:
    assert upward_arrows(source, "aiordma.loop.waiting") == []


def test_relative_imports_of_a_package_are_followed() -> None:
    assert arrows("from ..messages import listen", "aiordma.loop.__init__") == {"messages"}
    assert arrows("from .waiting import Slots", "aiordma.loop.__init__") == set()
    assert arrows("from .cli import main", "aiordma.__main__") == {"cli"}


def test_an_unknown_room_is_pointed_out() -> None:
    with pytest.raises(pytest.fail.Exception, match=r"aiordma/attic .* add it to LAYERS"):
        upward_arrows("", "aiordma.attic.box")


def test_no_two_rooms_import_each_other() -> None:
    found = {
        (room_of(dotted_name(path)), target)
        for path in MODULES
        for target in arrows(path.read_text(), dotted_name(path))
    }
    assert {arrow for arrow in found if arrow[::-1] in found} == set()


@pytest.mark.parametrize(
    "path",
    [path for path in MODULES if room_of(dotted_name(path)) in LOOP_FREE],
    ids=dotted_name,
)
def test_the_bindings_know_no_event_loop(path: Path) -> None:
    names = imported_names(path.read_text(), dotted_name(path))
    assert {name.split(".")[0] for name in names} & EVENT_LOOPS == set()


@pytest.mark.parametrize("path", MODULES, ids=dotted_name)
def test_optional_packages_are_imported_where_they_belong(path: Path) -> None:
    importer = dotted_name(path)
    packages = {name.split(".")[0] for name in imported_names(path.read_text(), importer)}
    for package in packages & OPTIONAL.keys():
        assert importer.startswith(OPTIONAL[package])


@pytest.mark.parametrize("path", MODULES, ids=dotted_name)
def test_modules_stay_small(path: Path) -> None:
    is_long = len(path.read_text().splitlines()) > MAX_LINES
    assert is_long == (dotted_name(path) in LONG)


@pytest.mark.parametrize("path", MODULES, ids=dotted_name)
def test_every_module_says_what_it_is(path: Path) -> None:
    assert ast.get_docstring(parse(path.read_text()))
