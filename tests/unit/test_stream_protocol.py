"""StreamProtocol: the start of streams, their control messages, and their end."""

from __future__ import annotations

import dataclasses

import pytest
from fakes.streams import (
    BUFFER,
    BUFFER_KEY,
    ORDERS,
    TARGET_SGL,
    TARGET_SGL_KEY,
    Script,
    connected,
    settings,
    started,
)

from aiordma import ProtocolError
from aiordma.streams.protocol import MAX_CONTROLS, RESERVED_RECEIVES, OutgoingMessage
from aiordma.streams.states import StreamState
from aiordma.streams.wire import (
    MAX_TRANSFER,
    SEGMENT_SIZE,
    TARGETS,
    ByteOrder,
    ConnectionData,
    Control,
    Mapping,
    Op,
    Segment,
    pack_message,
    pack_segment,
    unpack_message,
    unpack_segment,
)

SHUTDOWN, DISCONNECT, KEEPALIVE = Control.SHUTDOWN, Control.DISCONNECT, Control.KEEPALIVE


def swapped(message: int) -> int:
    return int.from_bytes(message.to_bytes(4, "big"), "little")


# --- connecting ---


def test_connection_data_announces_the_target_sgl_and_the_first_half() -> None:
    script = Script(settings(buffer=64, messages=16, byte_order="big", mappings=3))
    assert ConnectionData.unpack(script.protocol.connection_data()) == ConnectionData(
        16, Segment(TARGET_SGL, TARGET_SGL_KEY, TARGETS), Segment(BUFFER, BUFFER_KEY, 32), "big", 3
    )


def test_on_iwarp_receives_are_reserved_for_control_messages() -> None:
    script = Script(settings(messages=16, sends_messages=True))
    assert (
        ConnectionData.unpack(script.protocol.connection_data()).credits == 16 - RESERVED_RECEIVES
    )


@pytest.mark.parametrize("order", ORDERS)
def test_the_second_half_is_announced_at_once(order: ByteOrder) -> None:
    script = Script(settings(buffer=64, messages=16))
    script.peer = dataclasses.replace(script.peer, byte_order=order)
    targets = script.peer.targets
    assert script.start().posted() == [
        OutgoingMessage(
            pack_message(Op.CREDIT, 16),
            pack_segment(Segment(BUFFER + 32, BUFFER_KEY, 32), order),
            Segment(targets.addr + SEGMENT_SIZE, targets.key, SEGMENT_SIZE),
        )
    ]


def test_nothing_is_posted_before_the_peers_connection_data() -> None:
    protocol = Script(settings()).protocol
    assert protocol.next_control_message() is None
    assert protocol.room == 0
    with pytest.raises(ProtocolError, match="no entry"):
        protocol.announce(0, Mapping(0, Segment(0, 0, 0)))


def test_early_messages_are_processed_in_order_at_the_start() -> None:
    script = Script(settings())
    script.write_target(1, pack_segment(Segment(0x7000, 77, 100), "little"))
    script.receive(Op.DATA, 10)
    script.receive(Op.CREDIT, 9)
    script.receive_control(SHUTDOWN)
    protocol = script.protocol
    assert (protocol.inbound.available, protocol.peer_finished, protocol.room) == (0, False, 0)
    script.start()
    assert (protocol.inbound.available, protocol.state) == (10, StreamState.SENDING)
    assert [protocol.send(100).target.addr for _ in range(2)] == [0x6000, 0x7000]


def test_early_data_after_shutdown_is_refused_at_the_start() -> None:
    script = Script(settings())
    script.receive_control(SHUTDOWN)
    script.receive(Op.DATA, 10)
    with pytest.raises(ProtocolError, match="after SHUTDOWN or DISCONNECT"):
        script.start()


def test_a_peer_of_another_protocol_is_refused() -> None:
    with pytest.raises(ProtocolError, match="no rsocket"):
        Script(settings()).protocol.start(b"GET / HTTP/1.1")


def test_a_peer_without_a_first_buffer_announces_one_later() -> None:
    script = Script(settings())
    script.peer = dataclasses.replace(script.peer, buffer=Segment(0, 0, 0))
    script.start()
    assert script.protocol.room == 0
    script.write_target(1, pack_segment(Segment(0x7000, 77, 100), "little"))
    script.receive(Op.CREDIT, 8)
    assert script.protocol.send(100).target == Segment(0x7000, 77, 100)


# --- byte orders ---


@pytest.mark.parametrize("order", ORDERS)
def test_a_message_in_a_send_has_the_byte_order_of_its_sender(order: ByteOrder) -> None:
    script = Script(settings(byte_order=order, sends_messages=True))
    other: ByteOrder = "little" if order == "big" else "big"
    script.peer = dataclasses.replace(script.peer, byte_order=other)
    early = swapped(pack_message(Op.DATA, 3))
    script.protocol.received(early)
    script.start()
    (update,) = script.posted()
    assert unpack_message(update.message) == (Op.CREDIT, 1 + 16 - RESERVED_RECEIVES)
    assert unpack_segment(update.payload, other) == Segment(BUFFER + 32, BUFFER_KEY, 32)
    script.protocol.received(swapped(pack_message(Op.DATA, 4)))
    assert script.protocol.inbound.available == 7
    assert unpack_message(script.protocol.send(5).message) == (Op.DATA, 5)


@pytest.mark.parametrize("order", ORDERS)
def test_immediate_data_is_not_swapped(order: ByteOrder) -> None:
    script = started(byte_order=order)
    script.write_target(1, pack_segment(Segment(0x7000, 77, 9), order))
    script.receive(Op.CREDIT, 9)
    script.receive(Op.DATA, 4)
    assert script.protocol.inbound.available == 4
    assert [script.protocol.send(n).target.length for n in (100, 9)] == [100, 9]


@pytest.mark.parametrize("sends_messages", [False, True])
def test_machines_of_different_byte_orders_exchange_data(sends_messages: bool) -> None:
    one, other = connected(
        settings(byte_order="little", sends_messages=sends_messages),
        settings(byte_order="big", sends_messages=sends_messages, mappings=1),
    )
    one.write(b"hello")
    one.announce(0, Mapping(1, Segment(2, 3, 4)))
    one.deliver()
    assert other.read(9) == b"hello"
    assert other.protocol.outbound.mappings == {0: (1, (2, 3, 4))}


# --- control messages ---


def test_posted_control_messages_are_bounded() -> None:
    script = Script(settings(buffer=1 << 20, messages=16)).start()
    protocol = script.protocol
    for _ in range(MAX_CONTROLS):
        assert protocol.next_control_message() is not None
        for _ in range(8):
            script.receive(Op.DATA, 1)
    assert protocol.inbound.has_update
    assert protocol.next_control_message() is None
    protocol.control_completed()
    assert protocol.next_control_message() == OutgoingMessage(
        pack_message(Op.CREDIT, 8 * MAX_CONTROLS + 16)
    )
    assert protocol.next_control_message() is None


def test_credit_updates_precede_control_messages() -> None:
    script = Script(settings()).start()
    script.protocol.finish()
    assert [unpack_message(request.message)[0] for request in script.posted()] == [
        Op.CREDIT,
        Op.CONTROL,
    ]


def test_all_controls_are_completed_after_the_last_completion() -> None:
    protocol = started().protocol
    completed = [protocol.all_controls_completed]
    protocol.finish()
    completed.append(protocol.all_controls_completed)
    assert protocol.next_control_message() == OutgoingMessage(pack_message(Op.CONTROL, SHUTDOWN))
    completed.append(protocol.all_controls_completed)
    protocol.control_completed()
    completed.append(protocol.all_controls_completed)
    assert completed == [True, False, False, True]


# --- the end ---


def test_a_finished_side_still_receives_and_sends_credits() -> None:
    script = started()
    script.protocol.finish()
    assert script.posted_controls() == [SHUTDOWN]
    assert (script.protocol.state, script.protocol.room) == (StreamState.RECEIVING, 0)
    script.consume(32)
    assert len(script.posted()) == 1
    script.protocol.finish()
    assert script.posted_controls() == []


def test_a_finished_peer_gets_no_credits() -> None:
    script = started()
    script.receive(Op.DATA, 32)
    script.receive_control(SHUTDOWN)
    script.protocol.inbound.consume(32)
    assert script.posted() == []
    assert (script.protocol.state, script.protocol.room) == (StreamState.SENDING, 100)
    assert (script.protocol.peer_finished, script.protocol.peer_left) == (True, False)
    script.protocol.finish()
    assert script.posted_controls() == [DISCONNECT]
    assert script.protocol.state is StreamState.ENDED


@pytest.mark.parametrize("control", [SHUTDOWN, DISCONNECT])
def test_bytes_received_before_the_end_can_be_read(control: Control) -> None:
    script = started()
    script.receive(Op.DATA, 20)
    script.receive_control(control)
    assert script.protocol.inbound.readable(100) == (0, 20)


@pytest.mark.parametrize("control", [SHUTDOWN, DISCONNECT])
def test_data_after_the_end_is_refused(control: Control) -> None:
    script = started()
    script.receive_control(control)
    with pytest.raises(ProtocolError, match="after SHUTDOWN or DISCONNECT"):
        script.receive(Op.DATA, 1)


def test_a_side_that_left_takes_no_data() -> None:
    script = started()
    script.protocol.leave()
    assert (script.posted_controls(), script.protocol.has_left) == ([DISCONNECT], True)
    for _ in range(100):
        script.receive(Op.DATA, 60)
    assert script.protocol.inbound.available == 0
    assert script.posted() == []
    script.protocol.leave()
    assert script.posted_controls() == []


def test_a_peer_that_left_gets_no_messages() -> None:
    script = started()
    script.receive_control(DISCONNECT)
    protocol = script.protocol
    assert (protocol.room, protocol.peer_left, protocol.peer_finished) == (0, True, True)
    protocol.finish()
    protocol.leave()
    assert script.posted_controls() == []
    assert protocol.state is StreamState.ENDED


def test_a_lost_connection_drops_control_messages() -> None:
    script = started()
    script.protocol.finish()
    script.protocol.connection_lost()
    assert script.posted_controls() == []
    assert (script.protocol.state, script.protocol.room) == (StreamState.BROKEN, 0)
    script.protocol.connection_lost()
    script.protocol.leave()
    assert script.posted_controls() == []
    assert script.protocol.state is StreamState.BROKEN


def test_keepalives_are_ignored() -> None:
    script = started()
    for _ in range(100):
        script.receive_control(KEEPALIVE)
    assert (script.posted(), script.protocol.state) == ([], StreamState.OPEN)


@pytest.mark.parametrize("value", [3, 4, MAX_TRANSFER])
def test_other_control_messages_are_refused(value: int) -> None:
    with pytest.raises(ProtocolError, match=f"control message {value}"):
        started().receive(Op.CONTROL, value)


@pytest.mark.parametrize("op", sorted(set(range(8)) - set(Op)))
def test_other_messages_are_refused(op: int) -> None:
    with pytest.raises(ProtocolError, match=f"{op << 29 | 5:#010x}"):
        started().protocol.received(op << 29 | 5)


@pytest.mark.parametrize(
    ("mappings", "peer_credits", "allowed"), [(3, 16, 3), (128, 16, 4), (0, 16, 0)]
)
def test_mappings_leave_the_peer_credits(mappings: int, peer_credits: int, allowed: int) -> None:
    """rsocket never returns the credit that an announcement uses."""
    script = Script(settings())
    assert script.protocol.peer_mappings == 0
    script.peer = dataclasses.replace(script.peer, credits=peer_credits, mappings=mappings)
    assert script.start().protocol.peer_mappings == allowed
