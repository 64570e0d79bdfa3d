"""Types of arguments for argparse: numbers within limits."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable


def integer(low: int, high: int) -> Callable[[str], int]:
    """Return a type of argument: whole numbers from `low` to `high`."""

    def number(text: str) -> int:
        if not (text.isdecimal() and low <= int(text) <= high):
            raise argparse.ArgumentTypeError(f"{text} is not a number from {low} to {high}")
        return int(text)

    return number


def seconds(low: float, high: float) -> Callable[[str], float]:
    """Return a type of argument: times in seconds, from `low` to `high`."""

    def number(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text} is not from {low:g} to {high:g} seconds")
        return value

    return number
