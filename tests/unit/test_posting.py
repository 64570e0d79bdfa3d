"""Posting in one thread, destroying in another: no thread posts to a destroyed queue."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable

import pytest
from simulator.queues import Queues, untyped_ffi

from aiordma._native import ffi, lib

TIME_LIMIT = 30


def send(verbs: Queues) -> int:
    cell = untyped_ffi.cast("struct ibv_qp **", verbs.qp_cell)
    return lib.aiordma_post_send_inline(cell, 1, ffi.new("char[]", b"hello"), 5, 0, -1)


def receive(verbs: Queues) -> int:
    cell = untyped_ffi.cast("struct ibv_qp **", verbs.qp_cell)
    return lib.aiordma_post_recv(cell, 1, 0x1000, 64, 7)


def receive_shared(verbs: Queues) -> int:
    cell = untyped_ffi.cast("struct ibv_srq **", verbs.srq_cell)
    return lib.aiordma_post_srq_recv(cell, 1, 0x1000, 64, 7)


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIME_LIMIT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("post", [send, receive, receive_shared])
def test_destroying_a_queue_waits_for_posting_threads(
    verbs: Queues, post: Callable[[Queues], int]
) -> None:
    results: list[int] = []
    verbs.block_posts(True)
    posting = threading.Thread(target=lambda: results.append(post(verbs)))
    posting.start()
    eventually(lambda: verbs.blocked_posts == 1)
    verbs.destroy()  # this only sets the cells to NULL
    destroying = threading.Thread(target=lib.aiordma_await_posts)
    destroying.start()
    destroying.join(0.1)
    assert destroying.is_alive()
    verbs.block_posts(False)
    posting.join(TIME_LIMIT)
    destroying.join(TIME_LIMIT)
    assert not destroying.is_alive()
    assert results == [0]
    assert post(verbs) == errno.EINVAL
    assert verbs.posted == 1


def test_posting_threads_do_not_wait_for_each_other(verbs: Queues) -> None:
    verbs.block_posts(True)
    threads = [threading.Thread(target=post, args=[verbs]) for post in (send, receive)]
    for thread in threads:
        thread.start()
    eventually(lambda: verbs.blocked_posts == 2)
    verbs.block_posts(False)
    for thread in threads:
        thread.join(TIME_LIMIT)
    assert verbs.posted == 2
