"""The tool of `make mutation` that changes what mutmut leaves out."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from benchmarks.mutation import Mutant, changed_code, edits, main, mutants

MODULE = """
LIMIT = 4
NAME, FLAG = "name", True
SET = frozenset({_S.OPEN, _S.ENDED})
TABLE: dict = {
    _S.OPEN: {_E.LEAVE: Transition(_S.ENDED, Control.DISCONNECT), _E.LOST: _S.ENDED},
}

class Example:
    number: int = 7

    @property
    def room(self) -> int:
        return min(self.left + 1, 2) if not self.full and self.left >= 0 else 0

    @staticmethod
    def changed_by_mutmut() -> int:
        return 1 + 1

def also_by_mutmut() -> int:
    return LIMIT + 1
"""

CHANGES = """
LIMIT: 5 for 4
SET: removed _S.OPEN
SET: removed _S.ENDED
TABLE[_S.OPEN]: removed _E.LEAVE (to Transition(_S.ENDED, Control.DISCONNECT))
TABLE[_S.OPEN][_E.LEAVE]: _S.OPEN for _S.ENDED
TABLE[_S.OPEN][_E.LEAVE]: removed Control.DISCONNECT
TABLE[_S.OPEN]: removed _E.LOST (to _S.ENDED)
TABLE[_S.OPEN][_E.LOST]: _S.OPEN for _S.ENDED
Example.number: 8 for 7
Example.room: returns None
Example.room: 0 if not self.full and self.left >= 0 else min(self.left + 1, 2) for \
min(self.left + 1, 2) if not self.full and self.left >= 0 else 0
Example.room: not self.full or self.left >= 0 for not self.full and self.left >= 0
Example.room: max for min
Example.room: self.full for not self.full
Example.room: self.left > 0 for self.left >= 0
Example.room: self.left - 1 for self.left + 1
Example.room: 1 for 0
Example.room: 3 for 2
Example.room: 2 for 1
Example.room: 1 for 0
""".strip().splitlines()


def test_what_mutmut_leaves_out_is_changed() -> None:
    assert sorted(edit.text for edit in edits(ast.parse(MODULE))) == sorted(CHANGES)


def test_each_change_is_made_alone(tmp_path: Path) -> None:
    """Each one gives another module, which can be compiled."""
    path = tmp_path / "example.py"
    path.write_text(MODULE)
    original = ast.unparse(ast.parse(MODULE))
    changed = set()
    for number in range(len(CHANGES)):
        changed_code(path, number)
        tree = ast.parse(MODULE)
        list(edits(tree))[number].apply()
        changed.add(ast.unparse(tree))
    assert len(changed) == len(CHANGES)
    assert original not in changed


def test_the_changed_module_is_what_the_tests_import() -> None:
    """A test of the states fails if FINAL lacks a state; one that does not import them tells it."""
    path, tests = "aiordma/cm/states.py", ("tests/unit/test_cm_states.py",)
    (change,) = [one for one in mutants({path: list(tests)}) if one.text.endswith(" _S.REMOVED")]
    assert not change.survives()
    not_imported = Mutant("benchmarks/matrix.py", 0, 1, "", ("tests/unit/test_values.py",))
    with pytest.raises(RuntimeError, match="do not import it"):
        not_imported.survives()


@pytest.mark.parametrize("survives", [True, False])
def test_an_outcome_that_is_not_expected_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], survives: bool
) -> None:
    monkeypatch.setattr(Mutant, "survives", lambda _: survives)
    assert main(["*CONNECTING*REJECTED*", "*FINAL*"]) == 1
    printed = capsys.readouterr().out
    assert ("FINAL: removed _S.CLOSED: no test notices it" in printed) == survives
    assert ("_E.REJECTED (to _S.FAILED): not equivalent" in printed) != survives
    assert "8 changes in 0 s" in printed
