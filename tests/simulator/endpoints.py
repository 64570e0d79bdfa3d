"""Simulated endpoints: what librdmacm makes for an id, and rdma_create_ep(3).

An id can have a queue pair, completion queues with channels, and a shared receive queue.
"""

from __future__ import annotations

import errno
import socket
from typing import Any, NamedTuple

from simulator import cm, verbs
from simulator import world as worlds
from simulator.cm import Channel, Id, destroy, get_id, new_id, pack_address, read_address
from simulator.verbs import Device, QueuePair
from simulator.world import Failure, World, define_all, ffi, lib

REJECTED_ECE = 35
EP_TIMEOUT = 2.0
"""Seconds that rdma_create_ep() waits for the address, and again for the route."""

# --- queue pairs and queues ---


def rdma_create_qp(world: World, pointer: Any, pd: Any, attr: Any) -> None:
    cm_id = get_id(world, pointer)
    if cm_id.device is None or pointer.qp != ffi.NULL:
        raise Failure(errno.EINVAL)
    context = Device.of(pointer.verbs).pointer
    for name, depth in (("send", attr.cap.max_send_wr), ("recv", attr.cap.max_recv_wr)):
        if getattr(attr, f"{name}_cq") == ffi.NULL:
            channel = verbs.ibv_create_comp_channel(world, context)
            setattr(pointer, f"{name}_cq_channel", channel)
            cq = verbs.ibv_create_cq(world, context, max(1, depth), pointer, channel)
            setattr(pointer, f"{name}_cq", cq)
            setattr(attr, f"{name}_cq", cq)
    if attr.srq == ffi.NULL:
        attr.srq = pointer.srq
    pointer.qp = verbs.ibv_create_qp(world, pointer.pd if pd == ffi.NULL else pd, attr)
    qp = world.get(pointer.qp, QueuePair)
    qp.cm_id = cm_id
    qp.move(lib.IBV_QPS_RTS if cm_id.is_datagram else lib.IBV_QPS_INIT)


def rdma_destroy_qp(world: World, pointer: Any) -> None:
    verbs.ibv_destroy_qp(world, pointer.qp)
    pointer.qp = ffi.NULL
    for name in ("send", "recv"):
        if getattr(pointer, f"{name}_cq_channel") != ffi.NULL:
            verbs.ibv_destroy_cq(world, getattr(pointer, f"{name}_cq"))
            verbs.ibv_destroy_comp_channel(world, getattr(pointer, f"{name}_cq_channel"))
            setattr(pointer, f"{name}_cq", ffi.NULL)
            setattr(pointer, f"{name}_cq_channel", ffi.NULL)


def rdma_create_srq(world: World, pointer: Any, pd: Any, attr: Any) -> None:
    pointer.srq = verbs.ibv_create_srq(world, pd, attr)


def rdma_create_srq_ex(world: World, pointer: Any, attr: Any) -> None:
    if attr.srq_type != lib.IBV_SRQT_BASIC:
        raise Failure(errno.EOPNOTSUPP)
    pointer.srq = verbs.ibv_create_srq(world, attr.pd, attr)


def rdma_destroy_srq(world: World, pointer: Any) -> None:
    verbs.ibv_destroy_srq(world, pointer.srq)
    pointer.srq = ffi.NULL


def rdma_init_qp_attr(world: World, pointer: Any, attr: Any, mask: Any) -> None:
    cm_id = get_id(world, pointer)
    mask[0] = lib.IBV_QP_STATE
    if cm_id.device is None or (attr.qp_state != lib.IBV_QPS_INIT and cm_id.peer is None):
        raise Failure(errno.EINVAL)
    if cm_id.peer is not None:
        attr.dest_qp_num = cm_id.peer.number


def rdma_create_qp_ex(world: World, pointer: Any, attr: Any) -> None:
    rdma_create_qp(world, pointer, attr.pd, attr)


# --- ECE ---


def _check_without_qp(world: World, pointer: Any) -> Id:
    if pointer.qp != ffi.NULL:
        raise Failure(errno.EINVAL)
    return get_id(world, pointer)


def rdma_set_local_ece(world: World, pointer: Any, ece: Any) -> None:
    cm_id = _check_without_qp(world, pointer)
    cm_id.ece = (ece.vendor_id, ece.options, ece.comp_mask)


def rdma_get_remote_ece(world: World, pointer: Any, ece: Any) -> None:
    peer = _check_without_qp(world, pointer).peer
    ece.vendor_id, ece.options, ece.comp_mask = peer.ece if peer is not None else (0, 0, 0)


def rdma_reject_ece(world: World, pointer: Any, data: Any, length: int) -> None:
    cm.rdma_reject(world, pointer, data, length, REJECTED_ECE)


# --- endpoints ---


def rdma_create_ep(world: World, out: Any, info: Any, pd: Any, attr: Any) -> None:
    channel = world.get(cm.rdma_create_event_channel(world), Channel)
    cm_id = new_id(world, channel, info.ai_port_space)
    cm_id.owns_channel = True
    try:
        if info.ai_flags & lib.RAI_PASSIVE:
            cm.rdma_bind_addr(world, cm_id.pointer, info.ai_src_addr)
        else:
            _resolve(world, cm_id, info)
            if attr != ffi.NULL:
                rdma_create_qp(world, cm_id.pointer, pd, attr)
    except Failure:
        destroy(world, cm_id)
        raise
    out[0] = cm_id.pointer


def _resolve(world: World, cm_id: Id, info: Any) -> None:
    """Resolve the address and the route, and wait for both. The last event stays in the id."""
    milliseconds = int(EP_TIMEOUT * 1000)
    source, target = info.ai_src_addr, info.ai_dst_addr
    for function, arguments in (
        (cm.rdma_resolve_addr, (source, target, milliseconds)),
        (cm.rdma_resolve_route, (milliseconds,)),
    ):
        function(world, cm_id.pointer, *arguments)
        while not cm_id.channel.events:
            worlds.park(EP_TIMEOUT / 100)
        out = ffi.new("struct rdma_cm_event **")
        cm.rdma_get_cm_event(world, cm_id.channel.pointer, out)
        if cm_id.pointer.event != ffi.NULL:
            cm.rdma_ack_cm_event(world, cm_id.pointer.event)
        cm_id.pointer.event = out[0]
        if out[0].status:
            raise Failure(-out[0].status)


def rdma_destroy_ep(world: World, pointer: Any) -> None:
    cm_id = world.get(pointer, Id)
    if pointer.qp != ffi.NULL and cm_id.qp is not None:
        rdma_destroy_qp(world, pointer)
    destroy(world, cm_id)


# --- names ---


class AddrInfo(NamedTuple):
    """A struct rdma_addrinfo and its memory."""

    pointer: Any
    memory: Any


def rdma_getaddrinfo(world: World, node: Any, service: Any, hints: Any, out: Any) -> int:
    if hints == ffi.NULL:
        kinds = {"ai_port_space": lib.RDMA_PS_TCP, "ai_qp_type": lib.IBV_QPT_RC}
        hints = ffi.new("struct rdma_addrinfo *", kinds)
    name = "" if node == ffi.NULL else ffi.string(node).decode()
    port = 0 if service == ffi.NULL else ffi.string(service).decode()
    passive = hints.ai_flags & lib.RAI_PASSIVE
    if not name and not service and passive:
        name, port = read_address(hints.ai_src_addr)
    try:
        address = socket.getaddrinfo(name or "0.0.0.0", port or None)[0][4]
    except socket.gaierror as error:
        return error.errno or -1
    pointer = ffi.new("struct rdma_addrinfo *")
    found = pack_address(str(address[0]).partition("%")[0], int(address[1]))
    sides = {"src" if passive else "dst": found}
    if hints.ai_src_addr != ffi.NULL:
        sides.setdefault("src", pack_address(*read_address(hints.ai_src_addr)))
    memory = {side: ffi.new("char[]", packed) for side, packed in sides.items()}
    for side, packed in sides.items():
        setattr(pointer, f"ai_{side}_addr", ffi.cast("struct sockaddr *", memory[side]))
        setattr(pointer, f"ai_{side}_len", len(packed))
    pointer.ai_family = int.from_bytes(found[:1], "little")
    for member in ("ai_flags", "ai_port_space", "ai_qp_type"):
        setattr(pointer, member, getattr(hints, member))
    world.add(pointer, AddrInfo(pointer, memory))
    out[0] = pointer
    return 0


def rdma_freeaddrinfo(world: World, info: Any) -> None:
    world.remove(info, AddrInfo)


define_all(globals())
