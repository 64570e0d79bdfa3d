"""docs/architecture.md names files and functions that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from parsing import parse

import aiordma

PACKAGE = Path(aiordma.__file__).parent
PAGE = PACKAGE.parent / "docs" / "architecture.md"
STEP = re.compile(r"`([\w/]+\.(?:py|c))`\s+`([\w.]+)\(\)`")
STEPS = sorted(set(STEP.findall(PAGE.read_text())))


def python_functions(source: str) -> set[str]:
    """Return `function` and `Class.method` for each definition in a module."""
    found: set[str] = set()
    for node in parse(source).body:
        if isinstance(node, ast.ClassDef):
            found |= {
                f"{node.name}.{member.name}"
                for member in node.body
                if isinstance(member, (ast.FunctionDef, ast.AsyncFunctionDef))
            }
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found.add(node.name)
    return found


def c_functions(source: str) -> set[str]:
    """Return the functions that a C file defines."""
    return set(re.findall(r"^(?:static )?[\w ]+[ *](\w+)\([^;]*?\)\n\{", source, re.M))


def test_the_page_has_steps() -> None:
    assert len(STEPS) > 25


@pytest.mark.parametrize(("file", "function"), STEPS)
def test_a_step_names_a_function_of_its_file(file: str, function: str) -> None:
    source = (PACKAGE / file).read_text()
    functions = python_functions(source) if file.endswith(".py") else c_functions(source)
    assert function in functions
