"""DatagramOptions refuse what cannot be."""

from __future__ import annotations

import dataclasses

import pytest

from aiordma import DatagramOptions
from aiordma.datagrams.options import _RANGES
from aiordma.options import DATAGRAM_LIMITS


def test_the_defaults_are_allowed() -> None:
    options = DatagramOptions()
    assert (options.send_depth, options.recv_depth, options.max_message_size) == (64, 128, None)
    assert options.multicast_loopback


@pytest.mark.parametrize(("name", "low", "high"), _RANGES)
def test_both_ends_of_a_range_are_allowed(name: str, low: float, high: float) -> None:
    for value in (low, high):
        assert getattr(DatagramOptions(**{name: value}), name) == value


@pytest.mark.parametrize(("name", "low", "high"), _RANGES)
def test_what_is_beyond_a_range_is_refused(name: str, low: float, high: float) -> None:
    for value in (low - 1, high + 1, float("nan")):
        with pytest.raises(ValueError, match=f"^{name} is {value}, not between {low} and {high}$"):
            DatagramOptions(**{name: value})


def test_every_number_has_a_range() -> None:
    numbers = {field.name for field in dataclasses.fields(DatagramOptions)}
    assert numbers - {name for name, _, _ in _RANGES} == {"multicast_loopback"}


def test_how_much_private_data_fits() -> None:
    assert (DATAGRAM_LIMITS.connect, DATAGRAM_LIMITS.accept, DATAGRAM_LIMITS.reject) == (
        180,
        136,
        136,
    )
