"""The mermaid diagram of a table of states, as a page of docs/ shows it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import TypeVar

from helpers import ROOT

S = TypeVar("S", bound=Enum)


def _lines(table: Mapping[S, Sequence[tuple[S, str]]]) -> Iterator[str]:
    yield from ("```mermaid", "stateDiagram-v2", f"    [*] --> {next(iter(table)).name}")
    for state, row in table.items():
        for following, text in row:
            yield f"    {state.name} --> {following.name}: {text}"
        if not row:
            yield f"    {state.name} --> [*]"
    yield "```"


def check_diagram(page: str, table: Mapping[S, Sequence[tuple[S, str]]]) -> None:
    """Check that the page shows the diagram of a table.

    The table has the states that can follow each state, each with the text at the arrow to it.
    """
    text, block = (ROOT / page).read_text(), "\n".join(_lines(table))
    assert f"\n{block}\n" in text, f"{page} does not contain:\n{block}"
