"""A model of rsocket.c as a Side. The names are those of rsocket.c in librdmacm.

The model has no send buffer and does not wait. Where rsocket.c waits, the model tries again after
each completion. So there is one difference. If rsocket.c has to wait for a free control message,
and the peer's DISCONNECT arrives first, then rsocket.c disconnects without sending its own last
control message. The model sends it.
"""

from __future__ import annotations

import struct
from collections import deque

from aiordma.streams.protocol import OutgoingMessage, Settings
from aiordma.streams.states import StreamState
from aiordma.streams.wire import Mapping, Segment
from fakes.streams import Side

RS_SGL_SIZE, RS_QP_CTRL_SIZE = 2, 4
RS_OP_DATA, RS_OP_SGL, RS_OP_IOMAP_SGL, RS_OP_CTRL = 0, 4, 6, 7
RS_CTRL_DISCONNECT, RS_CTRL_KEEPALIVE, RS_CTRL_SHUTDOWN = 0, 1, 2
RS_CONN_DATA = struct.Struct(">BBH3sBQIIQII")
SQ_SIZE = 384
HOST = {"little": "<", "big": ">"}


def short(number: int) -> int:
    return (number + 0x8000 & 0xFFFF) - 0x8000


class Rsocket(Side):
    """A Side that acts like rsocket.c. It does not use `protocol`."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.msg_send = settings.sends_messages
        self.rq_size, self.rbuf_size = settings.messages, settings.buffer.length
        self.readable = self.writable = self.is_connected = True
        self.ctrl_seqno, self.ctrl_max_seqno = 0, RS_QP_CTRL_SIZE
        self.sqe_avail = SQ_SIZE - RS_QP_CTRL_SIZE
        self.sseq_no = self.rseq_no = self.rbuf_offset = 0
        self.sseq_comp, self.rseq_comp = 0, self.rq_size >> 1
        self.rbuf_free_offset = self.rbuf_bytes_avail = self.rbuf_size >> 1
        self.target_sge, self.remote_sge = 0, 1
        self.rmsg: deque[int] = deque()
        self.ctrl: deque[int] = deque()
        self.sge = struct.Struct(HOST[settings.byte_order] + "QII")

    # --- connecting ---

    def connection_data(self) -> bytes:
        sgl, buffer = self.settings.target_sgl, self.settings.buffer
        flags = 2 | (self.settings.byte_order == "big")
        targets = sgl.addr, sgl.key, RS_SGL_SIZE
        half = buffer.addr, buffer.key, self.rbuf_size >> 1
        iomap_size = self.settings.mappings
        return RS_CONN_DATA.pack(1, flags, self.rq_size, bytes(3), iomap_size, *targets, *half)

    def start(self) -> None:
        if self.started:
            return
        self.started = True
        data = self.peer.connection_data()
        version, flags, self.sseq_comp, _, _, *rest = RS_CONN_DATA.unpack(data)
        assert version == 1
        self.remote_sgl, data_buf = Segment(*rest[:3]), Segment(*rest[3:])
        self.remote_sge_format = struct.Struct((">" if flags & 1 else "<") + "QII")
        self.remote_iomap = self.remote_sgl.addr + 16 * self.remote_sgl.length
        self._target_sgl(0, *data_buf)
        self.post_controls()

    def _target_sgl(self, index: int, *entry: int) -> Segment:
        if entry:
            self.sge.pack_into(self.sgl_memory, 16 * index, *entry)
        return Segment(*self.sge.unpack_from(self.sgl_memory, 16 * index))

    @property
    def state(self) -> StreamState:
        if not self.is_connected:
            return StreamState.ENDED
        if self.readable:
            return StreamState.OPEN if self.writable else StreamState.RECEIVING
        # After DISCONNECT was posted, it is disconnected when that has completed.
        return StreamState.SENDING

    # --- sending ---

    def write(self, data: bytes) -> int:
        if not data or not self._can_send():
            return 0
        addr, key, room = self._target_sgl(self.target_sge)
        data = data[:room]
        length = len(data)
        self._target_sgl(self.target_sge, addr + length, key, room - length)
        if room == length:
            self.target_sge = (self.target_sge + 1) % RS_SGL_SIZE
        self.sseq_no = self.sseq_no + 1 & 0xFFFF
        target = Segment(addr, key, length)
        self._check_data(target)
        self.written += data
        self._post_counted(RS_OP_DATA << 29 | length, data, target)
        return length

    def announce(self, index: int, mapping: Mapping) -> None:
        if not self._can_send():
            return
        self.mapped[index] = mapping
        entry = self.remote_sge_format.pack(*mapping.segment)
        offset = struct.pack(self.remote_sge_format.format[:1] + "Q", mapping.offset)
        self.sseq_no = self.sseq_no + 1 & 0xFFFF
        target = Segment(self.remote_iomap + index * 24, self.remote_sgl.key, 24)
        self._post_counted(RS_OP_IOMAP_SGL << 29 | index, offset + entry, target)

    def _can_send(self) -> bool:
        return (
            self.started
            and self.writable
            and self.sqe_avail >= 1 + self.msg_send
            and self.sseq_no != self.sseq_comp
            and self._target_sgl(self.target_sge).length != 0
        )

    def _post_counted(self, message: int, data: bytes, target: Segment) -> None:
        for _ in range(1 + self.msg_send):
            self.sqe_avail -= 1
            self.completions.append(self._sqe_completed)
        self._post(OutgoingMessage(message, b"", target), data)

    def _sqe_completed(self) -> None:
        self.sqe_avail += 1

    def _post_control(self, message: int, data: bytes = b"", at: int = 0) -> None:
        for _ in range(1 + (self.msg_send and bool(data))):
            self.ctrl_seqno += 1
            self.completions.append(lambda: self._ctrl_completed(message))
        target = Segment(at, self.remote_sgl.key if data else 0, len(data))
        self._post(OutgoingMessage(message, b"", target), data)

    def _ctrl_completed(self, message: int) -> None:
        self.ctrl_max_seqno += 1
        if message == RS_OP_CTRL << 29 | RS_CTRL_DISCONNECT:
            self._disconnected()

    def _disconnected(self) -> None:
        self.is_connected = self.readable = self.writable = False

    def post_controls(self) -> None:
        if not self.started:
            return
        while self.ctrl and self.ctrl_seqno != self.ctrl_max_seqno:
            self._post_control(RS_OP_CTRL << 29 | self.ctrl.popleft())
        while self._give_credits():
            self._send_credits()

    def _give_credits(self) -> bool:
        half = self.rbuf_bytes_avail >= self.rbuf_size >> 1
        room = self.ctrl_max_seqno - self.ctrl_seqno > self.msg_send
        return (half or short(self.rseq_no - self.rseq_comp) >= 0) and room and self.is_connected

    def _send_credits(self) -> None:
        self.rseq_comp = self.rseq_no + (self.rq_size >> 1) & 0xFFFF
        message = RS_OP_SGL << 29 | self.rseq_no + self.rq_size
        half = self.rbuf_size >> 1
        if self.rbuf_bytes_avail < half:
            self._post_control(message)
            return
        addr, key, _ = self.settings.buffer
        entry = addr + self.rbuf_free_offset, key, half
        self.announced.append(Segment(*entry))
        at = self.remote_sgl.addr + self.remote_sge * 16
        self._post_control(message, self.remote_sge_format.pack(*entry), at)
        self.rbuf_bytes_avail -= half
        self.rbuf_free_offset += half
        if self.rbuf_free_offset >= self.rbuf_size:
            self.rbuf_free_offset = 0
        self.remote_sge = (self.remote_sge + 1) % self.remote_sgl.length

    # --- receiving ---

    def receive(self, message: int) -> None:
        op, value = message >> 29, message & 0x1FFFFFFF
        if op == RS_OP_SGL:
            self.sseq_comp = value & 0xFFFF
        elif op == RS_OP_CTRL and value == RS_CTRL_SHUTDOWN and self.writable:
            self.readable = False
        elif op == RS_OP_CTRL and value != RS_CTRL_KEEPALIVE:
            self._disconnected()
        elif op not in (RS_OP_IOMAP_SGL, RS_OP_CTRL):
            self.rmsg.append(value)
            assert len(self.rmsg) <= self.rq_size, "the queue of received messages is overrun"
        self.post_controls()

    def read(self, limit: int) -> bytes:
        data = bytearray()
        while limit and self.rmsg:
            size = min(limit, self.rmsg[0])
            if size == self.rmsg[0]:
                self.rmsg.popleft()
                self.rseq_no = self.rseq_no + 1 & 0xFFFF
            else:
                self.rmsg[0] -= size
            limit -= size
            for _ in range(size):
                if self.rbuf_offset == self.rbuf_size:
                    self.rbuf_offset = 0
                data.append(self.buffer[self.rbuf_offset])
                self.rbuf_offset += 1
            self.rbuf_bytes_avail += size
        self.received += data
        self.post_controls()
        return bytes(data)

    # --- the end: rshutdown() ---

    def finish(self) -> None:
        if self.is_connected and self.writable:
            self.writable = False
            self.ctrl.append(RS_CTRL_SHUTDOWN if self.readable else RS_CTRL_DISCONNECT)
            self.post_controls()

    def leave(self) -> None:
        self.has_left = True
        if self.is_connected and (self.readable or self.writable):
            self.readable = self.writable = False
            self.ctrl.append(RS_CTRL_DISCONNECT)
            self.post_controls()
