"""The tools that run tests on every loop. With a mistake in them, tests might never fail."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any
from unittest import mock

import blocking
import every_loop
import loops
import machine
import pytest
from blocking import BlockingDetector

from aiordma.enums import TransportType
from aiordma.rdmacm import DeviceAddress

pytest_plugins = ["pytester"]

HOOKS = "from every_loop import pytest_generate_tests, pytest_pyfunc_call"
MARKERS = "[pytest]\nmarkers =\n    loops\n    may_block\n    soft_device\n"
on_each_loop = pytest.mark.parametrize("kind", loops.KINDS)


def run_tests(pytester: pytest.Pytester, code: str) -> tuple[dict[str, str], str]:
    """Run tests with the hooks of every_loop.py.

    Return their outcomes by name, and the output of pytest.
    """
    pytester.makeconftest(HOOKS)
    pytester.makeini(MARKERS)
    pytester.makepyfile(f"import asyncio, subprocess, time, loops, pytest, trio, uvloop\n{code}")
    with mock.patch.object(machine, "simulated", None):
        result = pytester.runpytest_inprocess(
            "-rA", "-p", "no:asyncio", "-p", "no:hypothesispytest"
        )
    reports = result.reprec.getreports("pytest_runtest_logreport")  # type: ignore[attr-defined]
    calls = [report for report in reports if report.when == "call"]
    outcomes = {report.nodeid.partition("::")[2]: report.outcome for report in calls}
    return outcomes, str(result.stdout)


def on_each(test: str, outcome: str) -> dict[str, str]:
    """Return the same outcome of `test` for every loop."""
    return {f"{test}[{kind}]": outcome for kind in loops.KINDS}


def test_a_test_runs_and_fails_on_every_loop_that_it_names(pytester: pytest.Pytester) -> None:
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

async def test_itself():
    assert loops.kind() == "none"

async def test_its_task():
    async def fail():
        await loops.sleep(0)
        pytest.fail("in a task")
    await loops.create_task(fail())
""",
    )
    assert outcomes == {
        **on_each("test_everywhere", "passed"),
        **on_each("test_itself", "failed"),
        **on_each("test_its_task", "failed"),
        "test_on_trio[trio]": "passed",
        "test_on_asyncio[asyncio]": "passed",
        "test_on_uvloop[uvloop]": "passed",
        "test_without_a_loop": "passed",
    }, output
    assert output.count("E       Failed: in a task") == 3
    assert "ExceptionGroup" not in output


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the detector look at the thread more often, and allow less sleep."""
    monkeypatch.setattr(blocking, "INTERVAL", 0.0125)
    monkeypatch.setattr(every_loop, "INTERVAL", 0.0125)
    monkeypatch.setattr(blocking, "LIMIT", 0.075)


@pytest.mark.usefixtures("quick")
def test_a_test_that_blocks_its_loop_fails(pytester: pytest.Pytester) -> None:
    """Time is the subject."""
    outcomes, output = run_tests(
        pytester,
        """
async def test_asleep():
    await loops.sleep(0.1)
    time.sleep(0.4)
    await loops.sleep(0.1)

@pytest.mark.loops("asyncio")
async def test_asleep_from_begin_to_end():
    time.sleep(0.4)

@pytest.mark.loops("trio")
async def test_a_task_is_asleep():
    async def block():
        time.sleep(0.4)
    await loops.create_task(block())

@pytest.mark.loops("uvloop")
async def test_waiting_for_a_process():
    subprocess.run(["sleep", "0.4"], capture_output=True)

@pytest.mark.may_block
@pytest.mark.loops("uvloop")
async def test_on_purpose():
    time.sleep(0.4)

@pytest.mark.loops("trio")
async def test_in_a_thread():
    await loops.to_thread(time.sleep, 0.4)

@pytest.mark.loops("asyncio")
async def test_short_sleeps_in_one_iteration():
    for _ in range(80):
        time.sleep(0.005)

@pytest.mark.loops("trio")
async def test_at_work():
    begin = time.monotonic()
    while time.monotonic() - begin < 0.4:
        pass
""",
    )
    assert outcomes == {
        **on_each("test_asleep", "failed"),
        "test_asleep_from_begin_to_end[asyncio]": "failed",
        "test_a_task_is_asleep[trio]": "failed",
        "test_waiting_for_a_process[uvloop]": "failed",
        "test_on_purpose[uvloop]": "passed",
        "test_in_a_thread[trio]": "passed",
        "test_short_sleeps_in_one_iteration[asyncio]": "passed",
        "test_at_work[trio]": "passed",
    }, output
    # At the beginning of a line: on CI, the summary of pytest repeats the message.
    assert output.count("\nthe loop's thread was blocked for ") == 6
    assert "time.sleep(0.4)" in output  # the place in the code


def test_a_call_that_holds_the_gil_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocking, "GIL_LIMIT", 0.3)
    detector = BlockingDetector()
    ctypes.PyDLL(None).usleep(800_000)
    detector.tick()
    detector.stop()
    assert "perhaps the GIL was held" in (detector.report() or "")


def test_a_machine_that_stood_still_has_not_blocked_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither the loop's thread nor the watcher has run for a minute."""
    detector = BlockingDetector()
    began = blocking._Times.now(detector._files[0])
    monkeypatch.setattr(detector, "_last", began._replace(wall=began.wall - 60))
    detector.tick()
    detector.stop()
    assert detector.report() is None


@on_each_loop
@pytest.mark.usefixtures("quick")
def test_a_long_wait_of_the_loop_itself_is_no_blocking(kind: str) -> None:
    """The loop itself waits here: if the machine wakes it late, no call has blocked it."""
    detector = BlockingDetector()

    async def wait() -> None:
        await loops.sleep(0.4)
        detector.tick()

    loops.run(kind, wait)
    detector.stop()
    assert detector.report() is None


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


async def errors_of_tasks_are_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        await loops.create_task(fail_soon())
    with pytest.raises(ZeroDivisionError):
        await loops.gather(answer(), fail_soon())
    found = await loops.gather(answer(), fail_soon(), return_exceptions=True)
    assert found[0] == 42
    assert isinstance(found[1], ZeroDivisionError)
    with pytest.raises(ExceptionGroup):
        await sleep_beside_a_failing_task()


async def timeouts_and_cancelling_end_a_wait() -> None:
    with pytest.raises(TimeoutError):
        async with loops.timeout(0.05):
            await loops.sleep(60)
    with pytest.raises(TimeoutError):
        await loops.wait_for(loops.make_event().wait(), 0.05)
    async with loops.timeout(60):
        assert await loops.wait_for(answer(), 60) == 42
    task = await loops.start(loops.sleep(60))
    assert task.cancel()
    with pytest.raises(loops.CancelledError):
        await task
    assert task.cancelled()


@on_each_loop
@pytest.mark.parametrize("body", [errors_of_tasks_are_raised, timeouts_and_cancelling_end_a_wait])
def test_functions_of_asyncio_on_every_loop(kind: str, body: Any) -> None:
    loops.run(kind, body)


def test_tests_that_change_the_device_run_on_soft_devices_only(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A soft device has no hardware below it, which sysfs would show as `device`."""
    for name in ("mlx5_0/device", "rxe0"):
        (tmp_path / name).mkdir(parents=True)
    found = [
        DeviceAddress(host, "eth0", name, TransportType.IB, 1)
        for host, name in (("192.0.2.1", "mlx5_0"), ("192.0.2.2", "rxe0"))
    ]
    monkeypatch.setattr(machine, "SYSFS", tmp_path)
    monkeypatch.setattr(machine, "found_addresses", lambda: found)
    outcomes, _ = run_tests(
        pytester,
        """
@pytest.fixture
def address(request):
    return request.param

@pytest.fixture
def device(address):
    pass

def test_anywhere(address):
    pass

@pytest.mark.soft_device
def test_with_the_marker(address):
    pass

def test_with_the_fixture(device):
    pass
""",
    )
    assert outcomes.keys() == {
        "test_anywhere[mlx5_0-ipv4]",
        "test_anywhere[rxe0-ipv4]",
        "test_with_the_marker[rxe0-ipv4]",
        "test_with_the_fixture[rxe0-ipv4]",
    }
