"""Hooks that run tests on every loop: asyncio (in debug mode), asyncio with uvloop, and trio.

If the conftest of a directory has these hooks, each of its `async def test_...` runs on loops that
selection.py chooses. A test that is marked `loops("asyncio", ...)` runs on these only. A test fails
if it blocks the thread of its loop, unless it is marked `may_block`.
"""

from __future__ import annotations

import inspect
import linecache

import loops
import machine
import pytest
import selection
from blocking import INTERVAL, BlockingDetector

# The time limit of a test, in seconds. Few tests take more than one, even in an emulated machine.
TEST_LIMIT = 450.0

# asyncio's debug mode often checks every source file on the stack for changes. They do not change
# while tests run.
linecache.checkcache = lambda filename=None: None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if inspect.iscoroutinefunction(metafunc.function):
        metafunc.fixturenames.append("loop_kind")
    selection.parametrize(metafunc)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if machine.simulated is not None or not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    kind = str(pyfuncitem.callspec.params["loop_kind"])
    names = inspect.signature(pyfuncitem.obj).parameters
    arguments = {name: pyfuncitem.funcargs[name] for name in names}
    report: str | None = None

    async def body() -> None:
        nonlocal report
        assert loops.kind() == kind
        detector = BlockingDetector()
        ticking = loops.create_task(_tick(detector))
        try:
            async with loops.timeout(TEST_LIMIT):
                await pyfuncitem.obj(**arguments)
        finally:
            detector.tick()
            ticking.cancel()
            detector.stop()
            report = detector.report()

    loops.run(kind, body)
    if report is not None and pyfuncitem.get_closest_marker("may_block") is None:
        pytest.fail(report, pytrace=False)
    return True


async def _tick(detector: BlockingDetector) -> None:
    while True:
        await loops.sleep(INTERVAL)
        detector.tick()
