"""The diagram of the states in docs/streams.md equals the table in aiordma/streams/states.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from aiordma.streams.states import TRANSITIONS, StreamEvent, StreamState, Transition
from aiordma.streams.wire import Control

E, S = StreamEvent, StreamState
Table = Mapping[StreamState, Mapping[StreamEvent, Transition]]

PAGE = Path(__file__).parents[2] / "docs/streams.md"


def diagram(table: Table) -> str:
    """Return a mermaid block with an arrow for each entry, in the order of the table.

    An arrow has the label `event / send control message`. The diagram begins at the first state and
    ends at the states without entries.
    """
    return "\n".join(["```mermaid", "stateDiagram-v2", *_arrows(table), "```"])


def _arrows(table: Table) -> Iterator[str]:
    yield f"    [*] --> {next(iter(table)).name}"
    for state, row in table.items():
        for event, (following, control) in row.items():
            sent = "" if control is None else f" / send {control.name}"
            yield f"    {state.name} --> {following.name}: {event.name}{sent}"
        if not row:
            yield f"    {state.name} --> [*]"


def test_the_page_shows_the_table() -> None:
    block = diagram(TRANSITIONS)
    assert f"\n{block}\n" in PAGE.read_text(), f"docs/streams.md does not contain:\n{block}"


def test_there_is_no_other_diagram_on_the_page() -> None:
    assert PAGE.read_text().count("```mermaid") == 1


def test_a_table_gives_its_diagram() -> None:
    table = {
        S.OPEN: {E.LEAVE: Transition(S.ENDED, Control.DISCONNECT), E.LOST: Transition(S.BROKEN)},
        S.ENDED: dict[StreamEvent, Transition](),
    }
    assert diagram(table).splitlines() == [
        "```mermaid",
        "stateDiagram-v2",
        "    [*] --> OPEN",
        "    OPEN --> ENDED: LEAVE / send DISCONNECT",
        "    OPEN --> BROKEN: LOST",
        "    ENDED --> [*]",
        "```",
    ]


@pytest.mark.parametrize("state", StreamState)
def test_every_entry_is_one_arrow(state: StreamState) -> None:
    lines = diagram(TRANSITIONS).splitlines()
    from_here = [line for line in lines if line.startswith(f"    {state.name} --> ")]
    assert len(from_here) == max(1, len(TRANSITIONS[state]))
