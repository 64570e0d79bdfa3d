"""Link every public name by the module that users import it from, and miss none of them.

`aiordma.Connection` is defined in `aiordma.messages.connection`. Type hints name the latter; the
reference documents the former. This extension resolves one to the other, and fails the build if a
name in `__all__` of a public module is documented nowhere.
"""

from __future__ import annotations

import importlib
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util import logging

logger = logging.getLogger(__name__)

MODULES = (
    "aiordma",
    "aiordma.asyncio",
    "aiordma.anyio",
    "aiordma.trio",
    "aiordma.dask",
    "aiordma.rdmacm",
    "aiordma.verbs",
)


def homes() -> dict[str, str]:
    """Return the public name of each object, by the name under which it is defined."""
    found: dict[str, str] = {}
    for name in MODULES:
        module = importlib.import_module(name)
        for public in module.__all__:
            value = getattr(module, public)
            defined = getattr(value, "__module__", None)
            if defined is not None:
                qualified = f"{defined}.{getattr(value, '__qualname__', public)}"
                found.setdefault(qualified, f"{name}.{public}")
    return found


HOMES = homes()


def resolve(app: Sphinx, env: Any, node: Any, content: nodes.TextElement) -> Any:
    """Resolve a reference by the public name of its target."""
    if node.get("refdomain") != "py":
        return None
    target = node.get("reftarget", "")
    for length in range(target.count(".") + 1):
        parts = target.rsplit(".", length)
        public = HOMES.get(parts[0])
        if public is not None:
            name = ".".join([public, *parts[1:]])
            domain = env.get_domain("py")
            return domain.resolve_xref(
                env, node["refdoc"], app.builder, node["reftype"], name, node, content
            ) or domain.resolve_xref(env, node["refdoc"], app.builder, "obj", name, node, content)
    return None


def check(app: Sphinx, env: Any) -> None:
    """Warn of public names that no page documents."""
    documented = set(env.get_domain("py").objects)
    for name in MODULES:
        for public in importlib.import_module(name).__all__:
            value = getattr(importlib.import_module(name), public)
            qualified = f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}"
            if f"{name}.{public}" not in documented and HOMES.get(qualified) not in documented:
                logger.warning("%s.%s is documented on no page", name, public)


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension."""
    app.connect("missing-reference", resolve)
    app.connect("env-check-consistency", check)
    return {"parallel_read_safe": True}
