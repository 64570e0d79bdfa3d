"""Python sources as syntax trees."""

from __future__ import annotations

import ast
import functools
import gc


@functools.cache
def parse(source: str) -> ast.Module:
    """Return the syntax tree of `source`. It is cached: do not change it.

    Garbage collection is off meanwhile. In Python 3.11, a destructor that runs inside ast.parse()
    and warns has its traceback printed with the help of ast.parse(). The outer call then fails with
    `SystemError: AST constructor recursion depth mismatch`.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(source)
    finally:
        if was_enabled:
            gc.enable()
