"""run(): a coroutine on the loop of that name."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable, Coroutine
from typing import TypeVar

T = TypeVar("T")


def run(loop: str, main: Callable[[], Coroutine[object, None, T]]) -> T:
    """Run `main()` on asyncio, uvloop or trio, set up as their users set them up."""
    if loop == "trio":
        found: T = importlib.import_module("trio").run(main)
        return found
    factory = importlib.import_module("uvloop").new_event_loop if loop == "uvloop" else None
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main())
