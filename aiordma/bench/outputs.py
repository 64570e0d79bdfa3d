"""Where the report goes: found out before anything runs, written when it has."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

from aiordma.bench.errors import BenchError
from aiordma.bench.suite import Results


def checked(json_file: str | None, directory: str | None) -> tuple[Path | None, Path | None]:
    """The file and the directory to write to, which exist now.

    Raises:
        BenchError: one cannot be written to, or matplotlib is not installed for the other.
    """
    if directory is not None and not has_matplotlib():
        raise BenchError("--plot needs matplotlib: pip install 'aiordma[bench]'")
    try:
        if json_file is not None:
            with Path(json_file).open("a"):
                pass
        if directory is not None:
            Path(directory).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BenchError(f"{error.filename} cannot be written: {error.strerror}") from error
    if directory is not None and not os.access(directory, os.W_OK):
        raise BenchError(f"{directory} cannot be written to")
    return Path(json_file) if json_file else None, Path(directory) if directory else None


def has_matplotlib() -> bool:
    """Whether diagrams can be drawn."""
    return importlib.util.find_spec("matplotlib") is not None


def write_json(path: Path, whole: dict[str, object]) -> None:
    """Write the report.

    Raises:
        BenchError: it cannot be written after all.
    """
    try:
        path.write_text(json.dumps(whole, indent=2) + "\n")
    except OSError as error:
        raise BenchError(f"{path} cannot be written: {error.strerror}") from error


def draw(results: Results, directory: Path) -> None:
    """Draw the diagrams. Raises: as write_json()."""
    from aiordma.bench.plot import draw_all

    try:
        draw_all(results.cases, directory)
    except OSError as error:
        raise BenchError(f"{directory} cannot be written to: {error.strerror}") from error
