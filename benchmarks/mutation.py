"""`python -m benchmarks.mutation`: change what mutmut leaves out, and print what no test notices.

mutmut changes the bodies of functions, but not of those with a decorator, and no code outside of
functions. So it changes neither the tables of states nor a property. This tool changes these, in
the same modules, one change at a time:

- in a table: remove an entry, replace a state by another one, leave out a control message
- in a set: remove a member
- in the body of a property: another comparison, operator, number or result
- in another value of a module or a class: another number

It runs the tests in a process for each change, whose import system compiles the changed module. No
file is written. pyproject.toml has the modules and their tests: [tool.aiordma.mutation]. EQUIVALENT
has the changes that no test can notice, each with the reason. The exit code is 1 if a change that
is not in it survives, or if one that is in it does not.
"""

from __future__ import annotations

import argparse
import ast
import importlib.abc
import importlib.machinery
import itertools
import os
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from types import CodeType, ModuleType

import pytest

ROOT = Path(__file__).parent.parent
VARIABLE = "AIORDMA_MUTANT"
"""The module's path and the number of the change that the tests run with: `PATH:NUMBER`."""
PROCESSES = 2
TEST_SECONDS = 120
NOT_IMPORTED = 70
"""The exit code of pytest if the tests did not import the changed module."""

# The path and the description of a change, with wildcards as in fnmatch, and the reason.
EQUIVALENT = {
    (
        "aiordma/cm/states.py",
        "EVENTS[[]*]: removed _E.* (to _S.FAILED)",
    ): "an event that the table does not list leads to FAILED as well",
}


@dataclass(frozen=True)
class Edit:
    """A change of a syntax tree, in place."""

    line: int
    text: str
    apply: Callable[[], None]


# --- the changes of a module ---

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
_FUNCTIONS = {"min": "max", "max": "min", "any": "all", "all": "any"}


def edits(tree: ast.Module) -> Iterator[Edit]:
    """Yield the changes of a module, always in the same order."""
    members = _members(tree)
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            for inner in node.body:
                yield from _edits_of_statement(inner, f"{node.name}.", members)
        else:
            yield from _edits_of_statement(node, "", members)


def _members(tree: ast.Module) -> dict[str, list[str]]:
    """Return the members of each enumeration that the module uses by an alias such as _S."""
    found: dict[str, set[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found.setdefault(node.value.id, set()).add(node.attr)
    return {alias: sorted(names) for alias, names in found.items()}


def _edits_of_statement(
    node: ast.stmt, prefix: str, members: dict[str, list[str]]
) -> Iterator[Edit]:
    if isinstance(node, ast.AnnAssign) and node.value is not None:
        yield from _edits_of_value(node.value, prefix + ast.unparse(node.target), members)
    elif isinstance(node, ast.Assign):
        yield from _edits_of_value(node.value, prefix + ast.unparse(node.targets[0]), members)
    elif isinstance(node, ast.FunctionDef) and _is_left_out(node):
        for inner in node.body:
            for part in ast.walk(inner):
                yield from _edits_of_body(part, prefix + node.name)


def _is_left_out(node: ast.FunctionDef) -> bool:
    """Return True if mutmut does not change the function."""
    decorators = [ast.unparse(one) for one in node.decorator_list]
    return bool(decorators) and decorators not in (["staticmethod"], ["classmethod"])


def _edits_of_value(node: ast.expr, name: str, members: dict[str, list[str]]) -> Iterator[Edit]:
    match node:
        case ast.Dict():
            yield from _edits_of_table(node, name, members)
        case ast.Set():
            for member in node.elts:
                yield Edit(
                    member.lineno,
                    f"{name}: removed {ast.unparse(member)}",
                    lambda member=member: node.elts.remove(member),  # type: ignore[misc]
                )
        case ast.Call(func=ast.Name("Transition")):
            yield from _edits_of_value(node.args[0], name, members)
            if len(node.args) > 1:
                text = f"{name}: removed {ast.unparse(node.args[1])}"
                yield Edit(node.lineno, text, lambda: node.args.__delitem__(1))
        case ast.Call():
            for argument in node.args:
                yield from _edits_of_value(argument, name, members)
        case ast.Attribute(value=ast.Name(alias), attr=attr) if name[-1] == "]":
            names = members[alias]
            other = names[(names.index(attr) + 1) % len(names)]
            text = f"{name}: {alias}.{other} for {alias}.{attr}"
            yield Edit(node.lineno, text, lambda: setattr(node, "attr", other))
        case ast.BinOp():
            yield from _edits_of_value(node.left, name, members)
            yield from _edits_of_value(node.right, name, members)
        case ast.Constant():
            yield from _edits_of_constant(node, name)


def _edits_of_table(node: ast.Dict, name: str, members: dict[str, list[str]]) -> Iterator[Edit]:
    for key, value in zip(list(node.keys), list(node.values), strict=True):
        assert key is not None, "a table has no **"
        place = f"{name}[{ast.unparse(key)}]"
        if isinstance(value, ast.Dict):
            yield from _edits_of_table(value, place, members)
            continue

        def remove(key: ast.expr = key, value: ast.expr = value) -> None:
            node.keys.remove(key)
            node.values.remove(value)

        text = f"{name}: removed {ast.unparse(key)} (to {ast.unparse(value)})"
        yield Edit(key.lineno, text, remove)
        yield from _edits_of_value(value, place, members)


def _edits_of_constant(node: ast.Constant, name: str) -> Iterator[Edit]:
    if isinstance(node.value, bool):
        other: int = not node.value
    elif isinstance(node.value, int):
        other = node.value + 1
    else:
        return
    yield Edit(
        node.lineno, f"{name}: {other} for {node.value}", lambda: setattr(node, "value", other)
    )


def _edits_of_body(node: ast.AST, name: str) -> Iterator[Edit]:
    match node:
        case ast.Compare(ops=[comparison]):
            other_way = _COMPARISONS[type(comparison)]()
            changed = ast.Compare(node.left, [other_way], node.comparators)
            yield _replacing(node, changed, name)
        case ast.BoolOp():
            other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            yield _replacing(node, ast.BoolOp(other, node.values), name)
        case ast.BinOp() if type(node.op) in _OPERATORS:
            operator = _OPERATORS[type(node.op)]()
            yield _replacing(node, ast.BinOp(node.left, operator, node.right), name)
        case ast.UnaryOp(op=ast.Not()):
            text = f"{name}: {ast.unparse(node.operand)} for {ast.unparse(node)}"
            operand = ast.UnaryOp(ast.Not(), node.operand)
            yield Edit(node.lineno, text, lambda: setattr(node, "operand", operand))
        case ast.IfExp():
            changed_if = ast.IfExp(node.test, node.orelse, node.body)
            yield _replacing(node, changed_if, name)
        case ast.Name(id=function) if function in _FUNCTIONS:
            yield _replacing(node, ast.Name(_FUNCTIONS[function]), name)
        case ast.Constant():
            yield from _edits_of_constant(node, name)
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            text = f"{name}: returns None"
            yield Edit(node.lineno, text, lambda: setattr(node, "value", ast.Constant(None)))


def _replacing(node: ast.expr, other: ast.expr, name: str) -> Edit:
    """Return the change of `node` to `other`, which is of the same class."""
    text = f"{name}: {ast.unparse(other)} for {ast.unparse(node)}"
    return Edit(node.lineno, text, lambda: vars(node).update(vars(other)))


def changed_code(path: Path, number: int) -> CodeType:
    """Compile the module with the change of that number."""
    tree = ast.parse(path.read_text())
    next(itertools.islice(edits(tree), number, None)).apply()
    return compile(ast.fix_missing_locations(tree), path, "exec")


# --- in the process of the tests: a plugin of pytest, whose module is imported changed ---


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads the changed module."""

    used = False

    def get_code(self, fullname: str) -> CodeType:
        _Loader.used = True
        path, _, number = os.environ[VARIABLE].rpartition(":")
        return changed_code(ROOT / path, int(number))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the changed module."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        changed = os.environ[VARIABLE].rpartition(":")[0]
        if fullname != changed.removesuffix(".py").replace("/", "."):
            return None
        file = str(ROOT / changed)
        return importlib.machinery.ModuleSpec(fullname, _Loader(fullname, file), origin=file)


def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Import the changed module from now on."""
    sys.meta_path.insert(0, _Finder())


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Let the tests fail in a way of its own if they have not imported the module."""
    if not _Loader.used:
        session.exitstatus = NOT_IMPORTED


# --- running the tests with each change ---


@dataclass(frozen=True)
class Mutant:
    """A change of a module, and the tests that must notice it."""

    path: str
    number: int
    line: int
    text: str
    tests: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"

    @property
    def reason(self) -> str | None:
        """The reason why no test can notice the change; None if one must."""
        for (path, pattern), reason in EQUIVALENT.items():
            if path == self.path and fnmatch(self.text, pattern):
                return reason
        return None

    def survives(self) -> bool:
        """Run the tests with the change. Return True if they pass.

        Raises:
            RuntimeError: the tests do not import the module.
        """
        arguments = ["-x", "-q", "-p", "no:cacheprovider", "-p", "benchmarks.mutation"]
        try:
            code = subprocess.run(
                [sys.executable, "-m", "pytest", *arguments, *self.tests],
                cwd=ROOT,
                env={**os.environ, VARIABLE: f"{self.path}:{self.number}"},
                capture_output=True,
                timeout=TEST_SECONDS,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            return False
        if code == NOT_IMPORTED:
            raise RuntimeError(f"the tests of {self.path} do not import it")
        return code == 0


def mutants(settings: dict[str, list[str]]) -> list[Mutant]:
    """Return the changes of all modules. `settings` has the tests of each module."""
    return [
        Mutant(path, number, edit.line, edit.text, tuple(tests))
        for path, tests in settings.items()
        for number, edit in enumerate(edits(ast.parse((ROOT / path).read_text())))
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tests with each change. Return 1 if the outcome of one is not the expected one."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mutation")
    parser.add_argument("--list", action="store_true", help="only print the changes")
    parser.add_argument("pattern", nargs="*", default=["*"], help="of the changes, as in fnmatch")
    options = parser.parse_args(arguments)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    settings = project["tool"]["aiordma"]["mutation"]
    chosen = [
        one
        for one in mutants(settings)
        if any(fnmatch(str(one), pattern) for pattern in options.pattern)
    ]
    if options.list:
        print(*chosen, sep="\n")
        return 0
    begin = time.monotonic()
    with ThreadPoolExecutor(PROCESSES) as pool:
        survived = list(pool.map(Mutant.survives, chosen))
    outcomes = list(zip(chosen, survived, strict=True))
    wrong = [(one, lives) for one, lives in outcomes if lives != (one.reason is not None)]
    for mutant, lives in wrong:
        print(f"{mutant}: {'no test notices it' if lives else 'not equivalent'}")
    equivalent = sum(lives and one.reason is not None for one, lives in outcomes)
    print(
        f"{len(chosen)} changes in {time.monotonic() - begin:.0f} s: {survived.count(False)} "
        f"noticed, {equivalent} equivalent, {len(wrong)} not as expected"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
