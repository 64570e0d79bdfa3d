"""The documentation site: `make docs` builds it, and every warning is an error."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "_ext"))
sys.path.insert(0, str(HERE.parent))

project = "aiordma"
author = "the aiordma developers"
copyright = author
html_title = "aiordma"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "raises",  # before napoleon, which reads the sections that it writes
    "sphinx.ext.napoleon",
    "sphinxcontrib.mermaid",
    "public_names",
]
exclude_patterns = ["_build", "performance"]
source_suffix = {".md": "markdown"}

html_theme = "furo"
html_copy_source = False
templates_path: list[str] = []

nitpicky = True
# Without a network there is no inventory of Python's own documentation to link to.
nitpick_ignore_regex = [
    ("py:.*", r"prometheus_client\..*"),
    ("py:.*", r"distributed\..*"),
    (
        "py:.*",
        r"(typing|typing_extensions|collections|contextlib|enum|asyncio|trio|anyio|ssl|socket)\..*",
    ),
    ("py:.*", r"(bytes|bytearray|memoryview|str|int|float|bool|None|object|slice|tuple|list|dict)"),
    ("py:.*", r"(set|frozenset|type|[A-Z]\w*(Error|Warning)|StopAsyncIteration)"),
    # Pointers to C structs, and types of the library that have no page.
    ("py:.*", r"(Ibv\w+|\w+Ptr|\w+Out|QpCell|CmRoute|SaPathRec|\w+Array)"),
    ("py:.*", r"aiordma\._native\..*|aiordma\.\w+\.\w+\.[A-Z]|Segment"),
    ("py:.*", r"aiordma\.(datagrams\.origin\.Origin|loop\.protocol\.Loop)"),
    ("py:.*", r"aiordma\.memory\.registrar\.Registrar"),
    ("py:.*", r"aiordma\.message_streams\.(wire\.Hello|outgoing\.\w+|exchange\.\w+)"),
    ("py:.*", r"aiordma\.asyncio\.server\.ListeningAddress"),
    ("py:.*", r"aiordma\.prometheus\.collector\.HasStats"),
    ("py:exc", r"EndOfStream"),
    ("py:.*", r"(Buffer|Self|ipaddress\..*|types\..*|BaseException|Ellipsis|\.\.\.)"),
]

myst_enable_extensions = ["colon_fence", "deflist", "fieldlist"]
myst_heading_anchors = 4
myst_fence_as_directive = ["mermaid"]

autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints = "signature"
autodoc_class_signature = "separated"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
python_use_unqualified_type_names = True
