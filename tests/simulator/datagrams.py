"""Simulated datagrams: address handles, the SIDR exchange, multicast groups, and their delivery.

SIDR is the exchange in which a datagram id asks for the queue pair number of a peer.
"""

from __future__ import annotations

import errno
import ipaddress
import struct
from collections import defaultdict
from functools import partial
from typing import Any

from simulator.cm import CONNECT_TIMEOUT, Event, Id, get_id, private_data, read_address
from simulator.network import Network, RequestFailed
from simulator.verbs import AddressHandle, Device, Domain, QueuePair, Request, gid_of
from simulator.world import Failure, World, address_of, define_all, ffi, lib

SIDR_NO_LISTENER = 1
SIDR_REJECTED = 2
GROUP_QP = 0xFFFFFF
GRH_SIZE = 40
ENOTSUPP = 524
_MAPPED = bytes(10) + b"\xff\xff"
_REQUEST_SIZE = 180
_REPLY_SIZE = 136


class Datagrams:
    """The datagram queue pairs of the network, and their groups."""

    def __init__(self, world: World, network: Network) -> None:
        self.world = world
        self.network = network
        self.groups: defaultdict[bytes, list[QueuePair]] = defaultdict(list)
        """The queue pairs that receive the datagrams of each group, by gid."""
        self.joined: defaultdict[Id, dict[str, Any]] = defaultdict(dict)
        """The groups of each id by address, with the argument of the call that joined it."""
        world.datagrams = self

    # --- SIDR ---

    def connect(self, active: Id, param: Any) -> None:
        """Send a request for the queue pair number of the peer."""
        data = private_data(param, _REQUEST_SIZE)
        active.state = "connecting"
        self.world.cm.send(partial(self._request, active, data))

    def _request(self, active: Id, data: bytes) -> None:
        cm, host = self.world.cm, active.remote[0]
        if active.is_destroyed:
            return
        self.world.after(CONNECT_TIMEOUT, partial(self._refused, active, -errno.ETIMEDOUT, b""))
        if host in cm.unreachable or cm.device_at(host) is None:
            return
        listener = cm.listener_at(active)
        if listener is None or cm.is_full(listener):
            self._refused(active, SIDR_NO_LISTENER, b"")
            return
        passive = cm.passive_id(active, listener)
        kind, data = lib.RDMA_CM_EVENT_CONNECT_REQUEST, data.ljust(_REQUEST_SIZE, b"\0")
        listener.channel.put(Event(passive, kind, private_data=data, listener=listener))

    def _refused(self, active: Id | None, status: int, data: bytes) -> None:
        if active is not None and active.state == "connecting":
            active.state = "failed"
            data = data.ljust(_REPLY_SIZE, b"\0") if status > 0 else b""
            active.put(lib.RDMA_CM_EVENT_UNREACHABLE, status=status, private_data=data)

    def accept(self, passive: Id, param: Any) -> None:
        """Answer a request with a queue pair number."""
        data = private_data(param, _REPLY_SIZE)
        number = passive.qp.number if passive.qp is not None else param.qp_num
        passive.state = "connected"
        self.world.cm.send(partial(self._answered, passive, number, data))

    def _answered(self, passive: Id, number: int, data: bytes) -> None:
        active = passive.peer
        if active is not None and active.state == "connecting":
            active.state = "connected"
            active.put(
                lib.RDMA_CM_EVENT_ESTABLISHED,
                private_data=data.ljust(_REPLY_SIZE, b"\0"),
                destination=(gid_of(active.remote[0]), number),
            )

    def reject(self, passive: Id, data: bytes) -> None:
        """Reject a request."""
        passive.state = "rejected"
        self.world.cm.send(partial(self._refused, passive.peer, SIDR_REJECTED, data))

    def leave(self, cm_id: Id) -> None:
        """Reject the request of an id that is destroyed, and leave its groups."""
        if cm_id.state == "requested":
            self.reject(cm_id, b"")
        for host in self.joined.pop(cm_id, {}):
            self.detach(cm_id.qp, gid_of(host))

    # --- groups ---

    def join(self, cm_id: Id, host: str, context: Any, *, receives: bool) -> None:
        """Join a group: rdma_join_multicast_ex(3)."""
        if not cm_id.is_datagram or cm_id.state not in ("bound", "address resolved"):
            raise Failure(errno.EINVAL)
        assert cm_id.device is not None
        Device.of(cm_id.device.pointer)
        if ipaddress.ip_address(host).version == 6:
            raise Failure(ENOTSUPP)
        self.joined[cm_id][host] = context
        self.world.cm.send(partial(self._joined, cm_id, host, receives))

    def _joined(self, cm_id: Id, host: str, receives: bool) -> None:
        if host in self.joined.get(cm_id, {}):
            cm_id.put(
                lib.RDMA_CM_EVENT_MULTICAST_JOIN,
                destination=(gid_of(host), GROUP_QP),
                context=self.joined[cm_id][host],
                on_read=partial(self.attach, cm_id.qp, gid_of(host)) if receives else lambda: None,
            )

    def end_membership(self, host: str) -> None:
        """End the membership of all ids in a group, as a subnet manager can."""
        for cm_id, groups in self.joined.items():
            if host in groups:
                kind = lib.RDMA_CM_EVENT_MULTICAST_ERROR
                cm_id.put(kind, status=-errno.ENETRESET, context=groups[host])

    def attach(self, qp: QueuePair | None, gid: bytes) -> None:
        """Let a queue pair receive the datagrams of a group."""
        if qp is not None and gid not in qp.groups:
            qp.groups.add(gid)
            self.groups[gid].append(qp)

    def detach(self, qp: QueuePair | None, gid: bytes) -> None:
        """Undo attach()."""
        if qp is not None and gid in qp.groups:
            qp.groups.remove(gid)
            self.groups[gid].remove(qp)

    # --- delivery ---

    def send(self, qp: QueuePair, request: Request) -> None:
        """Deliver a datagram. It is lost if the receiver has posted no receive."""
        handle = self.world.objects.get(address_of(request.ah))
        if not isinstance(handle, AddressHandle) or handle.domain is not qp.domain:
            raise RequestFailed(lib.IBV_WC_LOC_QP_OP_ERR)
        data = self.network.gather(qp, request)
        number, key = request.ud
        if handle.gid in self.groups:
            receivers = list(self.groups[handle.gid])
        else:
            receivers = [
                one
                for one in self.world.all(QueuePair)
                if one.number == number and handle.gid in map(gid_of, one.device.hosts)
            ]
        for receiver in receivers:
            if key == lib.RDMA_UDP_QKEY and receiver.state == lib.IBV_QPS_RTS:
                self._deliver(qp, receiver, request, handle.gid, data)

    def _deliver(
        self, sender: QueuePair, receiver: QueuePair, request: Request, gid: bytes, data: bytes
    ) -> None:
        receive = receiver.take_receive()
        if receive is None:
            return
        version = 4 if gid.startswith(_MAPPED) else 6
        source = next(h for h in sender.device.hosts if ipaddress.ip_address(h).version == version)
        message = header(gid_of(source), gid) + data
        flags = lib.IBV_WC_GRH
        if request.opcode == lib.IBV_WR_SEND_WITH_IMM:
            flags |= lib.IBV_WC_WITH_IMM
        status = lib.IBV_WC_SUCCESS
        if len(message) > receive.length:
            status = lib.IBV_WC_LOC_LEN_ERR
        else:
            self.network.scatter(receiver, receive, message)
        receiver.complete_receive(
            receive,
            status,
            byte_len=len(message),
            wc_flags=flags,
            imm_data=request.imm_data,
            src_qp=sender.number,
        )


def header(
    source: bytes,
    destination: bytes,
    *,
    traffic_class: int = 0,
    ident: int = 1,
    front: bytes = bytes(20),
) -> bytes:
    """Return the 40 bytes before a datagram between two gids.

    An IPv4 header is in the last 20 of them. The device does not write the first 20 then: they are
    `front`. `ident` is a field that differs in each datagram.
    """
    if not destination.startswith(_MAPPED):
        word = 6 << 28 | traffic_class << 20 | 0x12345
        return struct.pack("!IHBB", word, ident, 17, 64) + source + destination
    fields = [0x45, traffic_class, 1100, ident, 0x4000, 64, 17, 0]
    addresses = source[12:] + destination[12:]
    total = sum(struct.unpack("!10H", struct.pack("!BBHHHBBH", *fields) + addresses))
    while total > 0xFFFF:
        total = (total & 0xFFFF) + (total >> 16)
    fields[-1] = 0xFFFF - total
    return front + struct.pack("!BBHHHBBH", *fields) + addresses


# --- the functions of the libraries ---


def ibv_create_ah(world: World, pd: Any, attr: Any) -> Any:
    domain = world.get(pd, Domain)
    gid = bytes(ffi.buffer(attr.grh.dgid.raw, 16))
    is_group = gid[0] == 0xFF or (gid.startswith(_MAPPED) and 224 <= gid[12] < 240)
    if not is_group and not any(gid in map(gid_of, d.hosts) for d in world.cm.devices):
        raise Failure(errno.ETIMEDOUT)
    pointer = ffi.new("struct ibv_ah *")
    pointer.context, pointer.pd = pd.context, pd
    return world.add(pointer, AddressHandle(domain, pointer, gid))


def ibv_destroy_ah(world: World, ah: Any) -> None:
    handle = world.remove(ah, AddressHandle)
    address = address_of(ah)
    for qp in world.all(QueuePair):
        if any(address_of(request.ah) == address for request in qp.in_flight if request.ah):
            world.violate(f"an address handle was destroyed while a send used it: {handle}")


def ibv_init_ah_from_wc(
    world: World, context: Any, port: int, wc: Any, grh: Any, attr: Any
) -> None:
    own = [gid_of(host) for host in Device.of(context).hosts]
    raw = bytes(ffi.buffer(ffi.cast("char *", grh), GRH_SIZE))
    is_ipv6 = raw[0] >> 4 == 6
    gids = (raw[8:24], raw[24:]) if is_ipv6 else (_MAPPED + raw[32:36], _MAPPED + raw[36:])
    if gids[1] not in own:
        raise Failure(errno.EINVAL)
    attr.is_global, attr.port_num, attr.grh.hop_limit = 1, port, 255
    attr.grh.sgid_index = own.index(gids[1])
    ffi.memmove(attr.grh.dgid.raw, gids[0], 16)


def rdma_join_multicast(world: World, pointer: Any, sockaddr: Any, context: Any) -> None:
    cm_id = get_id(world, pointer)
    if cm_id.is_iwarp:
        raise Failure(errno.ENOSYS)
    world.datagrams.join(cm_id, read_address(sockaddr)[0], context, receives=True)


def rdma_join_multicast_ex(world: World, pointer: Any, attr: Any, context: Any) -> None:
    host = read_address(attr.addr)[0]
    world.datagrams.join(get_id(world, pointer), host, context, receives=False)


def rdma_leave_multicast(world: World, pointer: Any, sockaddr: Any) -> None:
    cm_id, host = world.get(pointer, Id), read_address(sockaddr)[0]
    if world.datagrams.joined[cm_id].pop(host, None) is None:
        raise Failure(errno.EADDRNOTAVAIL)
    if cm_id.unacknowledged:
        world.violate("rdma_leave_multicast() would wait for ever")
    world.datagrams.detach(cm_id.qp, gid_of(host))


def ibv_attach_mcast(world: World, pointer: Any, gid: Any, lid: int) -> None:
    qp = world.get(pointer, QueuePair)
    if qp.qp_type != lib.IBV_QPT_UD:
        raise Failure(errno.EINVAL)
    world.datagrams.attach(qp, bytes(ffi.buffer(gid.raw, 16)))


def ibv_detach_mcast(world: World, pointer: Any, gid: Any, lid: int) -> None:
    qp, group = world.get(pointer, QueuePair), bytes(ffi.buffer(gid.raw, 16))
    if group not in qp.groups:
        raise Failure(errno.EINVAL)
    world.datagrams.detach(qp, group)


define_all(globals())
