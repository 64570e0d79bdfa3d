"""docs/architecture.md names files and functions that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from parsing import parse

import aiordma

PACKAGE = Path(aiordma.__file__).parent
PAGE = PACKAGE.parent / "docs" / "architecture.md"
STEP = re.compile(r"`([\w/]+\.(?:py|c))`\s+`([\w.]+)\(\)`")
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef


def functions(file: str) -> set[str]:
    """Return `function` and `Class.method` for each definition in a Python or C file."""
    source = (PACKAGE / file).read_text()
    if file.endswith(".c"):
        return set(re.findall(r"^(?:static )?[\w ]+[ *](\w+)\([^;]*?\)\n\{", source, re.M))
    found: set[str] = set()
    for node in parse(source).body:
        members = node.body if isinstance(node, ast.ClassDef) else [node]
        owner = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
        found |= {owner + member.name for member in members if isinstance(member, FUNCTION)}
    return found


def test_each_step_names_a_function_of_its_file() -> None:
    steps = set(STEP.findall(PAGE.read_text()))
    assert len(steps) > 25
    assert [step for step in steps if step[1] not in functions(step[0])] == []
