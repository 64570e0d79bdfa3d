"""Runs a test on every loop: asyncio (in debug mode), asyncio with uvloop, and trio.

Each `async def test_...` of a folder whose conftest has these hooks runs once on each. Those that
are marked `loops("asyncio", ...)` run on these only. A test fails in which the loop's thread was
blocked, unless it is marked `may_block`.
"""

from __future__ import annotations

import inspect
import linecache

import loops
import pytest
from blocking import INTERVAL, Heart

# asyncio's debug mode asks for the age of every source file on the stack, again and again; they do
# not change while tests run.
linecache.checkcache = lambda filename=None: None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if inspect.iscoroutinefunction(metafunc.function):
        marker = metafunc.definition.get_closest_marker("loops")
        metafunc.fixturenames.append("loop_kind")
        metafunc.parametrize("loop_kind", loops.KINDS if marker is None else marker.args)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    kind = str(pyfuncitem.callspec.params["loop_kind"])
    names = inspect.signature(pyfuncitem.obj).parameters
    arguments = {name: pyfuncitem.funcargs[name] for name in names}
    complaint: str | None = None

    async def body() -> None:
        nonlocal complaint
        assert loops.kind() == kind
        heart = Heart()
        beating = loops.create_task(_beat(heart))
        try:
            await pyfuncitem.obj(**arguments)
        finally:
            heart.beat()
            beating.cancel()
            heart.stop()
            complaint = heart.complaint()

    loops.run(kind, body)
    if complaint is not None and pyfuncitem.get_closest_marker("may_block") is None:
        pytest.fail(complaint, pytrace=False)
    return True


async def _beat(heart: Heart) -> None:
    while True:
        await loops.sleep(INTERVAL)
        heart.beat()
