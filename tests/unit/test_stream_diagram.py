"""The diagram of a stream's life in docs/streams.md is the one that its table gives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from aiordma.streams.states import TRANSITIONS, Transition, StreamEvent, StreamState
from aiordma.streams.wire import Control

E, S = StreamEvent, StreamState
Table = Mapping[StreamState, Mapping[StreamEvent, Transition]]

PAGE = Path(__file__).parents[2] / "docs/streams.md"


def diagram(moves: Table) -> str:
    """A mermaid block: an arrow for each entry, in the table's order, with `event / what is said`.

    The first state is where it begins, those that nothing leads out of are where it ends.
    """
    return "\n".join(["```mermaid", "stateDiagram-v2", *_arrows(moves), "```"])


def _arrows(moves: Table) -> Iterator[str]:
    yield f"    [*] --> {next(iter(moves)).name}"
    for state, row in moves.items():
        for event, (following, say) in row.items():
            said = "" if say is None else f" / say {say.name}"
            yield f"    {state.name} --> {following.name}: {event.name}{said}"
        if not row:
            yield f"    {state.name} --> [*]"


def test_the_page_shows_the_table() -> None:
    block = diagram(TRANSITIONS)
    assert f"\n{block}\n" in PAGE.read_text(), f"docs/streams.md does not contain:\n{block}"


def test_there_is_no_other_diagram_on_the_page() -> None:
    assert PAGE.read_text().count("```mermaid") == 1


def test_how_a_table_is_drawn() -> None:
    moves = {
        S.OPEN: {E.LEAVE: Transition(S.ENDED, Control.DISCONNECT), E.LOST: Transition(S.BROKEN)},
        S.ENDED: dict[StreamEvent, Transition](),
    }
    assert diagram(moves).splitlines() == [
        "```mermaid",
        "stateDiagram-v2",
        "    [*] --> OPEN",
        "    OPEN --> ENDED: LEAVE / say DISCONNECT",
        "    OPEN --> BROKEN: LOST",
        "    ENDED --> [*]",
        "```",
    ]


@pytest.mark.parametrize("state", StreamState)
def test_every_entry_is_one_arrow(state: StreamState) -> None:
    lines = diagram(TRANSITIONS).splitlines()
    from_here = [line for line in lines if line.startswith(f"    {state.name} --> ")]
    assert len(from_here) == max(1, len(TRANSITIONS[state]))
