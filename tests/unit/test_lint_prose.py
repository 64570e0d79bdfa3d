"""The check of the prose rules finds what breaks them, and nothing else."""

from __future__ import annotations

import pytest

from benchmarks.lint_prose import check_file


def problems(path: str, source: str) -> list[tuple[int, str]]:
    return [(finding.line, finding.problem) for finding in check_file(path, source)]


@pytest.mark.parametrize("word", ["What", "Whether", "Who", "Where", "How", "Which", "So many"])
def test_a_docstring_that_begins_with_a_question_word_is_found(word: str) -> None:
    source = f'def f() -> None:\n    """{word} it is."""\n'
    assert (2, f"a docstring begins with {word.split()[0]!r}") in problems("a.py", source)


@pytest.mark.parametrize(
    "source",
    [
        '"""Whether."""\n',
        'class A:\n    """How."""\n',
        'class A:\n    x = 1\n    """Where."""\n',
        'class A:\n    def f(self) -> None:\n        """Who."""\n',
        'async def f() -> None:\n    """Which."""\n',
    ],
)
def test_docstrings_of_modules_classes_attributes_and_functions_are_read(source: str) -> None:
    assert len(problems("a.py", source)) == 1


@pytest.mark.parametrize("word", ["nobody", "Somebody", "whom", "likewise", "so many", "lest"])
@pytest.mark.parametrize(
    ("path", "source"),
    [("a.py", "x = 1  # {}\n"), ("a.c", "/* {} */\n"), ("a.md", "It is {}.\n")],
)
def test_a_word_without_a_subject_is_found(word: str, path: str, source: str) -> None:
    assert problems(path, source.format(word)) == [
        (1, f"name the subject instead of: {word!r}"),
    ]


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("a.py", "hand_over = 1\n"),
        ("a.py", "# as hand_over() does\n"),
        ("a.h", "int hand_over(void);\n"),
        ("a.md", "`hand_over()`\n"),
    ],
)
def test_a_replaced_name_is_found(path: str, source: str) -> None:
    assert problems(path, source) == [(1, "replaced: 'hand_over'")]


def test_a_long_line_of_a_page_is_found() -> None:
    assert problems("a.md", "x" * 101 + "\n") == [(1, "101 columns, more than 100")]


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("a.md", "|" + "x" * 120 + "\n"),
        ("a.md", "```\n" + "x" * 120 + "\n```\n"),
        ("a.md", "    " + "x" * 120 + "\n"),
        ("a.md", "https://" + "x" * 120 + "\n"),
        ("a.py", '"""Return the bytes posted, as long as there are any."""\n'),
        ("a.py", 'text = "nobody"\n'),
        ("a.txt", "nobody\n"),
    ],
)
def test_text_within_the_rules_is_accepted(path: str, source: str) -> None:
    assert problems(path, source) == []
