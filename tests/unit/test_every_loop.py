"""The tools that run tests on every loop. With a mistake in them, tests might never fail."""

from __future__ import annotations

import asyncio
import time

import loops
import pytest
import trio
import uvloop
from blocking import LIMIT, BlockingDetector

pytest_plugins = ["pytester"]

HOOKS = "from every_loop import pytest_generate_tests, pytest_pyfunc_call"
MARKERS = """
[pytest]
markers =
    loops(name, ...): run only on these
    may_block: the test blocks on purpose
"""


def run_tests(pytester: pytest.Pytester, code: str) -> tuple[dict[str, str], str]:
    """Run tests with the hooks of every_loop.py.

    Return their outcomes by name, and the output of pytest.
    """
    pytester.makeconftest(HOOKS)
    pytester.makeini(MARKERS)
    pytester.makepyfile(f"import asyncio, subprocess, time, loops, pytest, trio, uvloop\n{code}")
    result = pytester.runpytest_inprocess("-rA", "-p", "no:asyncio")
    reports = result.reprec.getreports("pytest_runtest_logreport")  # type: ignore[attr-defined]
    outcomes = {
        report.nodeid.partition("::")[2]: report.outcome
        for report in reports
        if report.when == "call"
    }
    return outcomes, str(result.stdout)


def on_each(test: str, outcome: str) -> dict[str, str]:
    """Return the same outcome of `test` for every loop."""
    return {f"{test}[{kind}]": outcome for kind in ("asyncio", "uvloop", "trio")}


# --- the loop of a test ---


def test_a_test_runs_on_every_loop_that_it_names(pytester: pytest.Pytester) -> None:
    outcomes, output = run_tests(
        pytester,
        """
ran = []

async def test_everywhere():
    await loops.sleep(0)
    ran.append(loops.kind())

@pytest.mark.loops("trio")
async def test_on_trio():
    assert trio.lowlevel.in_trio_task()

@pytest.mark.loops("asyncio")
async def test_on_asyncio():
    loop = asyncio.get_running_loop()
    assert not isinstance(loop, uvloop.Loop)
    assert loop.get_debug()

@pytest.mark.loops("uvloop")
async def test_on_uvloop():
    assert isinstance(asyncio.get_running_loop(), uvloop.Loop)

def test_without_a_loop():
    assert ran == ["asyncio", "uvloop", "trio"]
""",
    )
    assert outcomes == {
        **on_each("test_everywhere", "passed"),
        "test_on_trio[trio]": "passed",
        "test_on_asyncio[asyncio]": "passed",
        "test_on_uvloop[uvloop]": "passed",
        "test_without_a_loop": "passed",
    }, output


@pytest.mark.parametrize("kind", loops.KINDS)
def test_run_runs_on_the_loop_of_the_given_kind(kind: str) -> None:
    async def actual_kind() -> str:
        assert loops.kind() == kind
        if trio.lowlevel.in_trio_run():
            return "trio"
        is_uvloop = isinstance(asyncio.get_running_loop(), uvloop.Loop)
        return "uvloop" if is_uvloop else "asyncio"

    assert loops.run(kind, actual_kind) == kind


def test_a_test_fails_on_every_loop(pytester: pytest.Pytester) -> None:
    outcomes, output = run_tests(
        pytester,
        """
async def test_itself():
    assert loops.kind() == "none"

async def test_its_task():
    async def fail():
        await loops.sleep(0)
        pytest.fail("in a task")
    await loops.create_task(fail())
""",
    )
    assert outcomes == on_each("test_itself", "failed") | on_each("test_its_task", "failed")
    for kind in loops.KINDS:
        assert (
            f"FAILED test_a_test_fails_on_every_loop.py::test_its_task[{kind}] - Failed" in output
        )
    assert "ExceptionGroup" not in output


# --- detecting a blocked loop thread ---


def test_many_short_sleeps_in_one_iteration_block_no_loop(pytester: pytest.Pytester) -> None:
    outcomes, output = run_tests(
        pytester,
        """
async def test_busy():
    begin = time.monotonic()
    while time.monotonic() - begin < 1.5:
        time.sleep(0.005)
""",
    )
    assert outcomes == on_each("test_busy", "passed"), output


def test_a_test_that_blocks_its_loop_fails(pytester: pytest.Pytester) -> None:
    outcomes, output = run_tests(
        pytester,
        """
async def test_asleep():
    await loops.sleep(0.1)
    time.sleep(0.5)
    await loops.sleep(0.1)

async def test_asleep_from_begin_to_end():
    time.sleep(0.5)

async def test_a_task_is_asleep():
    async def block():
        time.sleep(0.5)
    await loops.create_task(block())

async def test_waiting_for_a_process():
    subprocess.run(["sleep", "0.6"], capture_output=True)

@pytest.mark.may_block
async def test_on_purpose():
    time.sleep(0.5)

async def test_in_a_thread():
    await loops.to_thread(time.sleep, 0.5)

async def test_in_the_loop():
    await loops.sleep(0.5)
""",
    )
    blocking = (
        "test_asleep",
        "test_asleep_from_begin_to_end",
        "test_a_task_is_asleep",
        "test_waiting_for_a_process",
    )
    healthy = ("test_on_purpose", "test_in_a_thread", "test_in_the_loop")
    expected: dict[str, str] = {}
    for name in blocking:
        expected |= on_each(name, "failed")
    for name in healthy:
        expected |= on_each(name, "passed")
    assert outcomes == expected, output
    # At the beginning of a line: on CI, the summary of pytest repeats the message.
    assert output.count("\nthe loop's thread was blocked for ") == len(blocking) * 3
    assert "time.sleep(0.5)" in output  # the place in the code


def tick_regularly(detector: BlockingDetector, count: int = 4) -> None:
    """Sleep and tick as the thread of a loop that is not blocked."""
    for _ in range(count):
        time.sleep(0.05)
        detector.tick()


def test_a_thread_that_sleeps_between_two_ticks_is_blocked() -> None:
    detector = BlockingDetector()
    tick_regularly(detector)
    time.sleep(2 * LIMIT)
    tick_regularly(detector)
    detector.stop()
    report = detector.report()
    assert report is not None
    assert "time.sleep(2 * LIMIT)" in report


def test_a_thread_that_works_is_not_blocked() -> None:
    detector = BlockingDetector()
    tick_regularly(detector)
    end = time.monotonic() + 2 * LIMIT
    while time.monotonic() < end:
        pass
    detector.tick()
    tick_regularly(detector, count=20)
    detector.stop()
    assert detector.report() is None


@pytest.mark.parametrize("kind", loops.KINDS)
def test_a_long_wait_of_the_loop_itself_is_no_blocking(kind: str) -> None:
    """The loop itself waits here: if the machine wakes it late, no call has blocked it."""
    detector = BlockingDetector()

    async def wait() -> None:
        await loops.sleep(3 * LIMIT)
        detector.tick()

    loops.run(kind, wait)
    detector.stop()
    assert detector.report() is None


# --- asyncio's functions on every loop ---


async def fail_soon() -> None:
    await loops.sleep(0)
    raise ZeroDivisionError


async def sleep_beside_a_failing_task() -> None:
    async with loops.TaskGroup() as tasks:
        tasks.create_task(fail_soon())
        await loops.sleep(60)


async def answer() -> int:
    await loops.sleep(0)
    return 42


@pytest.mark.parametrize("kind", loops.KINDS)
def test_errors_of_tasks_are_raised(kind: str) -> None:
    async def body() -> None:
        with pytest.raises(ZeroDivisionError):
            await loops.create_task(fail_soon())
        with pytest.raises(ZeroDivisionError):
            await loops.gather(answer(), fail_soon())
        found = await loops.gather(answer(), fail_soon(), return_exceptions=True)
        assert found[0] == 42
        assert isinstance(found[1], ZeroDivisionError)
        with pytest.raises(ExceptionGroup):
            await sleep_beside_a_failing_task()

    loops.run(kind, body)


@pytest.mark.parametrize("kind", loops.KINDS)
def test_results_of_tasks_are_returned(kind: str) -> None:
    async def body() -> int:
        task = loops.create_task(answer())
        assert not task.done()
        assert await task == 42
        await loops.wait([task])
        assert task.done()
        assert not task.cancelled()
        assert not task.cancel()
        async with loops.TaskGroup() as tasks:
            inner = tasks.create_task(answer())
        assert task.exception() is inner.exception() is None
        return task.result() + inner.result()

    assert loops.run(kind, body) == 84


@pytest.mark.parametrize("kind", loops.KINDS)
def test_timeouts_end_a_wait(kind: str) -> None:
    async def body() -> None:
        with pytest.raises(TimeoutError):
            async with loops.timeout(0.05):
                await loops.sleep(60)
        with pytest.raises(TimeoutError):
            await loops.wait_for(loops.make_event().wait(), 0.05)
        async with loops.timeout(60):
            assert await loops.wait_for(answer(), 60) == 42
        task = loops.create_task(loops.sleep(60))
        await loops.settle()
        assert task.cancel()
        with pytest.raises(loops.CancelledError):
            await task
        assert task.cancelled()

    loops.run(kind, body)
