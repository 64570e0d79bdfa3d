"""Round trips with pyverbs, on rdma_cm ids, as its users write them.

    python3 pyverbs_latency.py ROLE HOST PORT SIZE COUNT WARMUP blocking|polling

A script for a Python that has pyverbs: it imports nothing of aiordma. The blocking kind waits in
CMID.get_recv_comp(), on a completion channel. The polling kind creates a completion queue and polls
it. A server prints {"port": N}, a client {"times": [nanoseconds], "cpu": seconds}.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyverbs.enums as e
from pyverbs.cmid import CMID, AddrInfo, CMEvent, CMEventChannel, ConnParam
from pyverbs.cq import CQ
from pyverbs.qp import QPCap, QPInitAttr

try:
    import pyverbs.cm_enums as ce
except ImportError:  # its name in later versions
    import pyverbs.librdmacm_enums as ce

DEPTH = 4


@dataclass(frozen=True)
class Connection:
    """An rdma_cm id, and functions that wait for its next send or receive to complete."""

    cmid: Any
    await_send: Callable[[], None]
    await_receive: Callable[[], None]


def queue_pair(cq: Any = None) -> Any:
    """Return the attributes of a queue pair."""
    cap = QPCap(max_send_wr=DEPTH, max_recv_wr=DEPTH)
    return QPInitAttr(qp_type=e.IBV_QPT_RC, scq=cq, rcq=cq, cap=cap)


def address(host: str, port: str, passive: bool) -> Any:
    """Return the address to listen on, or to connect to."""
    if passive:
        return AddrInfo(src=host, src_service=port, port_space=ce.RDMA_PS_TCP, flags=ce.RAI_PASSIVE)
    return AddrInfo(dst=host, dst_service=port, port_space=ce.RDMA_PS_TCP)


def parameters() -> Any:
    """Return the parameters of a connection."""
    return ConnParam(retry=7, rnr_retry=7)


def check(completion: Any) -> None:
    """Raise an error unless the work request succeeded."""
    if completion is None or completion.status != e.IBV_WC_SUCCESS:
        raise RuntimeError(f"a work request failed: {completion}")


def blocking(cmid: Any) -> Connection:
    """Return a connection that blocks in C until a completion, on the id's own queues."""
    return Connection(
        cmid, lambda: check(cmid.get_send_comp()), lambda: check(cmid.get_recv_comp())
    )


def polling(cmid: Any, cq: Any) -> Connection:
    """Return a connection that polls `cq`, its one queue for both directions.

    Completions of the other direction are counted until they are waited for.
    """
    seen = {True: 0, False: 0}

    def wait(receive: bool) -> None:
        while not seen[receive]:
            _, completions = cq.poll(DEPTH)
            for completion in completions:
                check(completion)
                seen[bool(completion.opcode & e.IBV_WC_RECV)] += 1
        seen[receive] -= 1

    return Connection(cmid, lambda: wait(False), lambda: wait(True))


def print_json(value: dict[str, object]) -> None:
    """Print a line for the process that started this one, and flush it."""
    sys.stdout.write(f"{json.dumps(value)}\n")
    sys.stdout.flush()


def accept_blocking(host: str, port: str) -> tuple[Connection, Any]:
    """Wait for a client; return its connection, and the object that must stay alive with it."""
    listener = CMID(creator=address(host, port, True), qp_init_attr=queue_pair())
    listener.listen()
    print_json({"port": int(port)})
    return blocking(listener.get_request()), listener


def accept_polling(host: str, port: str) -> tuple[Connection, Any]:
    """Do the same as accept_blocking(), with a completion queue.

    The id is asynchronous: the protection domain of a synchronous id's request is not accessible
    in Python, so that no queue pair could be created here.
    """
    channel = CMEventChannel()
    listener = CMID(creator=channel, port_space=ce.RDMA_PS_TCP)
    listener.bind_addr(address(host, port, True))
    listener.listen()
    print_json({"port": int(port)})
    request = CMEvent(channel)
    cmid = CMID(creator=request, listen_id=listener)
    request.ack_cm_event()
    cq = CQ(listener.context, 4 * DEPTH)
    cmid.create_qp(queue_pair(cq))
    return polling(cmid, cq), (listener, channel)


def create_blocking(host: str, port: str) -> Connection:
    """Return the connection of a client, not connected yet."""
    return blocking(CMID(creator=address(host, port, False), qp_init_attr=queue_pair()))


def create_polling(host: str, port: str) -> Connection:
    """Do the same as create_blocking(), with a completion queue."""
    cmid = CMID(creator=address(host, port, False))
    cq = CQ(cmid.context, 4 * DEPTH)
    cmid.create_qp(queue_pair(cq))
    return polling(cmid, cq)


def serve(connection: Connection, size: int, count: int) -> None:
    """Echo `count` messages."""
    cmid = connection.cmid
    recv_mr, send_mr = cmid.reg_msgs(size), cmid.reg_msgs(size)
    cmid.post_recv(recv_mr)
    cmid.accept(parameters())
    for _ in range(count):
        connection.await_receive()
        send_mr.write(recv_mr.read(size, 0), size)
        cmid.post_recv(recv_mr)
        cmid.post_send(send_mr)
        connection.await_send()


def measure(connection: Connection, size: int, count: int, warmup: int) -> None:
    """Time `count` round trips, one by one, after `warmup` that are not timed; print the times."""
    cmid, data = connection.cmid, bytes(size)
    recv_mr, send_mr = cmid.reg_msgs(size), cmid.reg_msgs(size)
    cmid.post_recv(recv_mr)
    cmid.connect(parameters())
    times = []
    cpu = 0.0
    for number in range(warmup + count):
        if number == warmup:
            cpu = time.process_time()
        begin = time.perf_counter_ns()
        send_mr.write(data, size)
        cmid.post_send(send_mr)
        connection.await_receive()
        recv_mr.read(size, 0)
        cmid.post_recv(recv_mr)
        connection.await_send()
        times.append(time.perf_counter_ns() - begin)
    print_json({"times": times[warmup:], "cpu": time.process_time() - cpu})


def main(role: str, host: str, port: str, *numbers: str) -> None:
    """Run the server or the client until it has finished."""
    size, count, warmup = (int(number) for number in numbers[:3])
    is_polling = numbers[3] == "polling"
    if role == "server":
        accept = accept_polling if is_polling else accept_blocking
        connection, _alive = accept(host, port)
        serve(connection, size, warmup + count)
    else:
        create = create_polling if is_polling else create_blocking
        measure(create(host, port), size, count, warmup)


if __name__ == "__main__":
    main(*sys.argv[1:])
    # The garbage collector would destroy pyverbs' objects in an arbitrary order. The kernel
    # destroys them in the right one when the process exits.
    os._exit(0)
