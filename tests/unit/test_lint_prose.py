"""The check of the prose rules finds what breaks them, and nothing else."""

from __future__ import annotations

import pytest

from benchmarks.lint_prose import check_file


def problems(path: str, source: str) -> list[tuple[int, str]]:
    return [(finding.line, finding.problem) for finding in check_file(path, source)]


QUESTIONS = ["What", "Whether", "Who", "Where", "How", "Which", "So many"]
DOCSTRINGS = [
    '"""{}."""\n',
    'class A:\n    """{}."""\n',
    'class A:\n    x = 1\n    """{}."""\n',
    'class A:\n    def f(self) -> None:\n        """{}."""\n',
    'async def f() -> None:\n    """{}."""\n',
]


@pytest.mark.parametrize("word", QUESTIONS)
@pytest.mark.parametrize("source", DOCSTRINGS)
def test_a_docstring_that_begins_with_a_question_word_is_found(word: str, source: str) -> None:
    found = [text for _, text in problems("a.py", source.format(f"{word} it is"))]
    assert f"a docstring begins with {word.split()[0]!r}" in found


@pytest.mark.parametrize("word", ["nobody", "Somebody", "whom", "likewise", "so many", "lest"])
@pytest.mark.parametrize(
    ("path", "source"),
    [("a.py", "x = 1  # {}\n"), ("a.c", "/* {} */\n"), ("a.md", "It is {}.\n")],
)
def test_a_word_without_a_subject_is_found(word: str, path: str, source: str) -> None:
    expected = [(1, f"name the subject instead of: {word!r}")]
    assert problems(path, source.format(word)) == expected


X120 = "x" * 120


@pytest.mark.parametrize(
    ("path", "source", "found"),
    [
        ("a.py", "hand_over = 1\n", ["replaced: 'hand_over'"]),
        ("a.py", "# as hand_over() does\n", ["replaced: 'hand_over'"]),
        ("a.h", "int hand_over(void);\n", ["replaced: 'hand_over'"]),
        ("a.md", "`hand_over()`\n", ["replaced: 'hand_over'"]),
        ("a.md", f"{X120}\n", ["120 columns, more than 100"]),
        ("a.md", f"|{X120}\n", []),
        ("a.md", f"```\n{X120}\n```\n", []),
        ("a.md", f"    {X120}\n", []),
        ("a.md", f"https://{X120}\n", []),
        ("a.py", '"""Return the bytes posted, as long as there are any."""\n', []),
        ("a.py", 'text = "nobody"\n', []),
        ("a.txt", "nobody\n", []),
    ],
)
def test_replaced_names_and_long_lines_are_found(path: str, source: str, found: list[str]) -> None:
    assert problems(path, source) == [(1, text) for text in found]
