"""DatagramOptions: defaults, ranges and limits."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from aiordma import DatagramOptions
from aiordma.datagrams.options import _RANGES


@pytest.mark.parametrize(("name", "low", "high"), _RANGES)
def test_both_ends_of_a_range_are_allowed(name: str, low: float, high: float) -> None:
    for value in (low, high):
        options: dict[str, Any] = {name: value}
        assert getattr(DatagramOptions(**options), name) == value


@pytest.mark.parametrize(("name", "low", "high"), _RANGES)
def test_a_value_outside_its_range_is_refused(name: str, low: float, high: float) -> None:
    for value in (low - 1, high + 1, float("nan")):
        options: dict[str, Any] = {name: value}
        with pytest.raises(ValueError, match=f"^{name} is {value}, not between {low} and {high}$"):
            DatagramOptions(**options)


def test_every_number_has_a_range() -> None:
    numbers = {field.name for field in dataclasses.fields(DatagramOptions)}
    assert numbers - {name for name, _, _ in _RANGES} == {"multicast_loopback"}
