"""The simulated librdmacm: ids, their events, and the messages between connecting ids.

The messages are those of the InfiniBand CM: request, reply, ready to use, reject, disconnect. Each
arrives after a latency of the schedule. See reference pages of librdmacm for what each call does.
"""

from __future__ import annotations

import errno
import ipaddress
import itertools
import os
import socket
import struct
import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from simulator import world as worlds
from simulator.verbs import Device, QueuePair, gid_of, ibv_alloc_pd, ibv_dealloc_pd
from simulator.world import Failure, World, address_of, define_all, ffi, lib

CONNECT_TIMEOUT = 60.0
"""Seconds until a device gives up a peer that answers no connection request."""
ANSWER_TIMEOUT = 300.0
"""Seconds until a device gives up a peer whose program does not answer the request."""
TIMEWAIT = 5.0
REJECTED_NO_LISTENER = 8
REJECTED_BY_CONSUMER = 28
_IB_SIZES = {"request": 56, "reply": 196, "reject": 148}
_MAX_PRIVATE_DATA = 251
_PATH_SIZE = 72
"""The size of struct ibv_path_data."""
_SIW_VENDOR_ID = 0x626D74
_REUSE = (lib.RDMA_OPTION_ID, lib.RDMA_OPTION_ID_REUSEADDR)
_WILDCARDS = {"0.0.0.0": 4, "::": 6}

Address = tuple[str, int]


@dataclass(eq=False)
class Channel:
    """An event channel and its events, oldest first."""

    pointer: Any
    events: deque[Event] = field(default_factory=deque)
    failure: int = 0
    """The errno of reading, if not 0. The descriptor then stays readable."""

    def put(self, event: Event) -> None:
        """Add an event. The descriptor becomes readable."""
        self.events.append(event)
        lib.sim_wake(self.pointer.fd)

    def take(self) -> Event:
        """Remove the oldest event.

        Raises:
            Failure: EAGAIN, there is none; or reading fails.
        """
        if self.failure:
            raise Failure(self.failure)
        try:
            os.eventfd_read(self.pointer.fd)
        except BlockingIOError:
            raise Failure(errno.EAGAIN) from None
        return self.events.popleft()

    def remove(self, unwanted: Callable[[Event], bool]) -> list[Event]:
        """Remove and return all events that `unwanted` selects."""
        removed = [event for event in self.events if unwanted(event)]
        for event in removed:
            self.events.remove(event)
            os.eventfd_read(self.pointer.fd)
        return removed


@dataclass(eq=False)
class Event:
    """An rdma_cm event."""

    cm_id: Id
    kind: int
    status: int = 0
    private_data: bytes = b""
    listener: Id | None = None
    resources: tuple[int, int] = (0, 0)
    """responder_resources and initiator_depth."""
    destination: tuple[bytes, int] | None = None
    """The gid and the queue pair number of a datagram peer or of a group."""
    context: Any = None
    """The argument of the call that joined a group."""
    on_read: Callable[[], None] = lambda: None
    pointer: Any = None

    @property
    def counted(self) -> Id:
        """The id that counts the event until it is acknowledged."""
        return self.listener or self.cm_id


@dataclass(eq=False)
class Id:
    """A communication identifier."""

    world: World
    pointer: Any
    channel: Channel
    device: Device | None = None
    state: str = "idle"
    local: Address = ("", 0)
    remote: Address = ("", 0)
    peer: Id | None = None
    listener: Id | None = None
    backlog: int = 0
    unacknowledged: int = 0
    is_destroyed: bool = False
    is_bound: bool = False
    owns_channel: bool = False
    """True if the id was made by rdma_create_ep(), with a channel of its own."""
    ece: tuple[int, int, int] = (0, 0, 0)
    """The options of rdma_set_local_ece()."""
    given_number: int = 0
    """The number of a queue pair that librdmacm did not make."""
    options: dict[tuple[int, int], int] = field(default_factory=dict)
    """The values of rdma_set_option(), by level and name."""
    retry_count: int = 7
    """The retry count that the connecting side has chosen for both sides."""
    path: Any = None
    """The path record of the route."""
    asked: tuple[int, int] = (0, 0)
    """The responder_resources and initiator_depth of rdma_connect()."""

    @property
    def is_iwarp(self) -> bool:
        """True if the id is bound to an iWARP device."""
        return self.device is not None and self.device.is_iwarp

    @property
    def is_datagram(self) -> bool:
        """True if the id is for datagrams."""
        return bool(self.pointer.qp_type == lib.IBV_QPT_UD)

    @property
    def number(self) -> int:
        """The number of the queue pair, as the peer gets it."""
        return self.qp.number if self.qp is not None else self.given_number

    @property
    def qp(self) -> QueuePair | None:
        """The queue pair of the id, if it exists."""
        pointer = self.pointer.qp
        found = self.world.objects.get(address_of(pointer))
        return found if isinstance(found, QueuePair) else None  # the address can be used again

    def put(self, kind: int, **more: Any) -> None:
        """Add an event of this id to its channel. A request has no events until it is accepted."""
        if self.is_destroyed or self.state in ("requested", "removed"):
            return
        if kind in self.world.cm.held:
            self.world.cm.held[kind].append(partial(self.put, kind, **more))
        else:
            self.channel.put(Event(self, kind, **more))

    def set_addresses(self) -> None:
        """Store both addresses in the C struct."""
        address = self.pointer.route.addr
        for (host, port), member, gid in (
            (self.local, address.src_storage, address.addr.ibaddr.sgid),
            (self.remote, address.dst_storage, address.addr.ibaddr.dgid),
        ):
            if host:
                packed = pack_address(host, port)
                ffi.memmove(ffi.addressof(member), packed, len(packed))
                ffi.memmove(gid.raw, gid_of(host), 16)

    def bind_device(self, device: Device) -> None:
        """Bind the id to a device."""
        self.device = device
        self.pointer.verbs = device.pointer
        self.pointer.port_num = 1
        self.pointer.pd = self.world.cm.default_domain(device)


class ConnectionManager:
    """The network's connection managers: ports, and the messages between ids."""

    def __init__(self, world: World, devices: list[Device]) -> None:
        self.world = world
        self.devices = devices
        self.listeners: list[Id] = []
        self.unreachable: set[str] = set()
        """Hosts that answer nothing."""
        self.lose_ready = False
        """True: the message "ready to use" is lost."""
        self.held: dict[int, list[Callable[[], None]]] = {}
        """The types of events that are held back, with the events. See hold() and release()."""
        self.memory_of_next_id: Any = None
        """The memory of a destroyed id, which the next one gets."""
        self.default_domains: dict[Device, Any] = {}
        self.ports: Iterator[int] = itertools.count(32768)
        world.cm = self

    def device_at(self, host: str) -> Device | None:
        """Return the device with this address."""
        return next((d for d in self.devices if host in d.hosts and not d.removed), None)

    def default_domain(self, device: Device) -> Any:
        """Return librdmacm's protection domain for a device. The first call makes it."""
        if device not in self.default_domains:
            made = ibv_alloc_pd(self.world, device.pointer)
            self.default_domains[device] = made
        return self.default_domains[device]

    def free_default_domains(self) -> None:
        """Free these domains, as librdmacm does when it closes a device."""
        while self.default_domains:
            _, domain = self.default_domains.popitem()
            try:
                ibv_dealloc_pd(self.world, domain)
            except Failure:
                self.world.violate("a default protection domain was freed while it was used")

    # --- tests use these ---

    def id_of(self, cm_id: Any) -> Id:
        """Return the simulated id of an AsyncCmId, of a SyncCmId or of a CmId."""
        found = self.world.objects[getattr(cm_id, "cm_id", cm_id).address]
        assert isinstance(found, Id)
        return found

    def put(self, cm_id: Any, kind: int, **more: Any) -> None:
        """Raise an event of an AsyncCmId or of a SyncCmId now, in whichever state it is."""
        self.id_of(cm_id).put(kind, **more)

    def hold(self, *kinds: int) -> None:
        """Hold back all events of these types until release()."""
        self.held.update((kind, []) for kind in kinds)

    def release(self) -> None:
        """Raise the events that were held back, in their order, and hold back no more."""
        held, self.held = self.held, {}
        for events in held.values():
            for put in events:
                put()

    def fail_channels(self, *channels: Channel) -> None:
        """Make reading these event channels fail from now on, as after a change of credentials."""
        for channel in channels:
            channel.failure = errno.EACCES
            lib.sim_wake(channel.pointer.fd)

    def device_for(self, host: str) -> Device | None:
        """Return the device that leads to a host: another one of the same kind, if there is one."""
        target = self.device_at(host)
        if target is None:
            return next((d for d in self.devices if not d.removed), None)
        for device in self.devices:
            if not (device is target or device.removed) and device.is_iwarp == target.is_iwarp:
                return device
        return target

    def listener_at(self, active: Id) -> Id | None:
        """Return the id that listens where an id wants to connect."""
        host, port = active.remote
        for listener in self.listeners:
            is_here = listener.local[0] == host or _accepts_family(listener, host)
            if is_here and listener.local[1] == port and listener.pointer.ps == active.pointer.ps:
                return listener
        return None

    def send(self, action: Callable[[], None]) -> None:
        """Let a message arrive: call `action` after a latency."""
        self.world.after(self.world.schedule.latency(), action)

    def padded(self, cm_id: Id, kind: str, data: bytes) -> bytes:
        """Return private data as the peer gets it."""
        return data if cm_id.is_iwarp else data.ljust(_IB_SIZES[kind], b"\0")

    # --- connecting ---

    def request(self, active: Id, data: bytes, resources: tuple[int, int]) -> None:
        """Handle the arrival of a connection request."""
        if active.is_destroyed or active.state != "connecting":
            return
        host = active.remote[0]
        if host in self.unreachable or self.device_at(host) is None:
            self.world.after(CONNECT_TIMEOUT, partial(self._time_out, active))
            return
        listener = self.listener_at(active)
        if listener is None or self.is_full(listener):
            self.rejected(active, REJECTED_NO_LISTENER, b"")
            return
        passive = self.passive_id(active, listener)
        active.asked = resources
        data = self.padded(active, "request", data)
        kind = lib.RDMA_CM_EVENT_CONNECT_REQUEST
        listener.channel.put(Event(passive, kind, 0, data, listener, resources[::-1]))
        self.world.after(ANSWER_TIMEOUT, partial(self._time_out, active))

    def passive_id(self, active: Id, listener: Id) -> Id:
        """Make the id of a request."""
        passive = new_id(self.world, listener.channel, listener.pointer.ps)
        passive.state, passive.listener = "requested", listener
        passive.local, passive.remote = active.remote, active.local
        passive.set_addresses()
        device = self.device_at(active.remote[0])
        assert device is not None
        passive.bind_device(device)
        passive.peer, active.peer = active, passive
        passive.retry_count = active.retry_count
        return passive

    def is_full(self, listener: Id) -> bool:
        waiting = sum(event.listener is listener for event in listener.channel.events)
        return 0 < listener.backlog <= waiting

    def _time_out(self, active: Id) -> None:
        if active.state == "connecting":
            active.state = "failed"
            active.put(lib.RDMA_CM_EVENT_UNREACHABLE, status=-errno.ETIMEDOUT)
            if active.peer is not None:
                self.send(partial(self._given_up, active.peer))

    def rejected(self, active: Id, status: int, data: bytes) -> None:
        """Handle the arrival of a rejection."""
        if active.is_destroyed or active.state not in ("connecting", "replied", "connected"):
            return
        active.state = "failed"
        if active.is_iwarp:
            status = -errno.ECONNREFUSED
        data = self.padded(active, "reject", data)
        active.put(lib.RDMA_CM_EVENT_REJECTED, status=status, private_data=data)

    def reply(self, passive: Id, data: bytes, resources: tuple[int, int]) -> None:
        """Handle the arrival of a reply."""
        active = passive.peer
        if active is None or active.is_destroyed or active.state != "connecting":
            return
        active.state = "replied"
        has_qp = active.pointer.qp != ffi.NULL
        kind = lib.RDMA_CM_EVENT_ESTABLISHED if has_qp else lib.RDMA_CM_EVENT_CONNECT_RESPONSE
        active.put(
            kind,
            private_data=self.padded(active, "reply", data),
            resources=_resources_at(active, resources),
            on_read=partial(self._replied, active) if has_qp else lambda: None,
        )
        if active.is_iwarp:
            self._replied(active)

    def _replied(self, active: Id) -> None:
        """Move the queue pair of the active side, and send the message "ready to use"."""
        if active.state == "replied" and active.peer is not None:
            self.establish(active, active.peer)

    def establish(self, active: Id, passive: Id) -> None:
        """Send the message "ready to use". The queue pair of the active side can send now."""
        active.state = "connected"
        join(active, passive)
        move_to_ready(active)
        self.send(partial(self.ready, passive))

    def ready(self, passive: Id) -> None:
        """Handle the arrival of "ready to use"."""
        if passive.state == "accepting" and not (passive.is_destroyed or self.lose_ready):
            passive.state = "connected"
            passive.put(lib.RDMA_CM_EVENT_ESTABLISHED)

    def first_message(self, qp: QueuePair) -> None:
        """Raise COMM_EST if the first message arrives before "ready to use"."""
        cm_id = qp.cm_id
        if cm_id is not None and cm_id.state == "accepting" and not qp.device.is_iwarp:
            qp.device.raise_event(lib.IBV_EVENT_COMM_EST, ffi.addressof(qp.pointer.qp))

    # --- ending ---

    def disconnected(self, cm_id: Id, status: int = 0) -> None:
        """Handle the arrival of a disconnect request, or of the answer to one."""
        if cm_id.is_destroyed or cm_id.state not in ("connected", "accepting", "disconnecting"):
            return
        if cm_id.state != "disconnecting" and cm_id.peer is not None:
            self.send(partial(self.disconnected, cm_id.peer))
        cm_id.state = "disconnected"
        if cm_id.is_iwarp and cm_id.qp is not None:
            self.world.network.fail_queue_pair(cm_id.qp)
        cm_id.put(lib.RDMA_CM_EVENT_DISCONNECTED, status=status)
        if not cm_id.is_iwarp:
            self.world.after(TIMEWAIT, partial(cm_id.put, lib.RDMA_CM_EVENT_TIMEWAIT_EXIT))

    def connection_lost(self, qp: QueuePair) -> None:
        """End the connection of an iWARP queue pair that was terminated."""
        for end in (qp, qp.peer):
            if end is not None and end.cm_id is not None:
                self.send(partial(self.disconnected, end.cm_id))

    def leave(self, cm_id: Id) -> None:
        """Notify the peer of an id that is destroyed."""
        peer = cm_id.peer
        if cm_id in self.listeners:
            self.listeners.remove(cm_id)
            for event in cm_id.channel.remove(lambda event: event.listener is cm_id):
                destroy(self.world, event.cm_id)
        if cm_id.is_datagram:
            self.world.datagrams.leave(cm_id)
            return
        if peer is None:
            return
        if cm_id.state in ("requested", "accepting"):
            self.send(partial(self.rejected, peer, REJECTED_BY_CONSUMER, b""))
        elif cm_id.state in ("connecting", "replied"):
            self.send(partial(self._given_up, peer))
        elif cm_id.state == "connected":
            self.send(partial(self.disconnected, peer))

    def _given_up(self, passive: Id) -> None:
        """Handle the arrival of the message that the active side has given up."""
        if passive.state == "requested":
            passive.state = "idle"
        elif passive.state == "accepting":
            passive.state = "failed"
            passive.put(lib.RDMA_CM_EVENT_REJECTED, status=REJECTED_BY_CONSUMER)

    # --- devices ---

    def remove_device(self, device: Device) -> None:
        """Remove a device: all its ids get DEVICE_REMOVAL, and its calls fail.

        The kernel then destroys its ids of the device, which notifies the peers.
        """
        device.removed = True
        device.context.failure = errno.EIO
        lib.sim_wake(device.pointer.async_fd)
        for cm_id in self.world.all(Id):
            if cm_id.device is device:
                cm_id.put(lib.RDMA_CM_EVENT_DEVICE_REMOVAL)
                self.send(partial(self._removed, cm_id))

    def _removed(self, cm_id: Id) -> None:
        """Let the kernel destroy its part of an id. Only rdma_destroy_id() succeeds afterwards."""
        if not cm_id.is_destroyed:
            self.leave(cm_id)
            cm_id.state = "removed"

    def add_again(self, device: Device) -> None:
        """Add a device that was removed. It has a new context."""
        self.devices.append(Device(device.name, *device.hosts, iwarp=device.is_iwarp))

    def set_link(self, device: Device, *, is_up: bool) -> None:
        """Set the port of a device up or down. The connections of an iWARP device end with it."""
        device.port_state = lib.IBV_PORT_ACTIVE if is_up else lib.IBV_PORT_DOWN
        kind = lib.IBV_EVENT_PORT_ACTIVE if is_up else lib.IBV_EVENT_PORT_ERR
        device.raise_event(kind, port_num=1)
        for qp in self.world.all(QueuePair):
            if qp.device is device and device.is_iwarp and not is_up:
                self.world.network.terminate(qp)


def join(active: Id, passive: Id) -> None:
    """Connect the queue pairs of two ids."""
    near, far = active.qp, passive.qp
    if near is not None and far is not None:
        near.peer, far.peer = far, near


def move_to_ready(cm_id: Id) -> None:
    """Move the queue pair of an id to the state in which it can send."""
    qp = cm_id.qp
    if qp is not None and qp.state != lib.IBV_QPS_ERR:
        qp.move(lib.IBV_QPS_RTS)
        qp.retry_count = cm_id.retry_count


def new_id(world: World, channel: Channel, port_space: int) -> Id:
    """Make an id on a channel."""
    pointer = world.cm.memory_of_next_id or ffi.new("struct rdma_cm_id *")
    world.cm.memory_of_next_id = None
    ffi.buffer(pointer)[:] = bytes(ffi.sizeof("struct rdma_cm_id"))
    pointer.channel, pointer.ps = channel.pointer, port_space
    is_datagram = port_space in (lib.RDMA_PS_UDP, lib.RDMA_PS_IPOIB)
    pointer.qp_type = lib.IBV_QPT_UD if is_datagram else lib.IBV_QPT_RC
    made = Id(world, pointer, channel)
    world.add(pointer, made)
    return made


def get_id(world: World, pointer: Any, *states: str, code: int = errno.EINVAL) -> Id:
    """Return the id of a C pointer. `states` are those in which the call is allowed.

    Raises:
        Failure: ENXIO, the device of the id was removed; EINVAL, the id does not exist; or `code`,
            the id is in another state.
    """
    cm_id = world.get(pointer, Id)
    assert isinstance(cm_id, Id)
    if cm_id.state == "removed":
        raise Failure(errno.ENXIO)
    if states and cm_id.state not in states:
        raise Failure(code)
    return cm_id


def private_data(param: Any, limit: int) -> bytes:
    """Return the private data of a call. Raises: Failure, EINVAL: it is too long."""
    if param == ffi.NULL or not param.private_data_len:
        return b""
    if param.private_data_len > limit:
        raise Failure(errno.EINVAL)
    return bytes(ffi.buffer(param.private_data, param.private_data_len))


def destroy(world: World, cm_id: Id) -> None:
    """Destroy an id."""
    if cm_id.pointer.event != ffi.NULL:
        rdma_ack_cm_event(world, cm_id.pointer.event)
    if cm_id.unacknowledged:
        world.violate("rdma_destroy_id() would wait for ever for an acknowledgement")
    world.remove(cm_id.pointer, Id)
    world.cm.leave(cm_id)
    cm_id.channel.remove(lambda event: event.cm_id is cm_id)
    cm_id.is_destroyed = True
    cm_id.state = "destroyed"
    if cm_id.owns_channel:
        rdma_destroy_event_channel(world, cm_id.channel.pointer)


# --- channels and events ---


def rdma_create_event_channel(world: World) -> Any:
    if not any(not device.removed for device in world.cm.devices):
        raise Failure(errno.ENODEV)
    pointer = ffi.new("struct rdma_event_channel *")
    try:
        pointer.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK | os.EFD_SEMAPHORE)
    except OSError as error:
        raise Failure(error.errno or errno.EMFILE) from None
    return world.add(pointer, Channel(pointer))


def rdma_destroy_event_channel(world: World, pointer: Any) -> None:
    channel = world.remove(pointer, Channel)
    if any(cm_id.channel is channel for cm_id in world.all(Id)):
        world.violate("an event channel was destroyed before an id on it")
    os.close(channel.pointer.fd)


def rdma_get_cm_event(world: World, pointer: Any, out: Any) -> None:
    event = world.get(pointer, Channel).take()
    event.on_read()
    raw = ffi.new("struct rdma_cm_event *")
    data = ffi.new("char[]", event.private_data)
    raw.id, raw.event, raw.status = event.cm_id.pointer, event.kind, event.status
    raw.listen_id = event.listener.pointer if event.listener is not None else ffi.NULL
    is_ud = event.cm_id.is_datagram
    param = raw.param.ud if is_ud else raw.param.conn
    param.private_data = data if event.private_data else ffi.NULL
    param.private_data_len = len(event.private_data)
    if event.context is not None:
        param.private_data = event.context
    if not is_ud:
        param.responder_resources, param.initiator_depth = event.resources
        param.retry_count = event.cm_id.retry_count
        param.qp_num = event.cm_id.peer.number if event.cm_id.peer is not None else 0
    elif event.destination is not None:
        gid, param.qp_num = event.destination
        param.qkey, param.ah_attr.is_global, param.ah_attr.port_num = lib.RDMA_UDP_QKEY, 1, 1
        ffi.memmove(param.ah_attr.grh.dgid.raw, gid, 16)
    event.pointer = (raw, data)
    event.counted.unacknowledged += 1
    world.add(raw, event)
    out[0] = raw


def rdma_ack_cm_event(world: World, pointer: Any) -> None:
    world.remove(pointer, Event).counted.unacknowledged -= 1


# --- ids ---


def rdma_create_id(world: World, channel: Any, out: Any, context: Any, port_space: int) -> None:
    out[0] = new_id(world, world.get(channel, Channel), port_space).pointer


def rdma_destroy_id(world: World, pointer: Any) -> None:
    destroy(world, world.get(pointer, Id))


def rdma_migrate_id(world: World, pointer: Any, channel: Any) -> None:
    cm_id, new = get_id(world, pointer), world.get(channel, Channel)
    if cm_id.unacknowledged:
        world.violate("rdma_migrate_id() would wait for ever for an acknowledgement")
    moved = cm_id.channel.remove(lambda event: event.counted is cm_id)
    old, cm_id.channel, cm_id.pointer.channel = cm_id.channel, new, channel
    for event in moved:
        new.put(event)
    if cm_id.owns_channel:
        rdma_destroy_event_channel(world, old.pointer)
        cm_id.owns_channel = False


def rdma_set_option(
    world: World, pointer: Any, level: int, name: int, value: Any, size: int
) -> None:
    cm_id = get_id(world, pointer)
    packed = bytes(ffi.buffer(ffi.cast("char *", value), size))
    if level == lib.RDMA_OPTION_ID:
        if name == lib.RDMA_OPTION_ID_AFONLY and cm_id.state not in ("idle", "bound"):
            raise Failure(errno.EINVAL)
        cm_id.options[level, name] = int.from_bytes(packed, sys.byteorder)
    elif cm_id.state != "address resolved" or size % _PATH_SIZE:
        raise Failure(errno.EINVAL)
    else:
        rdma_resolve_route(world, pointer, 0)


def pack_address(host: str, port: int) -> bytes:
    """Return the bytes of a struct sockaddr."""
    address = ipaddress.ip_address(host)
    if address.version == 4:
        return struct.pack("=H", socket.AF_INET) + struct.pack(">H4s8x", port, address.packed)
    return struct.pack("=H", socket.AF_INET6) + struct.pack(">HI16sI", port, 0, address.packed, 0)


def read_address(sockaddr: Any) -> Address:
    """Return host and port of a struct sockaddr."""
    if sockaddr == ffi.NULL:
        return "", 0
    pointer = ffi.cast("char *", sockaddr)
    family, port = struct.unpack("=H2s", bytes(ffi.buffer(pointer, 4)))
    offset, length = (4, 4) if family == socket.AF_INET else (8, 16)
    host = ipaddress.ip_address(ffi.buffer(pointer + offset, length)[:])
    return str(host), int.from_bytes(port, "big")


def _accepts_family(listener: Id, host: str) -> bool:
    """Return True if an id is bound to all addresses of the family of `host`."""
    wildcard = _WILDCARDS.get(listener.local[0])
    if wildcard == 6 and (lib.RDMA_OPTION_ID, lib.RDMA_OPTION_ID_AFONLY) not in listener.options:
        return True
    return wildcard == ipaddress.ip_address(host).version


def _check_free(cm_id: Id, address: Address, *, can_share: bool = True) -> None:
    """Check that an id can be bound to an address. Ids can share it until one of them listens.

    Raises:
        Failure: EADDRINUSE or EADDRNOTAVAIL, the port is in use.
    """
    for other in cm_id.world.all(Id):
        is_same = (other.local[1], other.pointer.ps) == (address[1], cm_id.pointer.ps)
        if other is cm_id or not other.is_bound or not is_same:
            continue
        share = can_share and _REUSE in other.options and _REUSE in cm_id.options
        if share and other.state != "listening":
            continue
        if other.local == address:
            raise Failure(errno.EADDRINUSE)
        if _accepts_family(other, address[0]):
            raise Failure(errno.EADDRNOTAVAIL)


def rdma_bind_addr(world: World, pointer: Any, sockaddr: Any) -> None:
    _bind(world, get_id(world, pointer, "idle"), read_address(sockaddr))


def _bind(world: World, cm_id: Id, address: Address) -> None:
    host, port = address
    device = world.cm.device_at(host)
    if host not in _WILDCARDS and device is None:
        raise Failure(errno.ENODEV)
    if port:
        _check_free(cm_id, address)
    cm_id.local = (host, port or next(world.cm.ports))
    cm_id.is_bound = True
    cm_id.state = "bound"
    cm_id.set_addresses()
    if device is not None:
        cm_id.bind_device(device)


def rdma_resolve_addr(world: World, pointer: Any, source: Any, target: Any, timeout: int) -> None:
    cm_id = get_id(world, pointer, "idle", "bound")
    if cm_id.state == "idle" and source != ffi.NULL and read_address(source)[0]:
        _bind(world, cm_id, read_address(source))
    cm_id.remote = read_address(target)
    device = cm_id.device or world.cm.device_for(cm_id.remote[0])
    if device is None:
        raise Failure(errno.ENODEV)
    cm_id.state = "resolving"
    host = cm_id.remote[0]
    if world.cm.device_at(host) is None and host not in world.cm.unreachable:
        world.after(timeout / 1000, partial(_fail_address, cm_id, errno.ETIMEDOUT))
    else:
        world.cm.send(partial(_address_resolved, cm_id, device))


def _fail_address(cm_id: Id, code: int) -> None:
    if cm_id.state == "resolving":
        cm_id.state = "bound"
        cm_id.put(lib.RDMA_CM_EVENT_ADDR_ERROR, status=-code)


def _address_resolved(cm_id: Id, device: Device) -> None:
    if cm_id.state != "resolving":
        return
    if device.removed:
        _fail_address(cm_id, errno.ENODEV)
        return
    cm_id.state = "address resolved"
    if not cm_id.local[1]:
        version = ipaddress.ip_address(cm_id.remote[0]).version
        host = next(h for h in device.hosts if ipaddress.ip_address(h).version == version)
        cm_id.local = (host, next(cm_id.world.cm.ports))
    cm_id.set_addresses()
    cm_id.bind_device(device)
    cm_id.put(lib.RDMA_CM_EVENT_ADDR_RESOLVED)


def rdma_resolve_route(world: World, pointer: Any, timeout: int) -> None:
    cm_id = get_id(world, pointer, "address resolved")
    cm_id.state = "resolving route"
    world.cm.send(partial(_route_resolved, cm_id))


def _route_resolved(cm_id: Id) -> None:
    if cm_id.state == "resolving route":
        route = cm_id.pointer.route
        if not cm_id.is_iwarp:
            cm_id.path = route.path_rec = ffi.new("struct ibv_sa_path_rec[1]")
            route.num_paths = 1
            gids = route.addr.addr.ibaddr
            cm_id.path[0].sgid, cm_id.path[0].dgid = gids.sgid, gids.dgid
        cm_id.state = "route resolved"
        cm_id.put(lib.RDMA_CM_EVENT_ROUTE_RESOLVED)


# --- connecting ---


def _resources_at(active: Id, granted: tuple[int, int]) -> tuple[int, int]:
    """Return responder_resources and initiator_depth of a reply's event.

    siw exchanges them, and limits both to the numbers that it has asked for.
    """
    assert active.device is not None
    if active.device.vendor_id == _SIW_VENDOR_ID:
        responder_resources, initiator_depth = active.asked
        return min(initiator_depth, granted[0]), min(responder_resources, granted[1])
    return (0, 0) if active.is_iwarp else granted[::-1]


def _parameters(cm_id: Id, param: Any, kind: str) -> tuple[bytes, tuple[int, int]]:
    """Return the private data of a call, and responder_resources and initiator_depth."""
    assert cm_id.device is not None
    if param == ffi.NULL:
        depth = cm_id.device.limits.max_qp_rd_atom
        return b"", (depth, depth)
    data = private_data(param, _MAX_PRIVATE_DATA if cm_id.is_iwarp else _IB_SIZES[kind])
    if max(param.responder_resources, param.initiator_depth) > cm_id.device.limits.max_qp_rd_atom:
        raise Failure(errno.EINVAL)
    cm_id.given_number = param.qp_num
    return data, (param.responder_resources, param.initiator_depth)


def rdma_connect(world: World, pointer: Any, param: Any) -> None:
    cm_id = get_id(world, pointer, "route resolved")
    Device.of(pointer.verbs)
    if cm_id.is_datagram:
        world.datagrams.connect(cm_id, param)
        return
    data, resources = _parameters(cm_id, param, "request")
    if cm_id.is_iwarp and cm_id.remote[0] in world.cm.unreachable:
        worlds.park(CONNECT_TIMEOUT)
        raise Failure(errno.ETIMEDOUT)
    if cm_id.is_iwarp and world.cm.listener_at(cm_id) is None:
        raise Failure(errno.ECONNREFUSED)
    cm_id.state = "connecting"
    if param != ffi.NULL:
        cm_id.retry_count = param.retry_count
    world.cm.send(partial(world.cm.request, cm_id, data, resources))


def rdma_listen(world: World, pointer: Any, backlog: int) -> None:
    cm_id = get_id(world, pointer)
    if cm_id.state == "idle":
        _bind(world, cm_id, ("0.0.0.0", 0))
    if cm_id.state != "bound":
        raise Failure(errno.EINVAL)
    if _REUSE in cm_id.options:
        _check_free(cm_id, cm_id.local, can_share=False)
    cm_id.state, cm_id.backlog = "listening", backlog
    world.cm.listeners.append(cm_id)


def rdma_accept(world: World, pointer: Any, param: Any) -> None:
    cm_id = get_id(world, pointer, "requested")
    Device.of(pointer.verbs)
    if cm_id.is_datagram:
        world.datagrams.accept(cm_id, param)
        return
    data, resources = _parameters(cm_id, param, "reply")
    cm_id.state = "accepting"
    if cm_id.peer is not None:
        join(cm_id.peer, cm_id)
    move_to_ready(cm_id)
    world.cm.send(partial(world.cm.reply, cm_id, data, resources))


def rdma_reject(
    world: World, pointer: Any, data: Any, length: int, reason: int = REJECTED_BY_CONSUMER
) -> None:
    cm_id = get_id(world, pointer, "requested")
    text = bytes(ffi.buffer(ffi.cast("char *", data), length)) if length else b""
    if cm_id.is_datagram:
        world.datagrams.reject(cm_id, text)
        return
    cm_id.state = "rejected"
    world.cm.send(partial(world.cm.rejected, cm_id.peer, reason, text))


def rdma_establish(world: World, pointer: Any) -> None:
    cm_id = get_id(world, pointer, "replied")
    assert cm_id.peer is not None
    world.cm.establish(cm_id, cm_id.peer)


def rdma_notify(world: World, pointer: Any, kind: int) -> None:
    cm_id = get_id(world, pointer, "accepting", code=errno.EISCONN)
    world.cm.lose_ready = False
    world.cm.ready(cm_id)


def rdma_disconnect(world: World, pointer: Any) -> None:
    cm_id = get_id(world, pointer)
    if cm_id.device is None:
        raise Failure(errno.EINVAL)
    Device.of(pointer.verbs)
    if cm_id.qp is not None:
        world.network.fail_queue_pair(cm_id.qp)
    if cm_id.state == "connected" and cm_id.peer is not None:
        cm_id.state = "disconnecting"
        if cm_id.peer.is_destroyed:
            world.cm.send(partial(world.cm.disconnected, cm_id))
        else:
            world.cm.send(partial(_disconnect_request, world, cm_id))


def _disconnect_request(world: World, sender: Id) -> None:
    """Handle the arrival of a disconnect request at the peer. It answers in each state."""
    peer = sender.peer
    assert peer is not None
    is_new = peer.state in ("connected", "accepting")
    world.cm.disconnected(peer)
    if not is_new:
        world.cm.send(partial(world.cm.disconnected, sender))


# --- devices ---


def rdma_get_devices(world: World, count: Any) -> Any:
    present = [device.pointer for device in world.cm.devices if not device.removed]
    if not present:
        raise Failure(errno.ENODEV)
    listed = ffi.new("struct ibv_context *[]", [*present, ffi.NULL])
    count[0] = len(present)
    return world.add(listed, listed)


def rdma_free_devices(world: World, listed: Any) -> None:
    world.objects.pop(address_of(listed), None)


define_all(globals())
