"""Each sanitizer of `make sanitize` is in each C module, and reports mistakes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from simulator import world

SANITIZER = os.environ.get("AIORDMA_SANITIZER", "")
NATIVE = Path(__file__).parents[2] / "aiordma" / "_native"
PROLOGUE = """
import threading
from simulator.queues import Queues
from aiordma._native import ffi, lib

def chain(capacity):
    links = ffi.new("struct aiordma_link[]", capacity)
    return ffi.new("struct aiordma_chain *", (0, capacity, links)), links

def add(chain):
    lib.aiordma_add_link(chain, 0, 0, 0, 0, 0, 0, 0, 0, 0)

def thread():
    for _ in range(50000):
        add(shared)
"""
WRITTEN_AFTER_FREE = "only, links = chain(1); del links; add(only)"
OUT_OF_BOUNDS = "only, links = chain(1); add(only); add(only)"
MISALIGNED = """
only, links = chain(2)
only.links = ffi.cast("struct aiordma_link *", ffi.cast("char *", links) + 1)
add(only)
"""
READ_BY_THE_DEVICE_AFTER_FREE = """
verbs, data = Queues(), ffi.new("char[]", 99)
freed, cell = ffi.cast("char *", data), ffi.cast("struct ibv_qp **", verbs.qp_cell)
del data
lib.aiordma_post_send_inline(cell, 1, freed, 99, 0, -1)
"""
DATA_RACE = """
shared, links = chain(100000)
threads = [threading.Thread(target=thread) for _ in range(2)]
[one.start() for one in threads]
[one.join() for one in threads]
"""
MISTAKES = {
    "asan": [
        (WRITTEN_AFTER_FREE, "heap-use-after-free"),
        (OUT_OF_BOUNDS, "heap-buffer-overflow"),
        (MISALIGNED, "misaligned address"),
        (READ_BY_THE_DEVICE_AFTER_FREE, "heap-use-after-free"),
    ],
    "tsan": [(DATA_RACE, "data race")],
}
pytestmark = pytest.mark.skipif(not SANITIZER, reason="`make sanitize` runs it")


def test_each_module_has_the_sanitizer() -> None:
    modules = [*NATIVE.glob("*.so"), Path(str(world._module.__file__))]
    assert len(modules) == 4
    assert [path for path in modules if f"__{SANITIZER}_".encode() not in path.read_bytes()] == []


@pytest.mark.parametrize(("code", "report"), MISTAKES.get(SANITIZER, []))
def test_a_mistake_is_reported(code: str, report: str) -> None:
    options = {f"{name}_OPTIONS": "" for name in ("ASAN", "UBSAN", "TSAN")}
    done = subprocess.run(
        [sys.executable, "-c", PROLOGUE + code],
        env={**os.environ, **options},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert report in done.stderr
