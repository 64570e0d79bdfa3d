"""docs/cancelling.md, the tests of cancelling, and the public awaits: none knows of one that the
others do not."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import aiordma

ROOT = Path(__file__).parents[2]
KINDS = ("AsyncCmId", "SyncCmId")
WORDS = {"async for": "__anext__", "async with": "__aexit__"}


def public_awaits() -> set[str]:
    found = set()
    for name in aiordma.__all__:
        thing = getattr(aiordma, name)
        if inspect.isclass(thing):
            members = inspect.getmembers(thing, callable)
            found |= {f"{name}.{member}" for member, value in members if is_await(member, value)}
        elif callable(thing) and is_await(name, thing):
            found.add(name)
    return found


def is_await(name: str, thing: object) -> bool:
    if name == "__aenter__" and "await" not in inspect.getsource(thing):  # type: ignore[arg-type]
        return False  # most only return the thing
    if name.startswith("_") and name not in ("__aenter__", "__aexit__", "__anext__"):
        return False
    returns = getattr(thing, "__annotations__", {}).get("return", "")
    return inspect.iscoroutinefunction(thing) or str(returns).startswith("AwaitableContextManager")


def in_the_table() -> set[str]:
    rows = re.findall(r"^\| (.*`.*) \| .+ \|$", (ROOT / "docs/cancelling.md").read_text(), re.M)
    return {name for row in rows for name in names_in(row)}


def names_in(row: str) -> Iterator[str]:
    owner = ""
    for word in re.findall(r"`([^`]*)`", row):
        name = WORDS.get(word, word.removesuffix("()"))
        if name == word and "." not in name:
            owner = name  # a class alone
            continue
        if "." in name:
            owner, _, name = name.partition(".")
        for kind in KINDS if owner == "CmId" else [owner]:
            yield f"{kind}.{name}" if kind else name


def in_tests() -> set[str]:
    found: set[str] = set()
    for path in (ROOT / "tests/device").glob("test_cancel_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.AsyncFunctionDef):
                for decorator in node.decorator_list:
                    found |= set(names_of(decorator))
    return found


def names_of(decorator: ast.expr) -> Iterator[str]:
    if not isinstance(decorator, ast.Call):
        return
    constants = [argument for argument in decorator.args if isinstance(argument, ast.Constant)]
    names = [str(constant.value) for constant in constants]
    if isinstance(decorator.func, ast.Attribute) and decorator.func.attr == "awaits":
        yield from names
    elif isinstance(decorator.func, ast.Name) and decorator.func.id == "both":
        yield from (f"{kind}.{name}" for kind in KINDS for name in names)


def test_every_public_await_has_a_test() -> None:
    assert in_tests() == public_awaits()


def test_every_public_await_is_in_the_table() -> None:
    # A class's own way into its block is told of with the way out.
    assert in_the_table() == public_awaits() - {"DeviceWatch.__aenter__"}
