"""Round trips with pyverbs, as its users write them: blocking, on rdma_cm ids.

    python3 pyverbs_latency.py ROLE HOST PORT SIZE COUNT WARMUP blocking|polling

Runs by itself, on the interpreter that has pyverbs: it imports nothing of aiordma. The blocking
kind is CMID's own get_recv_comp(), which waits on a completion channel; the polling kind has a
completion queue of its own and looks at it until something is there. A server prints {"port": N},
a client {"times": [nanoseconds], "cpu": seconds}.
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
except ImportError:  # as it is called in later versions
    import pyverbs.librdmacm_enums as ce

DEPTH = 4


@dataclass(frozen=True)
class End:
    """A connection, and how to wait on it."""

    cmid: Any
    await_send: Callable[[], None]
    await_receive: Callable[[], None]


def queue_pair(cq: Any = None) -> Any:
    """What a queue pair is made with."""
    cap = QPCap(max_send_wr=DEPTH, max_recv_wr=DEPTH)
    return QPInitAttr(qp_type=e.IBV_QPT_RC, scq=cq, rcq=cq, cap=cap)


def address(host: str, port: str, passive: bool) -> Any:
    """Where to listen, or to connect to."""
    if passive:
        return AddrInfo(src=host, src_service=port, port_space=ce.RDMA_PS_TCP, flags=ce.RAI_PASSIVE)
    return AddrInfo(dst=host, dst_service=port, port_space=ce.RDMA_PS_TCP)


def parameters() -> Any:
    """What a connection is made with."""
    return ConnParam(retry=7, rnr_retry=7)


def check(completion: Any) -> None:
    """Make sure that it went well."""
    if completion is None or completion.status != e.IBV_WC_SUCCESS:
        raise RuntimeError(f"a work request failed: {completion}")


def blocking(cmid: Any) -> End:
    """Wait in C, on the id's own queues."""
    return End(cmid, lambda: check(cmid.get_send_comp()), lambda: check(cmid.get_recv_comp()))


def polling(cmid: Any, cq: Any) -> End:
    """Look at one queue again and again; what comes while the other is awaited is noted."""
    seen = {True: 0, False: 0}

    def wait(receive: bool) -> None:
        while not seen[receive]:
            _, completions = cq.poll(DEPTH)
            for completion in completions:
                check(completion)
                seen[bool(completion.opcode & e.IBV_WC_RECV)] += 1
        seen[receive] -= 1

    return End(cmid, lambda: wait(False), lambda: wait(True))


def say(what: dict[str, object]) -> None:
    """Print to whoever started this process."""
    sys.stdout.write(f"{json.dumps(what)}\n")
    sys.stdout.flush()


def serve_blocking(host: str, port: str) -> tuple[End, Any]:
    """Wait for a client; the end, and what to keep alive."""
    listener = CMID(creator=address(host, port, True), qp_init_attr=queue_pair())
    listener.listen()
    say({"port": int(port)})
    return blocking(listener.get_request()), listener


def serve_polling(host: str, port: str) -> tuple[End, Any]:
    """Likewise. A synchronous id's request has no protection domain that Python could name, so
    this one has an event channel."""
    channel = CMEventChannel()
    listener = CMID(creator=channel, port_space=ce.RDMA_PS_TCP)
    listener.bind_addr(address(host, port, True))
    listener.listen()
    say({"port": int(port)})
    request = CMEvent(channel)
    cmid = CMID(creator=request, listen_id=listener)
    request.ack_cm_event()
    cq = CQ(listener.context, 4 * DEPTH)
    cmid.create_qp(queue_pair(cq))
    return polling(cmid, cq), (listener, channel)


def connect_blocking(host: str, port: str) -> End:
    """An id that can connect."""
    return blocking(CMID(creator=address(host, port, False), qp_init_attr=queue_pair()))


def connect_polling(host: str, port: str) -> End:
    """Likewise, with a completion queue of our own."""
    cmid = CMID(creator=address(host, port, False))
    cq = CQ(cmid.context, 4 * DEPTH)
    cmid.create_qp(queue_pair(cq))
    return polling(cmid, cq)


def serve(end: End, size: int, count: int) -> None:
    """Answer so many messages."""
    cmid = end.cmid
    inbox, outbox = cmid.reg_msgs(size), cmid.reg_msgs(size)
    cmid.post_recv(inbox)
    cmid.accept(parameters())
    for _ in range(count):
        end.await_receive()
        outbox.write(inbox.read(size, 0), size)
        cmid.post_recv(inbox)
        cmid.post_send(outbox)
        end.await_send()


def drive(end: End, size: int, count: int, warmup: int) -> None:
    """Time so many round trips, one by one."""
    cmid, data = end.cmid, bytes(size)
    inbox, outbox = cmid.reg_msgs(size), cmid.reg_msgs(size)
    cmid.post_recv(inbox)
    cmid.connect(parameters())
    times = []
    cpu = 0.0
    for number in range(warmup + count):
        if number == warmup:
            cpu = time.process_time()
        begin = time.perf_counter_ns()
        outbox.write(data, size)
        cmid.post_send(outbox)
        end.await_receive()
        inbox.read(size, 0)
        cmid.post_recv(inbox)
        end.await_send()
        times.append(time.perf_counter_ns() - begin)
    say({"times": times[warmup:], "cpu": time.process_time() - cpu})


def main(role: str, host: str, port: str, *numbers: str) -> None:
    """Run one side."""
    size, count, warmup = (int(number) for number in numbers[:3])
    is_polling = numbers[3] == "polling"
    if role == "server":
        listening = serve_polling if is_polling else serve_blocking
        end, _kept = listening(host, port)
        serve(end, size, warmup + count)
    else:
        connecting = connect_polling if is_polling else connect_blocking
        drive(connecting(host, port), size, count, warmup)


if __name__ == "__main__":
    main(*sys.argv[1:])
    # pyverbs destroys in the garbage collector's order: leave it to the kernel, which knows better.
    os._exit(0)
