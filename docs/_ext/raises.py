"""Expand `Raises: as f()` in docstrings to the exceptions that f() documents.

The docstrings of aiordma name an exception once. A function that raises the exceptions of another
one says so in one line:

    Raises: as connect().
    Raises: as recv(), and

        BufferError: the buffer is read-only.

This extension writes the whole list before napoleon renders it.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

from sphinx.application import Sphinx

# `Raises: as a.b(), except for C.`, with entries of its own behind `and`.
_REFERENCE = re.compile(r"^Raises: as (?:aiordma\.)?([\w.]+?)(?:\(\))?(?P<rest>[,.;](?: .*)?)?$")
_EXCEPT = re.compile(r"except (?:for )?([\w, ]+)")
_OTHERS = re.compile(r"^Others: as (.*)$")
_FUNCTION = re.compile(r"(?:aiordma\.)?(\w[\w.]*)\(\)")
_ENTRY = re.compile(r"^([A-Z][\w.]*(?:, [A-Z][\w.]*)*(?:, \.\.\.)?): (.*)$")

# The constructors of these docstrings are for users.
_FOR_USERS = ("Make ", "Create ", "Cache ", "Copy ")

Entry = tuple[str, list[str]]


def find(name: str, owner: Any, module: Any) -> Any:
    """Return the function `name` of the class `owner`, of `module`, or of the package.

    Raises:
        LookupError: there is none.
    """
    for scope in (owner, module, importlib.import_module("aiordma")):
        found = scope
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is not None:
            return found
    raise LookupError(name)


def owner_of(function: Any) -> Any:
    """Return the class whose method `function` is, or None."""
    function = inspect.unwrap(function)
    module = inspect.getmodule(function)
    name = getattr(function, "__qualname__", "").rpartition(".")[0]
    return getattr(module, name, None) if name and "<" not in name else None


def block(lines: list[str], start: int) -> tuple[list[str], int]:
    """Return the indented lines behind `start`, dedented, and the index behind them."""
    end = start
    while end < len(lines) and (not lines[end].strip() or lines[end].startswith("    ")):
        end += 1
    return [line[4:] for line in lines[start:end]], end


def entries(lines: list[str], owner: Any, module: Any) -> Iterator[Entry]:
    """Yield the exceptions of a section, with what its references stand for."""
    current: Entry | None = None
    for line in lines:
        others = _OTHERS.match(line)
        match = _ENTRY.match(line)
        if (others or match) and current is not None:
            yield current
            current = None
        if others:
            for function in _FUNCTION.findall(others.group(1)):
                yield from raised_by(find(function, owner, module))
        elif match:
            current = (match.group(1), [match.group(2)])
        elif current is not None and line.strip():
            current[1].append(line.strip())
    if current is not None:
        yield current


def raised_by(function: Any) -> list[Entry]:
    """Return the exceptions that the docstring of `function` documents, references expanded."""
    target: Any = function.fget if isinstance(function, property) else function
    lines = (inspect.getdoc(target) or "").split("\n")
    owner, module = owner_of(target), inspect.getmodule(inspect.unwrap(target))
    return [entry for section in sections(lines, owner, module) for entry in section[2]]


def sections(
    lines: list[str], owner: Any, module: Any
) -> Iterator[tuple[int, int, list[Entry], str]]:
    """Yield each section of exceptions: where it begins and ends, its entries, the text before."""
    index = 0
    while index < len(lines):
        line = lines[index]
        before, found, reference = line.rpartition("Raises: as ")
        match = _REFERENCE.match(found + reference) if found else None
        if line == "Raises:":
            body, end = block(lines, index + 1)
            yield index, end, list(entries(body, owner, module)), ""
            index = end
        elif match:
            rest = match.group("rest") or ""
            end = index + 1
            if rest.endswith(" and"):
                body, end = block(lines, end)
                own = list(entries(body, owner, module))
            else:
                own = []
            left_out = _EXCEPT.search(rest)
            names = set(re.findall(r"\w+", left_out.group(1))) if left_out else set[str]()
            inherited = raised_by(find(match.group(1), owner, module))
            kept = [entry for entry in inherited if entry[0] not in names]
            yield index, end, kept + own, before.strip()
            index = end
        else:
            index += 1


def expand(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Replace the references in a docstring. Called by autodoc."""
    target = obj.fget if isinstance(obj, property) else obj
    if not callable(target) or inspect.isclass(target):
        owner, module = target, inspect.getmodule(target)
    else:
        owner, module = owner_of(target), inspect.getmodule(inspect.unwrap(target))
    if module is None:
        return
    try:
        found = list(sections(list(lines), owner, module))
    except LookupError as error:
        raise LookupError(f"{name}: 'Raises: as {error}' names nothing") from None
    is_attribute = what in ("attribute", "property", "data")
    for start, end, listed, before in reversed(found):
        text = [before, ""] if before else []
        if not is_attribute:
            text.append("Raises:")
        for exceptions, description in listed:
            field = f":raises {exceptions}:" if is_attribute else f"    {exceptions}:"
            text.append(f"{field} {' '.join(description)}")
        lines[start:end] = [*text, ""]
    if is_attribute:
        # napoleon takes the first line up to a colon for a type, unless it is an empty comment.
        lines[:0] = ["..", ""]


def skip(app: Sphinx, what: str, name: str, obj: Any, skipped: bool, options: Any) -> bool | None:
    """Leave out constructors that users do not call."""
    if name == "__init__" and not (inspect.getdoc(obj) or "").startswith(_FOR_USERS):
        return True
    return None


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension."""
    app.connect("autodoc-process-docstring", expand, priority=400)
    app.connect("autodoc-skip-member", skip)
    return {"parallel_read_safe": True}
