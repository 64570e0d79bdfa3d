"""The simulated network: it executes the work requests of connected queue pairs.

The requests of a queue pair are executed in order, and complete in order. A request is executed at
the peer at one moment, and completes at the sender at a later one. Other queue pairs and the
program do something in between, as the schedule decides.
"""

from __future__ import annotations

import struct
from functools import partial

from simulator.verbs import QueuePair, Region, Request, Window, unbind
from simulator.world import World, address_of, ffi, lib

_OPCODES = {
    lib.IBV_WR_SEND: lib.IBV_WC_SEND,
    lib.IBV_WR_SEND_WITH_IMM: lib.IBV_WC_SEND,
    lib.IBV_WR_SEND_WITH_INV: lib.IBV_WC_SEND,
    lib.IBV_WR_RDMA_WRITE: lib.IBV_WC_RDMA_WRITE,
    lib.IBV_WR_RDMA_WRITE_WITH_IMM: lib.IBV_WC_RDMA_WRITE,
    lib.IBV_WR_RDMA_READ: lib.IBV_WC_RDMA_READ,
    lib.IBV_WR_ATOMIC_CMP_AND_SWP: lib.IBV_WC_COMP_SWAP,
    lib.IBV_WR_ATOMIC_FETCH_AND_ADD: lib.IBV_WC_FETCH_ADD,
    lib.IBV_WR_BIND_MW: lib.IBV_WC_BIND_MW,
}
_SENDS = (lib.IBV_WR_SEND, lib.IBV_WR_SEND_WITH_IMM, lib.IBV_WR_SEND_WITH_INV)
_WRITES = (lib.IBV_WR_RDMA_WRITE, lib.IBV_WR_RDMA_WRITE_WITH_IMM)
_ATOMICS = (lib.IBV_WR_ATOMIC_CMP_AND_SWP, lib.IBV_WR_ATOMIC_FETCH_AND_ADD)
_WITH_IMM = (lib.IBV_WR_SEND_WITH_IMM, lib.IBV_WR_RDMA_WRITE_WITH_IMM)
RETRY_SECONDS = 0.5
"""The time after which a device gives up a peer that does not answer."""


class RequestFailed(Exception):
    """A request has failed with this status; `peer_event` is the event at the peer's queue pair."""

    def __init__(self, status: int, peer_event: int | None = None) -> None:
        super().__init__(f"status {status}")
        self.status = status
        self.peer_event = peer_event


class NotReady(Exception):
    """The peer has posted no receive. RoCE repeats the request, iWARP ends the connection."""


class NotConnected(NotReady):
    """The peer's queue pair is not ready yet."""


class Network:
    """The connections between queue pairs, and the requests that are under way."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.is_cut = False
        """True if no message arrives any more."""
        self.read_delay = 0.0
        """Seconds by which reads on iWARP complete later. Later requests complete before them."""
        self.loses_flushes = False
        """True: a queue pair that fails never flushes its requests."""
        world.network = self
        world.before_step.append(self.start_requests)

    def find_peer(self, qp: QueuePair, number: int) -> None:
        """Connect a queue pair to the one with this number."""
        for other in self.world.all(QueuePair):
            if other.number == number:
                qp.peer = other

    # --- executing ---

    def start_requests(self) -> None:
        """Begin to execute what was posted since the last call."""
        for qp in self.world.all(QueuePair):
            has_sends = qp.allowed != 0 and qp.pointer.sends.taken != qp.pointer.sends.posted
            if not qp.is_executing and has_sends:
                self._schedule(qp, self.world.schedule.latency())
            elif qp.is_flushed and not qp.device.is_iwarp:  # siw flushes no later receive
                self._flush_receives(qp)

    def _schedule(self, qp: QueuePair, seconds: float) -> None:
        qp.is_executing = True
        self.world.after(seconds, partial(self._execute_next, qp))

    def _execute_next(self, qp: QueuePair) -> None:
        """Execute the oldest posted request of a queue pair at the peer."""
        if qp.is_destroyed:
            return
        if qp.is_flushed:
            self._flush_sends(qp)
            return
        request = qp.waiting
        if request is None:
            if qp.allowed == 0:
                qp.is_executing = False
                return
            index = qp.pointer.sends.taken
            posted = lib.sim_take(ffi.addressof(qp.pointer.sends))
            if posted == ffi.NULL:
                qp.is_executing = False
                return
            if qp.allowed:
                qp.allowed -= 1
            request = Request(posted, index)
            qp.in_flight.append(request)
        if qp.device.is_iwarp and (self.is_cut or self._is_peer_gone(qp)):
            self._send_into_the_void(qp, request)
            return
        try:
            result = self._execute(qp, request)
        except NotReady as reason:
            if qp.device.is_iwarp and not isinstance(reason, NotConnected):
                self.terminate(qp)
                return
            qp.waiting = request
            self._schedule(qp, qp.rnr_delay)
            return
        except RequestFailed as failure:
            if qp.device.is_iwarp and request.opcode in _WRITES:
                self._complete(qp, request, None)  # before the peer terminates the connection
                self.terminate(qp)
                return
            result = failure
        qp.waiting = None
        latency = self.world.schedule.latency()
        if isinstance(result, RequestFailed):
            if result.status == lib.IBV_WC_RETRY_EXC_ERR:
                latency += RETRY_SECONDS
            self._at(qp, latency, partial(self._fail_request, qp, request, result))
            return  # no later request is executed
        complete = partial(self._complete, qp, request, result)
        if self.read_delay and qp.device.is_iwarp and request.opcode == lib.IBV_WR_RDMA_READ:
            self.world.after(latency + self.read_delay, complete)
        else:
            self._at(qp, latency, complete)
        self._schedule(qp, self.world.schedule.gap())

    def _is_peer_gone(self, qp: QueuePair) -> bool:
        """Return True if the peer has failed, or was destroyed."""
        return not qp.is_connected and (
            qp.peer is None or qp.peer.is_destroyed or qp.peer.state != lib.IBV_QPS_INIT
        )

    def _send_into_the_void(self, qp: QueuePair, request: Request) -> None:
        """Complete a request of iWARP that TCP has taken. A read waits for the reply for ever."""
        if request.opcode != lib.IBV_WR_RDMA_READ:
            self._complete(qp, request, None)
        self._schedule(qp, self.world.schedule.gap())

    def _at(self, qp: QueuePair, latency: float, action: partial[None]) -> None:
        """Make an action happen after this time, and after the earlier completions of the queue."""
        qp.last_completion = max(qp.last_completion, self.world.now + latency)
        self.world.at(qp.last_completion, action)

    def _complete(self, qp: QueuePair, request: Request, result: bytes | None) -> None:
        """Complete a request. `result` is stored in its memory: that of a read or an atomic."""
        if qp.is_destroyed or request not in qp.in_flight:
            return
        try:
            if result is not None:
                self.scatter(qp, request, result)
        except RequestFailed as failure:
            self._fail_request(qp, request, failure)
            return
        qp.in_flight.remove(request)
        if request.flags & lib.IBV_SEND_SIGNALED:
            self._report(qp, request, lib.IBV_WC_SUCCESS)

    def _report(self, qp: QueuePair, request: Request, status: int) -> None:
        qp.send_cq.put(
            qp,
            ffi.addressof(qp.pointer.sends),
            (request.index + 1) & 0xFFFFFFFF,
            wr_id=request.wr_id,
            opcode=_OPCODES[request.opcode],
            status=status,
            byte_len=request.length,
        )

    def _fail_request(self, qp: QueuePair, request: Request, failure: RequestFailed) -> None:
        """Complete a request with an error. The queue pair fails with it."""
        if qp.is_destroyed or request not in qp.in_flight:
            return
        qp.in_flight.remove(request)
        self._report(qp, request, failure.status)
        peer = qp.peer
        if failure.peer_event is not None and peer is not None and not peer.is_destroyed:
            peer.device.raise_event(failure.peer_event, ffi.addressof(peer.pointer.qp))
            self.fail_queue_pair(peer)
        self.fail_queue_pair(qp)

    # --- the end of a queue pair ---

    def fail_queue_pair(self, qp: QueuePair) -> None:
        """Move a queue pair to its error state, and flush its requests."""
        qp.move(lib.IBV_QPS_ERR)
        if qp.is_flushed or self.loses_flushes:
            return
        qp.is_flushed = True
        self._at(qp, self.world.schedule.latency(), partial(self._flush, qp))

    def _flush(self, qp: QueuePair) -> None:
        if qp.is_destroyed:
            return
        self._flush_sends(qp)
        self._flush_receives(qp)
        if qp.shared is not None and qp.device.reports_last_receive:
            queue = qp.recv_cq.pointer
            queue.visible = queue.put
            qp.device.raise_event(lib.IBV_EVENT_QP_LAST_WQE_REACHED, ffi.addressof(qp.pointer.qp))

    def _flush_sends(self, qp: QueuePair) -> None:
        while qp.in_flight:
            self._report(qp, qp.in_flight.popleft(), lib.IBV_WC_WR_FLUSH_ERR)
        while True:
            index = qp.pointer.sends.taken
            posted = lib.sim_take(ffi.addressof(qp.pointer.sends))
            if posted == ffi.NULL:
                break
            self._report(qp, Request(posted, index), lib.IBV_WC_WR_FLUSH_ERR)
        qp.is_executing = False

    def _flush_receives(self, qp: QueuePair) -> None:
        while qp.shared is None and (request := qp.take_receive()) is not None:
            qp.complete_receive(request, lib.IBV_WC_WR_FLUSH_ERR)

    def terminate(self, qp: QueuePair) -> None:
        """End an iWARP connection: both queue pairs fail, and both sides get DISCONNECTED."""
        for end in (qp, qp.peer):
            if end is not None and not end.is_destroyed:
                self.fail_queue_pair(end)
        self.world.cm.connection_lost(qp)

    # --- requests ---

    def _execute(self, qp: QueuePair, request: Request) -> bytes | RequestFailed | None:
        """Execute a request at the peer. Return the data for the sender's memory, if any.

        Raises:
            RequestFailed: the request has failed.
            NotReady: the peer has posted no receive.
        """
        if request.opcode == lib.IBV_WR_BIND_MW:
            self._bind(qp, request)
            return None
        if qp.qp_type == lib.IBV_QPT_UD:
            self.world.datagrams.send(qp, request)
            return None
        if qp.device.is_iwarp and request.opcode in (*_WITH_IMM, *_ATOMICS):
            raise RequestFailed(lib.IBV_WC_LOC_QP_OP_ERR)
        if qp.peer is not None and not qp.peer.is_destroyed and qp.peer.state == lib.IBV_QPS_INIT:
            raise NotConnected
        if not qp.is_connected or self.is_cut:
            raise RequestFailed(lib.IBV_WC_RETRY_EXC_ERR)
        peer = qp.peer
        assert peer is not None
        if request.opcode in _SENDS:
            self._receive(peer, self.gather(qp, request), request)
        elif request.opcode in _WRITES:
            data = self.gather(qp, request)
            if request.opcode in _WITH_IMM and not peer.has_receive:
                raise NotReady
            if data:
                address = self._remote(peer, request, len(data), lib.IBV_ACCESS_REMOTE_WRITE)
                ffi.memmove(ffi.cast("char *", address), data, len(data))
            if request.opcode in _WITH_IMM:
                self._receive(peer, None, request, len(data))
        elif request.opcode == lib.IBV_WR_RDMA_READ:
            if qp.device.is_iwarp and not request.segments:
                self.world.violate("a read without a segment: siw takes that of an older request")
            if not request.length:
                return b""
            address = self._remote(peer, request, request.length, lib.IBV_ACCESS_REMOTE_READ)
            return bytes(ffi.buffer(ffi.cast("char *", address), request.length))
        else:
            return self._atomic(peer, request)
        return None

    def gather(self, qp: QueuePair, request: Request) -> bytes:
        """Return the bytes that a request sends."""
        if request.inline is not None:
            return request.inline
        return b"".join(
            bytes(ffi.buffer(ffi.cast("char *", address), length))
            for address, length, key in request.segments
            if self._local(qp, address, length, key, 0)
        )

    def scatter(self, qp: QueuePair, request: Request, data: bytes) -> None:
        """Store bytes in the memory of a request."""
        for address, length, key in request.segments:
            piece, data = data[:length], data[length:]
            if piece and self._local(qp, address, length, key, lib.IBV_ACCESS_LOCAL_WRITE):
                ffi.memmove(ffi.cast("char *", address), piece, len(piece))

    def _local(self, qp: QueuePair, address: int, length: int, key: int, access: int) -> bool:
        """Check that a request can use this memory of its own side."""
        region = self.world.keys.get(key)
        if not length:
            return False
        if (
            region is None
            or region.domain is not qp.domain
            or not region.contains(address, length)
            or region.access & access != access
        ):
            raise RequestFailed(lib.IBV_WC_LOC_PROT_ERR)
        return True

    def _remote(self, peer: QueuePair, request: Request, length: int, access: int) -> int:
        """Return the address at the peer, if the request is allowed to use it."""
        address, key = request.remote
        region = self.world.keys.get(key)
        if (
            region is None
            or region.domain is not peer.domain
            or not region.contains(address, length)
            or not region.access & access
        ):
            raise RequestFailed(lib.IBV_WC_REM_ACCESS_ERR, lib.IBV_EVENT_QP_ACCESS_ERR)
        return int(address)

    def _receive(
        self, peer: QueuePair, data: bytes | None, request: Request, written: int = 0
    ) -> None:
        """Complete a receive of the peer with a message, or with the end of a write."""
        receive = peer.take_receive()
        if receive is None:
            raise NotReady
        length = written if data is None else len(data)
        if data is not None and length > receive.length:
            peer.complete_receive(receive, lib.IBV_WC_LOC_LEN_ERR)
            raise RequestFailed(lib.IBV_WC_REM_INV_REQ_ERR, lib.IBV_EVENT_QP_REQ_ERR)
        members = {"byte_len": length}
        if request.opcode in _WITH_IMM:
            members |= {"wc_flags": lib.IBV_WC_WITH_IMM, "imm_data": request.imm_data}
        if request.opcode == lib.IBV_WR_SEND_WITH_INV:
            members |= {"wc_flags": lib.IBV_WC_WITH_INV, "imm_data": request.imm_data}
            self._invalidate(peer, request.imm_data)
        if data is None:
            members["opcode"] = lib.IBV_WC_RECV_RDMA_WITH_IMM
        else:
            self.scatter(peer, receive, data)
        peer.complete_receive(receive, lib.IBV_WC_SUCCESS, **members)
        if not peer.has_received:
            peer.has_received = True
            self.world.cm.first_message(peer)

    def _invalidate(self, peer: QueuePair, key: int) -> None:
        region = self.world.keys.get(key)
        if region is None or region.domain is not peer.domain:
            raise RequestFailed(lib.IBV_WC_REM_ACCESS_ERR, lib.IBV_EVENT_QP_ACCESS_ERR)
        for window in self.world.all(Window):
            if window.bound is region:
                unbind(self.world, window)

    def _atomic(self, peer: QueuePair, request: Request) -> bytes:
        address = self._remote(peer, request, 8, lib.IBV_ACCESS_REMOTE_ATOMIC)
        if address % 8:
            raise RequestFailed(lib.IBV_WC_REM_INV_REQ_ERR, lib.IBV_EVENT_QP_REQ_ERR)
        memory = ffi.buffer(ffi.cast("char *", address), 8)
        before: int = struct.unpack("=Q", memory)[0]
        first, second = request.atomic
        if request.opcode == lib.IBV_WR_ATOMIC_FETCH_AND_ADD:
            memory[:] = struct.pack("=Q", (before + first) % (1 << 64))
        elif before == first:
            memory[:] = struct.pack("=Q", second)
        return struct.pack("=Q", before)

    def _bind(self, qp: QueuePair, request: Request) -> None:
        mr, address, length, access = request.region
        window = self.world.objects.get(address_of(request.window))
        region = self.world.objects.get(address_of(mr))
        if (
            not isinstance(window, Window)
            or not isinstance(region, Region)
            or region.domain is not qp.domain
            or not region.contains(address, length)
            or not region.access & lib.IBV_ACCESS_MW_BIND
        ):
            raise RequestFailed(lib.IBV_WC_MW_BIND_ERR)
        unbind(self.world, window)
        key = request.remote[1]
        window.bound = Region(qp.domain, address, length, access, key)
        window.target = region
        window.pointer.rkey = key
        region.windows += 1
        self.world.keys[key] = window.bound
