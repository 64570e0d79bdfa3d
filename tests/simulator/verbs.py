"""The simulated libibverbs: devices, and the objects that a program makes on them."""

from __future__ import annotations

import errno
import ipaddress
import itertools
import os
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from simulator.world import Failure, World, address_of, define_all, ffi, lib

MAX_INLINE = 256
MAX_MESSAGE = 1 << 30
_KEYS = itertools.count(0x1000, 0x100)
"""No key is used twice. The lowest 8 bits are those that a memory window changes."""
_NUMBERS = itertools.count(0x11)


@dataclass
class Limits:
    """The limits of a device (struct ibv_device_attr)."""

    max_qp_wr: int = 16384
    max_sge: int = 16
    max_sge_rd: int = 16
    max_cqe: int = 1 << 16
    max_qp_rd_atom: int = 16
    max_qp_init_rd_atom: int = 16
    max_srq: int = 64
    max_srq_wr: int = 4096
    max_mcast_grp: int = 64


class Device:
    """An RDMA device with one port, and its address in the network."""

    def __init__(self, name: str, *hosts: str, iwarp: bool = False) -> None:
        self.name = name
        self.hosts = hosts
        self.host = hosts[0]
        self.is_iwarp = iwarp
        self.limits = Limits(max_sge_rd=1) if iwarp else Limits()
        self.removed = False
        self.vendor_id = 0
        self.drops_completions = not iwarp
        """True: the completions of a destroyed queue pair that were not polled are lost."""
        self.reports_last_receive = True
        self.port_state = int(lib.IBV_PORT_ACTIVE)
        transport = lib.IBV_TRANSPORT_IWARP if iwarp else lib.IBV_TRANSPORT_IB
        self.context = lib.sim_new_context(name.encode(), transport)
        self.pointer = ffi.addressof(self.context.verbs.context)
        _devices[address_of(self.pointer)] = self

    def close(self) -> None:
        """Close the descriptors. No program uses the device any more."""
        os.close(self.pointer.async_fd)
        os.close(self.pointer.cmd_fd)

    @classmethod
    def of(cls, context: Any) -> Device:
        """Return the device of a struct ibv_context.

        Raises:
            Failure: EIO, the device was removed.
        """
        device = _devices[address_of(context)]
        if device.removed:
            raise Failure(errno.EIO)
        return device

    def raise_event(self, kind: int, element: Any = ffi.NULL, port_num: int = 0) -> None:
        """Raise an asynchronous event: of a queue, of a port, or of the device."""
        lib.sim_raise(self.context, kind, ffi.cast("void *", element), port_num)


_devices: dict[int, Device] = {}


@dataclass
class Domain:
    """A protection domain."""

    device: Device
    pointer: Any


@dataclass
class Region:
    """A memory region or a bound memory window: the memory that its key allows to use."""

    domain: Domain
    address: int
    length: int
    access: int
    key: int
    pointer: Any = None
    windows: int = 0
    """The number of memory windows that are bound to it."""

    def contains(self, address: int, length: int) -> bool:
        """Return True if this memory is part of the region."""
        return self.address <= address and address + length <= self.address + self.length


@dataclass
class Window:
    """A memory window of type 2, and the region that it is bound to."""

    domain: Domain
    pointer: Any
    bound: Region | None = None
    target: Region | None = None


@dataclass
class AddressHandle:
    """An address handle: the gid that datagrams are sent to."""

    domain: Domain
    pointer: Any
    gid: bytes


@dataclass
class Channel:
    """A completion channel."""

    device: Device
    pointer: Any


@dataclass
class CompletionQueue:
    """A completion queue. Its entries are C: see device.c."""

    device: Device
    pointer: Any
    channel: Any

    def put(self, qp: QueuePair, queue: Any, freed: int, **members: Any) -> None:
        """Add a completion with these members of struct ibv_wc. See sim_complete()."""
        wc = ffi.new("struct ibv_wc *", {"qp_num": qp.number, **members})
        is_late = qp.world.schedule.is_late()
        if lib.sim_complete(self.pointer, wc, queue, freed, is_late):
            qp.world.violate("a completion queue has overflowed")
            self.device.raise_event(lib.IBV_EVENT_CQ_ERR, ffi.addressof(self.pointer.cq))


@dataclass
class SharedReceives:
    """A shared receive queue."""

    device: Device
    pointer: Any
    limit: int = 0


class Request:
    """A copy of a posted work request."""

    def __init__(self, posted: Any, index: int) -> None:
        self.index = index
        self.wr_id: int = posted.wr_id
        self.opcode: int = posted.opcode
        self.flags: int = posted.flags
        self.imm_data: int = posted.imm_data
        self.segments = [
            (posted.sge[i].addr, posted.sge[i].length, posted.sge[i].lkey)
            for i in range(posted.num_sge)
        ]
        self.inline: bytes | None = None
        if posted.flags & lib.IBV_SEND_INLINE:
            self.inline = bytes(ffi.buffer(posted.inline_data, posted.inline_length))
        self.remote = (posted.remote_addr, posted.rkey)
        self.atomic = (posted.compare_add, posted.swap)
        self.ah = posted.ah
        self.ud = (posted.remote_qpn, posted.remote_qkey)
        self.window = posted.mw
        self.region = (posted.mr, posted.bind_addr, posted.bind_length, posted.bind_access)

    @property
    def length(self) -> int:
        """The number of bytes that the request sends or receives."""
        if self.inline is not None:
            return len(self.inline)
        return sum(length for _, length, _ in self.segments)


@dataclass(eq=False)
class QueuePair:
    """A queue pair. Its queues are C (device.c), and network.py executes its requests."""

    world: World
    device: Device
    domain: Domain
    pointer: Any
    number: int
    qp_type: int
    send_cq: CompletionQueue
    recv_cq: CompletionQueue
    shared: SharedReceives | None
    peer: QueuePair | None = None
    """The other end of the connection."""
    is_destroyed: bool = False
    in_flight: deque[Request] = field(default_factory=deque)
    """The requests that the device has begun, and that have not completed."""
    is_executing: bool = False
    last_completion: float = 0.0
    is_flushed: bool = False
    rnr_delay: float = 1e-3
    groups: set[bytes] = field(default_factory=set)
    waiting: Request | None = None
    """The request that waits until the peer is ready to receive."""
    has_received: bool = False
    allowed: int | None = None
    """The number of requests that the device can still begin to execute. None: no limit."""
    is_draining: bool = False
    """True if the send queue drains. The next call finds it so, the calls after it do not."""
    retry_count: int = 0
    """The number of times that an unacknowledged request is repeated. Only stored."""
    cm_id: Any = None
    """The id that the queue pair belongs to."""

    @property
    def state(self) -> int:
        return int(self.pointer.qp.state)

    def move(self, state: int) -> None:
        """Change the state."""
        self.pointer.qp.state = state

    @property
    def is_connected(self) -> bool:
        """True if the queue pair can send, and the peer's can receive."""
        peer = self.peer
        return (
            self.state == lib.IBV_QPS_RTS
            and peer is not None
            and not peer.is_destroyed
            and peer.state in (lib.IBV_QPS_RTR, lib.IBV_QPS_RTS)
            and not peer.device.removed
        )

    def keys_in_use(self) -> set[int]:
        """Return the keys of the memory that the posted requests use."""
        keys = {key for request in self.in_flight for _, _, key in request.segments}
        for queue in (self.pointer.sends, self.pointer.receive_queue):
            for index in range(queue.taken, queue.posted):
                entry = queue.ring[index % queue.capacity]
                keys.update(entry.sge[number].lkey for number in range(entry.num_sge))
        return keys

    @property
    def has_receive(self) -> bool:
        queue = self.pointer.receive_queue
        return bool(queue.taken != queue.posted)

    def take_receive(self) -> Request | None:
        """Take the oldest receive; None if there is none."""
        queue = self.pointer.receive_queue
        index = queue.taken
        posted = lib.sim_take(queue)
        return Request(posted, index) if posted != ffi.NULL else None

    def complete_receive(self, request: Request, status: int, **members: Any) -> None:
        """Report a receive, with these members of struct ibv_wc."""
        members = {"wr_id": request.wr_id, "opcode": lib.IBV_WC_RECV, **members}
        self.recv_cq.put(self, self.pointer.receive_queue, lib.ONE_MORE, status=status, **members)


# --- devices ---


def ibv_query_device(world: World, context: Any, attr: Any) -> None:
    device = Device.of(context)
    for name, limit in vars(device.limits).items():
        setattr(attr, name, limit)
    attr.max_mr_size, attr.phys_port_cnt, attr.vendor_id = 1 << 40, 1, device.vendor_id
    if not device.is_iwarp:
        attr.atomic_cap, attr.device_cap_flags = 1, lib.IBV_DEVICE_MEM_WINDOW_TYPE_2B


def ibv_query_port(world: World, context: Any, port_num: int, attr: Any) -> None:
    device = Device.of(context)
    if port_num != 1:
        raise Failure(errno.EINVAL)
    attr.state, attr.max_mtu, attr.active_mtu = device.port_state, 5, 3
    attr.max_msg_sz, attr.lid = MAX_MESSAGE, int(device.host.rpartition(".")[2])


def gid_of(host: str) -> bytes:
    """Return the GID of an IP address: that of an IPv4 address is ::ffff:a.b.c.d."""
    packed = ipaddress.ip_address(host).packed
    return packed if len(packed) == 16 else bytes(10) + b"\xff\xff" + packed


def ibv_query_gid(world: World, context: Any, port_num: int, index: int, gid: Any) -> None:
    ffi.memmove(gid.raw, gid_of(Device.of(context).hosts[index]), 16)


# --- memory ---


def ibv_alloc_pd(world: World, context: Any) -> Any:
    pointer = ffi.new("struct ibv_pd *")
    pointer.context = context
    return world.add(pointer, Domain(Device.of(context), pointer))


def ibv_dealloc_pd(world: World, pd: Any) -> None:
    domain = world.get(pd, Domain)
    kinds = (Region, QueuePair, AddressHandle)
    if any(thing.domain is domain for kind in kinds for thing in world.all(kind)):
        raise Failure(errno.EBUSY)
    world.remove(pd, Domain)


def ibv_reg_mr_iova2(world: World, pd: Any, addr: Any, length: int, iova: int, access: int) -> Any:
    domain = world.get(pd, Domain)
    Device.of(pd.context)
    pointer = ffi.new("struct ibv_mr *")
    key = next(_KEYS)
    pointer.addr, pointer.length, pointer.lkey, pointer.rkey = addr, length, key, key
    pointer.context, pointer.pd = pd.context, pd
    world.keys[key] = region = Region(domain, address_of(addr), length, access, key, pointer)
    return world.add(pointer, region)


def ibv_reg_dmabuf_mr(world: World, *arguments: Any) -> None:
    raise Failure(errno.EOPNOTSUPP)


def ibv_dereg_mr(world: World, mr: Any) -> None:
    region = world.get(mr, Region)
    if region.windows:
        raise Failure(errno.EBUSY)
    world.remove(mr, Region)
    del world.keys[region.key]
    if any(region.key in qp.keys_in_use() for qp in world.all(QueuePair)):
        world.violate("memory was deregistered while a request used it")


def ibv_alloc_mw(world: World, pd: Any, kind: int) -> Any:
    pointer = ffi.new("struct ibv_mw *")
    pointer.rkey, pointer.context, pointer.pd = next(_KEYS), pd.context, pd
    return world.add(pointer, Window(world.get(pd, Domain), pointer))


def ibv_dealloc_mw(world: World, mw: Any) -> None:
    unbind(world, world.remove(mw, Window))


def unbind(world: World, window: Window) -> None:
    """End the binding of a memory window."""
    if window.bound is not None and window.target is not None:
        world.keys.pop(window.bound.key, None)
        window.target.windows -= 1
        window.bound = window.target = None


def ibv_reg_mr(world: World, pd: Any, addr: Any, length: int, access: int) -> Any:
    return ibv_reg_mr_iova2(world, pd, addr, length, 0, access)


# --- queues ---


def ibv_create_comp_channel(world: World, context: Any) -> Any:
    """Make a completion channel: ibv_create_comp_channel(3)."""
    device = Device.of(context)
    pointer = lib.sim_new_channel(device.pointer)
    return world.add(ffi.addressof(pointer.channel), Channel(device, pointer))


def ibv_destroy_comp_channel(world: World, pointer: Any) -> None:
    if any(address_of(one.channel) == address_of(pointer) for one in world.all(CompletionQueue)):
        raise Failure(errno.EBUSY)
    lib.sim_free_channel(world.remove(pointer, Channel).pointer)


def ibv_create_cq(
    world: World, context: Any, cqe: int, user: Any, channel: Any, vector: int = 0
) -> Any:
    """Make a completion queue: ibv_create_cq(3)."""
    device = Device.of(context)
    if not 0 < cqe <= device.limits.max_cqe:
        raise Failure(errno.EINVAL)
    pointer = lib.sim_new_cq(context, cqe, channel)
    pointer.cq.cq_context = user
    return world.add(ffi.addressof(pointer.cq), CompletionQueue(device, pointer, channel))


def ibv_destroy_cq(world: World, pointer: Any) -> None:
    queue = world.get(pointer, CompletionQueue)
    if any(queue in (qp.send_cq, qp.recv_cq) for qp in world.all(QueuePair)):
        raise Failure(errno.EBUSY)
    if queue.pointer.events != queue.pointer.acknowledged:
        world.violate("ibv_destroy_cq() would wait for ever for an acknowledgement")
    world.remove(pointer, CompletionQueue)
    lib.sim_free_cq(queue.pointer)


def ibv_create_srq(world: World, pd: Any, init: Any) -> Any:
    """Make a shared receive queue: ibv_create_srq(3)."""
    domain = world.get(pd, Domain)
    if not 0 < init.attr.max_wr <= domain.device.limits.max_srq_wr:
        raise Failure(errno.EINVAL)
    pointer = lib.sim_new_srq(pd.context, init.attr.max_wr)
    return world.add(ffi.addressof(pointer.srq), SharedReceives(domain.device, pointer))


def ibv_modify_srq(world: World, srq: Any, attr: Any, mask: int) -> None:
    world.get(srq, SharedReceives).limit = attr.srq_limit


def ibv_query_srq(world: World, srq: Any, attr: Any) -> None:
    queue = world.get(srq, SharedReceives)
    attr.max_wr, attr.srq_limit = queue.pointer.receives.capacity, queue.limit


def ibv_destroy_srq(world: World, srq: Any) -> None:
    queue = world.get(srq, SharedReceives)
    if any(qp.shared is queue for qp in world.all(QueuePair)):
        raise Failure(errno.EBUSY)
    world.remove(srq, SharedReceives)
    lib.sim_free_srq(queue.pointer)


# --- queue pairs ---


def ibv_create_qp(world: World, pd: Any, attr: Any) -> Any:
    domain = world.get(pd, Domain)
    device = domain.device
    limits, cap = device.limits, attr.cap
    if max(cap.max_send_wr, cap.max_recv_wr) > limits.max_qp_wr:
        raise Failure(errno.EINVAL)
    if max(cap.max_send_sge, cap.max_recv_sge) > limits.max_sge:
        raise Failure(errno.EINVAL)
    if cap.max_inline_data > MAX_INLINE:
        raise Failure(errno.EINVAL)
    if device.is_iwarp and attr.qp_type != lib.IBV_QPT_RC:
        raise Failure(errno.EOPNOTSUPP)
    number = next(_NUMBERS)
    pointer = lib.sim_new_qp(pd.context, attr, number)
    sends, receives = (world.get(one, CompletionQueue) for one in (attr.send_cq, attr.recv_cq))
    shared = world.get(attr.srq, SharedReceives) if attr.srq != ffi.NULL else None
    kind = attr.qp_type
    made = QueuePair(world, device, domain, pointer, number, kind, sends, receives, shared)
    return world.add(ffi.addressof(pointer.qp), made)


def ibv_modify_qp(world: World, pointer: Any, attr: Any, mask: int) -> None:
    qp = world.get(pointer, QueuePair)
    if mask & lib.IBV_QP_STATE:
        is_drained = qp.state == lib.IBV_QPS_SQD
        if attr.qp_state == lib.IBV_QPS_ERR:
            world.network.fail_queue_pair(qp)
        elif is_drained or attr.qp_state == lib.IBV_QPS_SQD:
            if qp.device.is_iwarp or qp.state not in (lib.IBV_QPS_RTS, lib.IBV_QPS_SQD):
                raise Failure(errno.EINVAL)
            if qp.is_draining:
                qp.is_draining = False
                raise Failure(errno.EINVAL)
            qp.move(attr.qp_state)
            qp.is_draining = attr.qp_state == lib.IBV_QPS_SQD
            if mask & lib.IBV_QP_RETRY_CNT:
                qp.retry_count = attr.retry_cnt
        else:
            qp.move(attr.qp_state)
            if qp.state in (lib.IBV_QPS_RTR, lib.IBV_QPS_RTS):
                world.network.find_peer(qp, attr.dest_qp_num)
    elif qp.device.is_iwarp or qp.state not in (lib.IBV_QPS_RTR, lib.IBV_QPS_RTS):
        raise Failure(errno.EINVAL)  # the only other attribute is the RNR timer


def ibv_query_qp(world: World, pointer: Any, attr: Any, mask: int, init: Any) -> None:
    attr.qp_state = world.get(pointer, QueuePair).state


def ibv_destroy_qp(world: World, pointer: Any) -> None:
    qp = world.get(pointer, QueuePair)
    if qp.groups:
        raise Failure(errno.EBUSY)
    world.remove(pointer, QueuePair)
    qp.is_destroyed = True
    qp.in_flight.clear()
    if qp.device.drops_completions:
        lib.sim_drop_completions(qp.pointer)
    lib.sim_free_qp(qp.pointer)
    qp.pointer = None


define_all(globals())
