"""Python sources as syntax trees."""

from __future__ import annotations

import ast
import functools
import gc


@functools.cache
def parse(source: str) -> ast.Module:
    """The tree of a source text, to be looked at and not to be changed.

    The collector rests meanwhile. In Python 3.11 a destructor that it runs inside of ast.parse(),
    and that warns, has its traceback printed by help of ast.parse(): the outer one then fails with
    `SystemError: AST constructor recursion depth mismatch`.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(source)
    finally:
        if was_enabled:
            gc.enable()
