"""`python -m benchmarks.lint_prose`: check the prose rules that a machine can see.

CONTRIBUTING.md has the rules. This check reads docstrings, comments and Markdown pages. It reports
docstrings that begin with a question word, words that leave the subject of a sentence open, names
that the code base has replaced, and lines of Markdown over 100 columns.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

MAX_COLUMNS = 100

# A docstring begins with a verb, or with the noun that it describes.
OPENINGS = re.compile(
    r"(What|Whether|Who|Whom|Whose|Where|How|Which|Why|So (many|long|much)|Those|Likewise)\b"
)

# Each of these words leaves open which task, peer, device, queue or count is meant.
VAGUE = re.compile(
    r"\b(nobody|somebody|whom|whoever|so many|so long(?! as)|likewise|lest|that is so)\b", re.I
)

# Names that have been replaced: docs/glossary.md has the terms that are used instead.
REPLACED = re.compile(
    r"\b(Berth|Outlook|Send_?Lanes?|Slot_?Ring|look_out|promptly|PromptFuture|hand_over|let_go|"
    r"knock|farewell|heir|StreamLoad|Outflow|AddressBook|Parcel|cut_short|is_due|after_all|"
    r"take_lanes|contenders?|Gatherer|AsyncBlock|AbortableBlock|turn_began|told_at)\b"
)

# The check and its tests, and the table of the old names.
EXEMPT = {"benchmarks/lint_prose.py", "tests/unit/test_lint_prose.py"}


class Finding(NamedTuple):
    """A place in a file that breaks a rule."""

    path: str
    line: int
    problem: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.problem}"


def check_text(path: str, line: int, text: str) -> Iterator[Finding]:
    """Yield vague words and replaced names in `text`, which begins at `line`."""
    for offset, part in enumerate(text.split("\n")):
        for pattern, problem in ((VAGUE, "name the subject instead of"), (REPLACED, "replaced")):
            for match in pattern.finditer(part):
                yield Finding(path, line + offset, f"{problem}: {match.group()!r}")


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each docstring, those of attributes included."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else []:
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield statement.lineno, text


def check_python(path: str, source: str) -> Iterator[Finding]:
    """Yield what breaks a rule in the docstrings, the comments and the names of a module."""
    for line, text in docstrings(ast.parse(source)):
        if OPENINGS.match(text.lstrip()):
            yield Finding(path, line, f"a docstring begins with {text.split()[0]!r}")
        yield from check_text(path, line, text)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield from check_text(path, token.start[0], token.string)
        elif token.type == tokenize.NAME and REPLACED.fullmatch(token.string):
            yield Finding(path, token.start[0], f"replaced: {token.string!r}")


def check_c(path: str, source: str) -> Iterator[Finding]:
    """Yield what breaks a rule in the comments, the strings and the names of a C file."""
    yield from check_text(path, 1, source)


def check_markdown(path: str, source: str) -> Iterator[Finding]:
    """Yield what breaks a rule in a page. Tables, code and lines with an address may be long."""
    is_code = False
    for number, line in enumerate(source.split("\n"), 1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        if is_code:
            continue
        may_be_long = line.startswith(("|", "    ")) or "http" in line
        if len(line) > MAX_COLUMNS and not may_be_long:
            yield Finding(path, number, f"{len(line)} columns, more than {MAX_COLUMNS}")
        yield from check_text(path, number, line)


CHECKS = {
    ".py": check_python,
    ".pyi": check_python,
    ".c": check_c,
    ".h": check_c,
    ".md": check_markdown,
}


def check_file(path: str, source: str) -> list[Finding]:
    """Return what breaks a rule in the file `path`, whose text is `source`."""
    check = CHECKS.get(Path(path).suffix)
    return list(check(path, source)) if check is not None and path not in EXEMPT else []


def main() -> int:
    """Check every file that git tracks. Return the exit code: 1 if a rule is broken."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        text=True,
        check=True,
    )
    paths = [path for path in listed.stdout.splitlines() if Path(path).is_file()]
    findings = [
        finding
        for path in paths
        if Path(path).suffix in CHECKS
        for finding in check_file(path, Path(path).read_text())
    ]
    for finding in findings:
        print(finding)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
