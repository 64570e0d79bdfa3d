"""Values and the C structs that they are written to and read from."""

from __future__ import annotations

import dataclasses
import errno
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from aiordma import AddressError, VerbsError, WorkRequestError
from aiordma._native import ffi, lib
from aiordma.enums import (
    AddrInfoFlags,
    CmEventType,
    PortSpace,
    QpState,
    QpType,
    WcFlags,
    WcOpcode,
    WcStatus,
)
from aiordma.rdmacm import (
    AddrInfo,
    CmEvent,
    ConnectionParameters,
    Ece,
    Route,
    SocketAddress,
    addrinfo,
    getaddrinfo,
)
from aiordma.rdmacm.addrinfo import (
    PackedAddrInfo,
    default_qp_type,
    read_addrinfo,
    read_addrinfos,
)
from aiordma.rdmacm.event import read_event
from aiordma.rdmacm.parameters import PackedParameters
from aiordma.verbs import (
    AddressHandleAttributes,
    Completion,
    QueuePairAttributes,
    QueuePairCaps,
    QueuePairInit,
)
from aiordma.verbs.address_handle import gid_host, make_gid, read_gid
from aiordma.verbs.device import mtu_bytes
from aiordma.verbs.queue_pair_init import read_caps

RAW_GID = bytes(range(1, 17))


def distinct(kind: type[Any], **given: object) -> Any:
    """Return a value whose numbers are all different, so that a mix-up of fields is found."""
    numbers = {
        field.name: index
        for index, field in enumerate(dataclasses.fields(kind), 3)
        if field.name not in given
    }
    return kind(**numbers, **given)


# --- AddrInfo ---

HINTS = AddrInfo(
    flags=AddrInfoFlags.PASSIVE | AddrInfoFlags.FAMILY,
    family=socket.AF_INET6,
    qp_type=QpType.UD,
    port_space=PortSpace.UDP,
    source=SocketAddress("fe80::1", 7471, socket.AF_INET6, 3),
    destination=SocketAddress("10.7.1.2", 4711),
    route=b"\0path\0",
    connect=b"\0before\0",
)


def test_an_addrinfo_reads_back_from_c_unchanged() -> None:
    packed = PackedAddrInfo(HINTS)
    assert read_addrinfo(packed.pointer) == HINTS
    assert packed.pointer.ai_src_len == 28
    assert packed.pointer.ai_dst_len == 16


def test_an_empty_addrinfo_has_null_pointers() -> None:
    pointer = PackedAddrInfo(AddrInfo()).pointer
    for name in ("src_addr", "dst_addr", "src_canonname", "dst_canonname", "route", "connect"):
        assert getattr(pointer, f"ai_{name}") == ffi.NULL, name
    for name in ("flags", "family", "src_len", "dst_len", "route_len", "connect_len"):
        assert getattr(pointer, f"ai_{name}") == 0, name
    assert pointer.ai_next == ffi.NULL
    assert read_addrinfo(pointer) == AddrInfo(qp_type=QpType.RC)


def test_every_addrinfo_of_a_list_is_read() -> None:
    first, second = PackedAddrInfo(HINTS), PackedAddrInfo(AddrInfo(qp_type=QpType.UC))
    names = [ffi.new("char[]", text) for text in (b"here", b"there")]
    second.pointer.ai_src_canonname, second.pointer.ai_dst_canonname = names
    first.pointer.ai_next = second.pointer
    named = AddrInfo(qp_type=QpType.UC, source_canonname="here", destination_canonname="there")
    assert read_addrinfos(first.pointer) == [HINTS, named]
    assert read_addrinfos(ffi.NULL) == []


@pytest.mark.parametrize(
    ("port_space", "qp_type"),
    [
        (PortSpace.TCP, QpType.RC),
        (PortSpace.IB, QpType.RC),
        (PortSpace.UDP, QpType.UD),
        (PortSpace.IPOIB, QpType.UD),
    ],
)
def test_the_default_qp_type_depends_on_the_port_space(
    port_space: PortSpace, qp_type: QpType
) -> None:
    assert default_qp_type(port_space) is qp_type
    assert PackedAddrInfo(AddrInfo(port_space=port_space)).pointer.ai_qp_type == qp_type


def test_an_addrinfo_with_the_flag_passive_is_passive() -> None:
    assert HINTS.is_passive
    assert not AddrInfo(flags=AddrInfoFlags.NUMERICHOST).is_passive


# --- getaddrinfo ---


@pytest.mark.parametrize("hints", [None, AddrInfo(), AddrInfo(flags=AddrInfoFlags.PASSIVE)])
def test_neither_node_nor_service_is_a_value_error(hints: AddrInfo | None) -> None:
    with pytest.raises(ValueError, match="a node or a service is needed"):
        getaddrinfo(None, None, hints)


class FakeLookUp:
    """Fakes of librdmacm's functions for names. They record their arguments."""

    def __init__(self, result: int, code: int, info: AddrInfo | None = None) -> None:
        self.result, self.code = result, code
        self.packed = PackedAddrInfo(info) if info is not None else None
        self.calls: list[tuple[object, ...]] = []
        self.freed: list[object] = []
        self.gai_strerror = lib.gai_strerror

    def rdma_getaddrinfo(self, node: Any, service: Any, hints: Any, out: Any) -> int:
        texts = [None if text == ffi.NULL else ffi.string(text) for text in (node, service)]
        given = None if hints == ffi.NULL else read_addrinfo(hints)
        self.calls.append((*texts, given))
        ffi.errno = self.code
        if self.packed is not None:
            out[0] = self.packed.pointer
        return self.result

    def rdma_freeaddrinfo(self, info: Any) -> None:
        self.freed.append(info)


def look_up(
    monkeypatch: pytest.MonkeyPatch, result: int, code: int = 0, info: AddrInfo | None = None
) -> FakeLookUp:
    fake = FakeLookUp(result, code, info)
    monkeypatch.setattr(addrinfo, "lib", fake)
    return fake


def test_a_name_is_looked_up_and_the_answer_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = look_up(monkeypatch, 0, info=HINTS)
    hints = AddrInfo(flags=AddrInfoFlags.PASSIVE, qp_type=QpType.UD)
    assert getaddrinfo("peer", 7471, hints) == [HINTS]
    assert getaddrinfo(None, "rdma", None) == [HINTS]
    assert getaddrinfo("peer") == [HINTS]
    assert getaddrinfo(None, None, HINTS) == [HINTS]
    assert fake.calls == [
        (b"peer", b"7471", hints),
        (None, b"rdma", None),
        (b"peer", None, None),
        (None, None, HINTS),
    ]
    assert fake.packed is not None
    assert fake.freed == [fake.packed.pointer] * 4


@pytest.mark.parametrize(
    ("result", "code", "expected"),
    [
        (-1, errno.ENODEV, errno.ENODEV),
        (-1, -errno.ENOMEM, errno.ENOMEM),
        (socket.EAI_SYSTEM, errno.EMFILE, errno.EMFILE),
        (socket.EAI_SYSTEM, 0, errno.EIO),
    ],
)
def test_a_failure_of_librdmacm_is_a_verbs_error(
    monkeypatch: pytest.MonkeyPatch, result: int, code: int, expected: int
) -> None:
    fake = look_up(monkeypatch, result, code)
    with pytest.raises(VerbsError) as caught:
        getaddrinfo("peer", 7471)
    assert (caught.value.errno, caught.value.function) == (expected, "rdma_getaddrinfo")
    assert fake.freed == []


@pytest.mark.parametrize(
    ("result", "code"),
    [
        (socket.EAI_NONAME, 0),
        (socket.EAI_NONAME, errno.ENOENT),
        (socket.EAI_AGAIN, 0),
        (socket.EAI_BADFLAGS, 0),
    ],
)
def test_an_unknown_name_is_an_address_error(
    monkeypatch: pytest.MonkeyPatch, result: int, code: int
) -> None:
    fake = look_up(monkeypatch, result, code)
    text = ffi.string(lib.gai_strerror(result)).decode()
    with pytest.raises(AddressError, match=f"peer, service 7471, cannot be resolved: {text}"):
        getaddrinfo("peer", 7471)
    with pytest.raises(AddressError, match=r"^\*, service rdma"):
        getaddrinfo(None, "rdma")
    assert fake.freed == []


def test_a_lookup_without_a_device_is_enodev() -> None:
    path = Path("/sys/class/infiniband")
    if path.exists() and os.listdir(path):
        (info,) = getaddrinfo(None, 7471, AddrInfo(flags=AddrInfoFlags.PASSIVE))
        assert info.source is not None
        assert info.source.port == 7471
    else:
        with pytest.raises(VerbsError, match="no RDMA device on this machine") as caught:
            getaddrinfo("10.7.1.1", 7471)
        assert caught.value.errno == errno.ENODEV


# --- connection parameters ---


def test_no_parameters_are_a_null_pointer() -> None:
    assert PackedParameters(None).pointer == ffi.NULL


def test_parameters_are_written_unchanged() -> None:
    value = distinct(ConnectionParameters, private_data=b"a\0b")
    packed = PackedParameters(value)
    pointer: Any = packed.pointer
    for field in dataclasses.fields(value):
        if field.name != "private_data":
            assert getattr(pointer, field.name) == getattr(value, field.name), field.name
    assert pointer.private_data_len == 3
    assert bytes(ffi.buffer(pointer.private_data, 3)) == b"a\0b"


def test_private_data_over_255_bytes_is_refused() -> None:
    with pytest.raises(OverflowError):
        PackedParameters(ConnectionParameters(private_data=bytes(256)))


def test_ece_reads_back_from_c_unchanged() -> None:
    ece = Ece(vendor_id=0x15B3, options=0xFFFFFFFF, comp_mask=7)
    assert Ece.read(ece.write()) == ece


# --- addresses ---


def test_address_handle_attributes_read_back_from_c_unchanged() -> None:
    value = distinct(AddressHandleAttributes, dgid=RAW_GID, is_global=True)
    assert AddressHandleAttributes.read(value.write()) == value
    assert AddressHandleAttributes.read(AddressHandleAttributes().write()) == (
        AddressHandleAttributes()
    )


def test_a_gid_reads_back_from_c_unchanged() -> None:
    assert read_gid(make_gid(RAW_GID)) == RAW_GID


@pytest.mark.parametrize("length", [0, 15, 17])
def test_a_gid_has_sixteen_bytes(length: int) -> None:
    with pytest.raises(ValueError, match=f"16 bytes, not {length}"):
        make_gid(bytes(length))


@pytest.mark.parametrize("host", ["10.7.1.2", "fe80::1", "2001:db8::7"])
def test_a_gid_contains_an_ip_address(host: str) -> None:
    mapped = host if ":" in host else f"::ffff:{host}"
    assert gid_host(socket.inet_pton(socket.AF_INET6, mapped)) == host


def test_a_route_is_read_in_host_byte_order() -> None:
    raw: Any = ffi
    paths = raw.new("struct ibv_sa_path_rec[2]")
    route = raw.new("struct rdma_route *")
    route.path_rec, route.num_paths = paths, 2
    ib = route.addr.addr.ibaddr
    ffi.memmove(ib.sgid.raw, RAW_GID, 16)
    ffi.memmove(ib.dgid.raw, RAW_GID[::-1], 16)
    ib.pkey = socket.htons(0xFF01)
    path = paths[1]
    ffi.memmove(path.sgid.raw, RAW_GID, 16)
    ffi.memmove(path.dgid.raw, RAW_GID[::-1], 16)
    path.dlid, path.slid, path.pkey = map(socket.htons, (0x102, 0x304, 0x506))
    path.flow_label, path.reversible = socket.htonl(0x1020304), 1
    plain = ["hop_limit", "traffic_class", "numb_path", "sl", "mtu_selector", "mtu"]
    plain += ["rate_selector", "rate", "packet_life_time_selector", "packet_life_time"]
    plain += ["preference"]
    for number, name in enumerate(plain, 3):
        setattr(path, name, number)

    read = Route.read(route)
    assert (read.sgid, read.dgid, read.pkey) == (RAW_GID, RAW_GID[::-1], 0xFF01)
    assert len(read.paths) == 2
    second = read.paths[1]
    assert (second.sgid, second.dgid) == (RAW_GID, RAW_GID[::-1])
    assert (second.dlid, second.slid, second.pkey) == (0x102, 0x304, 0x506)
    assert (second.flow_label, second.reversible, second.raw_traffic) == (0x1020304, True, False)
    assert [getattr(second, name) for name in plain] == list(range(3, 3 + len(plain)))
    assert (read.paths[0].flow_label, read.paths[0].reversible) == (0, False)


# --- queue pairs and completions ---


@pytest.mark.parametrize(("mtu", "size"), [(1, 256), (2, 512), (3, 1024), (4, 2048), (5, 4096)])
def test_an_mtu_is_converted_to_bytes(mtu: int, size: int) -> None:
    assert mtu_bytes(mtu) == size


def test_queue_pair_caps_read_back_from_c_unchanged() -> None:
    caps = distinct(QueuePairCaps)
    attr = ffi.new("struct ibv_qp_init_attr *")
    QueuePairInit(caps).fill(attr, QpType.UD)
    assert read_caps(attr.cap) == caps
    assert (attr.qp_type, attr.sq_sig_all) == (QpType.UD, 0)
    assert (attr.send_cq, attr.recv_cq, attr.srq) == (ffi.NULL,) * 3


def test_a_given_qp_type_overrides_the_default() -> None:
    attr = ffi.new("struct ibv_qp_init_attr *")
    QueuePairInit(QueuePairCaps(1, 1), qp_type=QpType.UC, sq_sig_all=True).fill(attr, QpType.RC)
    assert (attr.qp_type, attr.sq_sig_all) == (QpType.UC, 1)


def test_moving_a_queue_pair_changes_nothing_but_its_state() -> None:
    attributes = QueuePairAttributes.to_state(QpState.ERR)
    assert attributes.mask == lib.IBV_QP_STATE
    assert attributes.pointer.qp_state == QpState.ERR


def work_completion(**fields: int) -> Any:
    wc: Any = ffi.new("struct ibv_wc *")
    defaults = {"wr_id": 1 << 63 | 5, "byte_len": 64, "qp_num": 17, "src_qp": 18, "vendor_err": 0}
    for name, value in (defaults | {"opcode": lib.IBV_WC_RECV} | fields).items():
        setattr(wc, name, value)
    return wc


def test_a_completion_is_read_from_c() -> None:
    completion = Completion.read(work_completion())
    assert completion == Completion(
        wr_id=1 << 63 | 5,
        status=WcStatus.SUCCESS,
        opcode=WcOpcode.RECV,
        vendor_err=0,
        byte_len=64,
        imm=None,
        qp_num=17,
        src_qp=18,
        flags=WcFlags(0),
    )
    assert completion.check() is completion


def test_a_completion_has_its_immediate_in_host_byte_order() -> None:
    flags = WcFlags.WITH_IMM | WcFlags.GRH
    completion = Completion.read(work_completion(wc_flags=flags, imm_data=socket.htonl(0x1020304)))
    assert (completion.imm, completion.flags) == (0x1020304, flags)


def test_an_invalidated_key_is_not_an_immediate() -> None:
    completion = Completion.read(work_completion(wc_flags=WcFlags.WITH_INV, imm_data=5))
    assert (completion.imm, completion.flags) == (None, WcFlags.WITH_INV)


def test_a_failed_completion_has_no_flags_and_raises_when_it_is_checked() -> None:
    failed = Completion.read(
        work_completion(
            status=WcStatus.LOC_LEN_ERR, wc_flags=WcFlags.WITH_IMM, imm_data=5, vendor_err=0x81
        )
    )
    assert (failed.imm, failed.flags) == (None, WcFlags(0))
    assert (failed.wr_id, failed.qp_num) == (1 << 63 | 5, 17)
    with pytest.raises(WorkRequestError) as caught:
        failed.check()
    assert (caught.value.status, caught.value.vendor_err) == (WcStatus.LOC_LEN_ERR, 0x81)


# --- events ---


def copied_event(kind: CmEventType, **fields: int) -> Any:
    copy: Any = ffi.new("struct aiordma_cm_event *")
    copy.event = kind
    for name, value in fields.items():
        setattr(copy, name, value)
    return copy


NUMBERS = {
    "id": 1 << 47,
    "listen_id": 1 << 46,
    "status": -7,
    "arg": 1 << 63 | 1,
    "context": 1 << 45,
    "responder_resources": 3,
    "initiator_depth": 4,
    "flow_control": 1,
    "retry_count": 5,
    "rnr_retry_count": 6,
    "srq": 1,
    "qp_num": 0xABCDEF,
    "qkey": 0x01234567,
}


def test_an_event_is_read_from_c() -> None:
    copy = copied_event(CmEventType.CONNECT_REQUEST, **NUMBERS, private_data_len=5)
    ffi.memmove(copy.private_data, b"hello, and no more", 18)
    event = read_event(copy)
    numbers: dict[str, Any] = NUMBERS
    assert event == CmEvent(CmEventType.CONNECT_REQUEST, **numbers, private_data=b"hello")
    assert event.errno == 7


@pytest.mark.parametrize(
    ("status", "error", "expected"),
    [(0, 5, 0), (28, 0, 0), (-110, 0, 110), (-1, 19, 19), (-1, -19, 19), (-1, 0, 1)],
)
def test_the_errno_of_an_event_is_read_from_its_status(
    status: int, error: int, expected: int
) -> None:
    event = read_event(copied_event(CmEventType.ADDR_ERROR, status=status, error=error))
    assert (event.status, event.errno) == (status, expected)


def addressed(kind: CmEventType, port_num: int) -> CmEvent:
    raw: Any = ffi
    copy = copied_event(kind)
    attributes = distinct(AddressHandleAttributes, dgid=RAW_GID, is_global=True, port_num=port_num)
    raw.memmove(raw.addressof(copy, "ah_attr"), attributes.write(), raw.sizeof(copy.ah_attr))
    event = read_event(copy)
    assert event.ah_attr in (attributes, None)
    return event


@pytest.mark.parametrize("kind", [CmEventType.ESTABLISHED, CmEventType.MULTICAST_JOIN])
def test_events_with_a_destination_have_ah_attr(kind: CmEventType) -> None:
    assert addressed(kind, port_num=1).ah_attr is not None
    assert addressed(kind, port_num=0).ah_attr is None


@pytest.mark.parametrize("kind", [CmEventType.CONNECT_REQUEST, CmEventType.MULTICAST_ERROR])
def test_other_events_have_no_ah_attr(kind: CmEventType) -> None:
    assert addressed(kind, port_num=1).ah_attr is None


def test_an_event_prints_as_its_c_name() -> None:
    assert str(CmEvent(CmEventType.REJECTED, 0)) == "RDMA_CM_EVENT_REJECTED"


def test_an_unknown_event_is_read() -> None:
    event = read_event(copied_event(CmEventType(1000)))
    assert event.type.name == "UNKNOWN_1000"
    assert str(event)
