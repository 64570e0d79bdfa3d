"""A forked child neither uses nor destroys the RDMA objects of its parent."""

from __future__ import annotations

import subprocess
import sys

PROLOGUE = """
import asyncio, os, sys, threading, time
from aiordma import RdmaError
from aiordma.cm.handle import IdHandle
from aiordma.loop import SerialJobs, blocking_pool, is_forked_child, run_in_worker
from aiordma.loop import running_loop, worker_pool

def use():
    begun = threading.Event()
    worker_pool.submit(begun.set)
    assert begun.wait(10)

def in_child(check):
    "Run check() in a forked child, and assert that it ends without an exception."
    child = os.fork()
    if not child:
        try:
            check()
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(42)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 42, status
"""


def run(code: str) -> None:
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", PROLOGUE + code]
    ended = subprocess.run(command, timeout=30, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_forked_children_and_grandchildren_are_forked_children() -> None:
    run("""
def check():
    assert is_forked_child()

def check_with_child():
    check()
    in_child(check)

use()
assert not is_forked_child()
in_child(check_with_child)
assert not is_forked_child()
""")


def test_a_child_forked_before_any_use_can_use_aiordma() -> None:
    run("""
async def call():
    return await run_in_worker(running_loop(), lambda: 42)

def check():
    assert not is_forked_child()
    assert asyncio.run(call()) == 42
    in_child(check_forked)

def check_forked():
    assert is_forked_child()

in_child(check)
assert not is_forked_child()
assert asyncio.run(call()) == 42
in_child(check_forked)
""")


def test_in_a_child_forked_inside_a_loop_checkpoint_returns_at_once() -> None:
    """asyncio raises there because no loop is running."""
    run("""
from aiordma.loop import checkpoint

def check():
    waiting = checkpoint()
    try:
        waiting.send(None)
    except StopIteration:
        return
    raise AssertionError("it waited")

async def main():
    in_child(check)
    await checkpoint()

use()
asyncio.run(main())
""")


def test_a_subprocess_of_a_forked_child_is_no_forked_child() -> None:
    run("""
import subprocess
use()
code = "from aiordma.loop import is_forked_child; assert not is_forked_child()"

def check():
    subprocess.run([sys.executable, "-c", code], check=True)

in_child(check)
""")


def test_in_a_forked_child_run_in_worker_raises() -> None:
    run("""
calls = []

async def refused():
    try:
        await run_in_worker(running_loop(), lambda: calls.append("called"))
    except RdmaError as error:
        assert "forked child" in str(error) and "spawn" in str(error)
    else:
        raise AssertionError("it was called")
    assert calls == []

async def called():
    return await run_in_worker(running_loop(), lambda: 42)

assert asyncio.run(called()) == 42
in_child(lambda: asyncio.run(refused()))
assert asyncio.run(called()) == 42
""")


def test_in_a_forked_child_submitted_jobs_are_dropped() -> None:
    run("""
def check():
    for submit in (worker_pool.submit, blocking_pool.submit, SerialJobs().submit):
        submit(lambda: os._exit(1))
    time.sleep(0.1)
    assert threading.active_count() == 1

use()
in_child(check)
""")


def test_in_a_forked_child_an_id_handle_destroys_nothing_and_does_not_wait() -> None:
    run("""
class Id:
    def __init__(self):
        self.calls = []

    def own_objects(self):
        return OwnObjects(self.calls)

    def destroy(self):
        self.calls.append("destroy")

class OwnObjects:
    def __init__(self, calls):
        self.calls = calls

    def destroy(self):
        self.calls.append("destroy own")

loop = asyncio.new_event_loop()
raw, calls = Id(), []
handle = IdHandle(loop, raw)
handle.add_destroyed_callback(lambda: calls.append("destroyed"))
handle.add_released_callback(lambda: calls.append("released"))

async def destroy():
    handle.destroy()
    handle.destroy()
    async with asyncio.timeout(5):
        await handle.wait_destroyed()
    await asyncio.sleep(0.05)

def check():
    loop.run_until_complete(destroy())
    assert (raw.calls, calls) == ([], [])

use()
in_child(check)
assert (raw.calls, calls) == ([], [])
loop.run_until_complete(destroy())
assert (raw.calls, calls) == (["destroy", "destroy own"], ["destroyed", "released"])
loop.close()
""")
