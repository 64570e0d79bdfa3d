"""A forked child neither uses nor destroys the RDMA objects of its parent."""

from __future__ import annotations

import subprocess
import sys

PROLOGUE = """
import asyncio, os, subprocess, sys, threading
from aiordma import RdmaError
from aiordma.cm.handle import IdHandle
from aiordma.loop import SerialJobs, blocking_pool, checkpoint, is_forked_child, run_in_worker
from aiordma.loop import running_loop, worker_pool

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

async def call():
    assert await run_in_worker(running_loop(), lambda: 42) == 42

def is_forked():
    assert is_forked_child()
"""


def run(code: str) -> None:
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", PROLOGUE + code]
    ended = subprocess.run(command, timeout=60, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_in_a_child_forked_after_aiordma_was_used_no_call_is_made() -> None:
    """checkpoint() returns at once: asyncio raises there because no loop is running."""
    run("""
def check_unused():
    assert not is_forked_child()
    asyncio.run(call())
    in_child(is_forked)

def check_checkpoint():
    waiting = checkpoint()
    try:
        waiting.send(None)
    except StopIteration:
        return
    raise AssertionError("it waited")

async def refused():
    try:
        await run_in_worker(running_loop(), lambda: os._exit(1))
    except RdmaError as error:
        assert "forked child" in str(error) and "spawn" in str(error)
    else:
        raise AssertionError("it was called")

def check_jobs():
    is_forked()
    in_child(is_forked)
    code = "from aiordma.loop import is_forked_child; assert not is_forked_child()"
    subprocess.run([sys.executable, "-c", code], check=True)
    jobs = SerialJobs()
    for submit in (worker_pool.submit, blocking_pool.submit, SerialJobs().submit, jobs.run):
        submit(lambda: os._exit(1))
    assert threading.active_count() == 1
    assert not worker_pool._jobs and not blocking_pool._jobs

async def main():
    await call()
    in_child(check_checkpoint)
    await checkpoint()

in_child(check_unused)
asyncio.run(main())
assert not is_forked_child()
in_child(check_jobs)
in_child(lambda: asyncio.run(refused()))
assert not is_forked_child()
asyncio.run(call())
""")


def test_in_a_forked_child_an_id_handle_destroys_nothing_and_does_not_wait() -> None:
    run("""
calls = []

class Objects:
    def destroy(self):
        calls.append("destroy own")

class Id:
    own_objects = Objects

    def destroy(self):
        calls.append("destroy")

async def destroy():
    handle.destroy()
    handle.destroy()
    await handle.wait_destroyed()

def check():
    loop.run_until_complete(destroy())
    assert calls == []

loop, released = asyncio.new_event_loop(), asyncio.Event()
handle = IdHandle(loop, Id())
handle.add_destroyed_callback(lambda: calls.append("destroyed"))
handle.add_released_callback(lambda: calls.append("released"))
handle.add_released_callback(released.set)
loop.run_until_complete(call())
in_child(check)
assert calls == []
loop.run_until_complete(destroy())
loop.run_until_complete(released.wait())
assert calls == ["destroy", "destroy own", "destroyed", "released"], calls
loop.close()
""")


def test_a_block_that_ends_in_a_forked_child_does_not_wait() -> None:
    """A coroutine forks and leaves its block in the child, where its loop does not run."""
    run("""
def check():
    try:
        IdHandle(loop, None).wait_destroyed().send(None)
    except StopIteration:
        return
    raise AssertionError("it waits")

async def fork():
    in_child(check)

loop = asyncio.new_event_loop()
loop.run_until_complete(call())
loop.run_until_complete(fork())
loop.close()
""")
