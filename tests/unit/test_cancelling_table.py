"""The public awaits, the table in docs/cancelling.md and the tests of cancelling are complete."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterator

from helpers import ROOT

import aiordma

KINDS = ("AsyncCmId", "SyncCmId")
WORDS = {"async for": "__anext__", "async with": "__aexit__"}


def public_awaits() -> set[str]:
    """Return the names of the public functions and methods that are awaited or entered."""
    found = set()
    for name in aiordma.__all__:
        public = getattr(aiordma, name)
        if inspect.isclass(public):
            members = inspect.getmembers(public, callable)
            found |= {f"{name}.{member}" for member, value in members if is_await(member, value)}
        elif callable(public) and is_await(name, public):
            found.add(name)
    return found


def is_await(name: str, function: Callable[..., object]) -> bool:
    if name == "__aenter__" and "await" not in inspect.getsource(function):
        return False  # most of them only return the object
    if name.startswith("_") and name not in ("__aenter__", "__aexit__", "__anext__"):
        return False
    returns = str(getattr(function, "__annotations__", {}).get("return", ""))
    return inspect.iscoroutinefunction(function) or returns.startswith(
        ("AwaitableContextManager", "Coroutine[")
    )


def awaits_in_table() -> set[str]:
    """Return the full names of the awaits in the first column of the table."""
    rows = re.findall(r"^\| (.*`.*) \| .+ \|$", (ROOT / "docs/cancelling.md").read_text(), re.M)
    return {name for row in rows for name in names_in(row)}


def names_in(row: str) -> Iterator[str]:
    """Generate the full names in a cell of the table: A.b and A.c for "`A.b()`, `c()`"."""
    owner = ""
    for word in re.findall(r"`([^`]*)`", row):
        name = WORDS.get(word, word.removesuffix("()"))
        if name == word and "." not in name:
            owner = name  # a class, for the words after it
            continue
        if "." in name:
            owner, _, name = name.partition(".")
        for kind in KINDS if owner == "CmId" else [owner]:
            yield f"{kind}.{name}" if kind else name


def awaits_in_tests() -> Iterator[str]:
    """Generate the names in the `awaits` marks of the device tests."""
    for path in (ROOT / "tests/device").glob("test_cancel_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.AsyncFunctionDef):
                for decorator in node.decorator_list:
                    yield from names_of(decorator)


def names_of(decorator: ast.expr) -> Iterator[str]:
    if not isinstance(decorator, ast.Call):
        return
    names = [str(entry.value) for entry in decorator.args if isinstance(entry, ast.Constant)]
    if isinstance(decorator.func, ast.Attribute) and decorator.func.attr == "awaits":
        yield from names
    elif isinstance(decorator.func, ast.Name) and decorator.func.id == "both":
        yield from (f"{kind}.{name}" for kind in KINDS for name in names)


def test_every_public_await_has_a_test_and_is_in_the_table() -> None:
    assert set(awaits_in_tests()) == public_awaits()
    # The row of DeviceWatch.__aexit__, "async with", is also for DeviceWatch.__aenter__.
    assert awaits_in_table() == public_awaits() - {"DeviceWatch.__aenter__"}
