"""The documentation site writes out the exceptions that `Raises: as f()` stands for."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from docs._ext.raises import expand


class Api:
    """Functions that document their exceptions, by themselves or by reference."""

    def plain(self) -> None:
        """Do it.

        Raises:
            ValueError: it is wrong,
                and this line goes on.
            OSError, TypeError: it failed.
        """

    def as_plain(self) -> None:
        """Do it twice. Raises: as plain()."""

    def all_but_one(self) -> None:
        """Do it.

        Raises: as plain(), except for ValueError.
        """

    def and_another(self) -> None:
        """Do it.

        Raises: as as_plain(), and

            KeyError: it is missing.
        """

    def others(self) -> None:
        """Do it.

        Raises:
            KeyError: it is missing.
            Others: as all_but_one(), and as aiordma.connect().
        """

    def wrong(self) -> None:
        """Do it. Raises: as missing_function()."""

    @property
    def attribute(self) -> int:
        """The number: of something.

        Raises:
            ValueError: there is none.
        """
        return 1


def expanded(name: str, what: str = "method") -> list[str]:
    """Return the lines that napoleon gets for the docstring of Api.NAME."""
    found = inspect.getattr_static(Api, name)
    lines = (inspect.getdoc(found) or "").split("\n")
    nothing: Any = None
    expand(nothing, what, f"Api.{name}", found, nothing, lines)
    return [line for line in lines if line]


def test_references_are_written_out() -> None:
    plain = [
        "Do it.",
        "Raises:",
        "    ValueError: it is wrong, and this line goes on.",
        "    OSError, TypeError: it failed.",
    ]
    assert expanded("plain") == plain
    assert expanded("as_plain") == ["Do it twice.", *plain[1:]]
    assert expanded("all_but_one") == ["Do it.", "Raises:", plain[3]]
    assert expanded("and_another") == [*plain, "    KeyError: it is missing."]
    lines = expanded("others")
    assert lines[:4] == ["Do it.", "Raises:", "    KeyError: it is missing.", plain[3]]
    assert any(line.startswith("    Rejected: ") for line in lines)


def test_a_reference_to_a_name_that_does_not_exist_fails_the_build() -> None:
    with pytest.raises(LookupError, match=r"Api\.wrong: .*missing_function"):
        expanded("wrong")


def test_the_first_line_of_an_attribute_is_not_read_as_a_type() -> None:
    lines = ["..", "The number: of something.", ":raises ValueError: there is none."]
    assert expanded("attribute", "property") == lines
