"""A peer that becomes silent, as if the power of its machine were cut."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from helpers import run_program

from aiordma import ByteStream, Connection
from aiordma._native import ffi, lib
from aiordma.rdmacm import DeviceAddress
from aiordma.verbs import QueuePair


@contextmanager
def silent(address: DeviceAddress, *queue_pairs: QueuePair) -> Iterator[None]:
    """Let these ends answer nothing in the block."""
    if address.transport.name == "IB":
        attributes: Any = ffi.new("struct ibv_qp_attr *")
        attributes.qp_state = lib.IBV_QPS_RESET
        for queue_pair in queue_pairs:
            assert not lib.ibv_modify_qp(queue_pair.pointer, attributes, lib.IBV_QP_STATE)
        yield
        return
    host = address.host
    (route,) = ip(host, "route", "show", "table", "local", "type", "local", host).splitlines()
    ip(host, "route", "add", "blackhole", host)
    ip(host, "route", "del", *route.split(), "table", "local")
    try:
        yield
    finally:
        ip(host, "route", "add", *route.split(), "table", "local")
        ip(host, "route", "del", "blackhole", host)


def ip(host: str, *arguments: str) -> str:
    """Run ip(8) for the address family of `host`."""
    return run_program("ip", "-6" if ":" in host else "-4", *arguments)


def queue_pair_of(end: Connection | ByteStream) -> QueuePair:
    qp = end._endpoint.cm.handle.qp
    assert qp is not None
    return qp
