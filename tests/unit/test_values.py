"""Values and the C structs that they are written to and read from."""

from __future__ import annotations

import dataclasses
import errno
import socket
from typing import Any

import pytest
from simulator import Simulation

from aiordma import AddressError, CmEventType, PortSpace, VerbsError, WcStatus, WorkRequestError
from aiordma._native import ffi, lib
from aiordma.enums import AddrInfoFlags, QpState, QpType, WcFlags, WcOpcode
from aiordma.rdmacm import AddrInfo, CmEvent, ConnectionParameters, Ece, Route, SocketAddress
from aiordma.rdmacm.addrinfo import PackedAddrInfo, getaddrinfo, read_addrinfo, read_addrinfos
from aiordma.rdmacm.event import read_event
from aiordma.rdmacm.parameters import PackedParameters
from aiordma.verbs import Completion, QueuePairAttributes, QueuePairCaps, QueuePairInit
from aiordma.verbs.address_handle import AddressHandleAttributes, gid_host, make_gid, read_gid
from aiordma.verbs.device import mtu_bytes
from aiordma.verbs.queue_pair_init import read_caps

E = CmEventType
RAW_GID = bytes(range(1, 17))
untyped_ffi: Any = ffi
NONE, OTHERS = lib.AIORDMA_NO_PARAMETERS, lib.AIORDMA_CONNECTION_PARAMETERS + 1


def distinct(kind: type[Any], **given: object) -> Any:
    """Return a value whose numbers are all different, so that a mix-up of fields is found."""
    names = [field.name for field in dataclasses.fields(kind) if field.name not in given]
    return kind(**{name: number for number, name in enumerate(names, 3)}, **given)


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


def test_every_addrinfo_of_a_list_reads_back_from_c_unchanged() -> None:
    first, second = PackedAddrInfo(HINTS), PackedAddrInfo(AddrInfo(qp_type=QpType.UC))
    names = [ffi.new("char[]", text) for text in (b"here", b"there")]
    second.pointer.ai_src_canonname, second.pointer.ai_dst_canonname = names
    first.pointer.ai_next = second.pointer
    named = AddrInfo(qp_type=QpType.UC, source_canonname="here", destination_canonname="there")
    assert read_addrinfos(first.pointer) == [HINTS, named]
    assert (first.pointer.ai_src_len, first.pointer.ai_dst_len) == (28, 16)
    assert read_addrinfos(ffi.NULL) == []
    assert read_addrinfo(PackedAddrInfo(AddrInfo()).pointer) == AddrInfo(qp_type=QpType.RC)
    assert (HINTS.is_passive, named.is_passive) == (True, False)


def test_the_default_qp_type_depends_on_the_port_space() -> None:
    for space in PortSpace:
        kind = QpType.UD if space in (PortSpace.UDP, PortSpace.IPOIB) else QpType.RC
        assert read_addrinfo(PackedAddrInfo(AddrInfo(port_space=space)).pointer).qp_type is kind


async def test_a_lookup_without_node_needs_an_address_in_the_hints(simulation: Simulation) -> None:
    for hints in (None, AddrInfo(), AddrInfo(flags=AddrInfoFlags.PASSIVE)):
        with pytest.raises(ValueError, match="a node or a service is needed"):
            getaddrinfo(None, None, hints)
    simulation.names |= {"10.0.0.1": ["10.0.0.1"]}
    source = SocketAddress("10.0.0.1", 7471)
    hints = AddrInfo(flags=AddrInfoFlags.PASSIVE, qp_type=QpType.UD, source=source)
    (found,) = getaddrinfo(None, None, hints)
    assert found == dataclasses.replace(hints, family=socket.AF_INET)


@pytest.mark.parametrize(
    ("result", "code", "expected"),
    [
        (-1, errno.ENODEV, errno.ENODEV),
        (-1, -errno.ENOMEM, errno.ENOMEM),
        (socket.EAI_SYSTEM, errno.EMFILE, errno.EMFILE),
        (socket.EAI_SYSTEM, 0, errno.EIO),
        (socket.EAI_NONAME, 0, None),
        (socket.EAI_NONAME, errno.ENOENT, None),
        (socket.EAI_BADFLAGS, 0, None),
    ],
)
async def test_a_failed_lookup_is_an_error_of_librdmacm_or_of_the_name(
    simulation: Simulation, result: int, code: int, expected: int | None
) -> None:
    def fail() -> None:
        ffi.errno = code
        raise socket.gaierror(result, "")

    simulation.world.calls.hooks["getaddrinfo"] = fail
    if expected is not None:
        with pytest.raises(VerbsError) as caught:
            getaddrinfo("peer", 7471)
        assert (caught.value.errno, caught.value.function) == (expected, "rdma_getaddrinfo")
        return
    text = ffi.string(lib.gai_strerror(result)).decode()
    with pytest.raises(AddressError, match=f"peer, service 7471, cannot be resolved: {text}"):
        getaddrinfo("peer", 7471)
    with pytest.raises(AddressError, match=r"^\*, service rdma"):
        getaddrinfo(None, "rdma")


def test_parameters_are_written_unchanged() -> None:
    value = distinct(ConnectionParameters, private_data=b"a\0b")
    packed = PackedParameters(value)
    pointer: Any = packed.pointer
    for field in dataclasses.fields(value):
        if field.name != "private_data":
            assert getattr(pointer, field.name) == getattr(value, field.name), field.name
    assert bytes(ffi.buffer(pointer.private_data, pointer.private_data_len)) == b"a\0b"
    assert PackedParameters(None).pointer == ffi.NULL
    with pytest.raises(ValueError, match="256 bytes: rdma_cm takes up to 255"):
        PackedParameters(ConnectionParameters(private_data=bytes(256)))


def test_addresses_and_options_read_back_from_c_unchanged() -> None:
    ece = Ece(vendor_id=0x15B3, options=0xFFFFFFFF, comp_mask=7)
    assert Ece.read(ece.write()) == ece
    given = distinct(AddressHandleAttributes, dgid=RAW_GID, is_global=True)
    for value in (given, AddressHandleAttributes()):
        assert AddressHandleAttributes.read(value.write()) == value
    assert read_gid(make_gid(RAW_GID)) == RAW_GID
    for length in (0, 15, 17):
        with pytest.raises(ValueError, match=f"16 bytes, not {length}"):
            make_gid(bytes(length))


def test_a_gid_contains_an_ip_address() -> None:
    for host in ("10.7.1.2", "fe80::1", "2001:db8::7"):
        mapped = host if ":" in host else f"::ffff:{host}"
        assert gid_host(socket.inet_pton(socket.AF_INET6, mapped)) == host


def test_a_route_is_read_in_host_byte_order() -> None:
    paths = untyped_ffi.new("struct ibv_sa_path_rec[2]")
    route = untyped_ffi.new("struct rdma_route *")
    route.path_rec, route.num_paths = paths, 2
    ib, path = route.addr.addr.ibaddr, paths[1]
    for record in (ib, path):
        ffi.memmove(record.sgid.raw, RAW_GID, 16)
        ffi.memmove(record.dgid.raw, RAW_GID[::-1], 16)
    ib.pkey = socket.htons(0xFF01)
    path.dlid, path.slid, path.pkey = map(socket.htons, (0x102, 0x304, 0x506))
    path.flow_label, path.reversible = socket.htonl(0x1020304), 1
    plain = ["hop_limit", "traffic_class", "numb_path", "sl", "mtu_selector", "mtu"]
    plain += ["rate_selector", "rate", "packet_life_time_selector", "packet_life_time"]
    plain += ["preference"]
    for number, name in enumerate(plain, 3):
        setattr(path, name, number)

    read = Route.read(route)
    first, second = read.paths
    for found in (read, second):
        assert (found.sgid, found.dgid) == (RAW_GID, RAW_GID[::-1])
    assert read.pkey == 0xFF01
    assert (second.dlid, second.slid, second.pkey) == (0x102, 0x304, 0x506)
    assert (second.flow_label, second.reversible, second.raw_traffic) == (0x1020304, True, False)
    assert [getattr(second, name) for name in plain] == list(range(3, 3 + len(plain)))
    assert (first.flow_label, first.reversible) == (0, False)


def test_an_mtu_is_converted_to_bytes() -> None:
    assert [mtu_bytes(mtu) for mtu in range(1, 6)] == [256, 512, 1024, 2048, 4096]


def test_queue_pair_attributes_are_written_unchanged() -> None:
    caps = distinct(QueuePairCaps)
    attr = ffi.new("struct ibv_qp_init_attr *")
    QueuePairInit(caps).fill(attr, QpType.UD)
    assert read_caps(attr.cap) == caps
    assert (attr.qp_type, attr.sq_sig_all) == (QpType.UD, 0)
    assert (attr.send_cq, attr.recv_cq, attr.srq) == (ffi.NULL,) * 3
    QueuePairInit(caps, qp_type=QpType.UC, sq_sig_all=True).fill(attr, QpType.RC)
    assert (attr.qp_type, attr.sq_sig_all) == (QpType.UC, 1)
    attributes = QueuePairAttributes.to_state(QpState.ERR)
    assert (attributes.mask, attributes.pointer.qp_state) == (lib.IBV_QP_STATE, QpState.ERR)


def completion(**fields: int) -> Completion:
    wc: Any = ffi.new("struct ibv_wc *")
    defaults = {"wr_id": 1 << 63 | 5, "opcode": lib.IBV_WC_RECV, "byte_len": 64, "qp_num": 17}
    for name, value in (defaults | {"src_qp": 18} | fields).items():
        setattr(wc, name, value)
    return Completion.read(wc)


PLAIN = Completion(1 << 63 | 5, WcStatus.SUCCESS, WcOpcode.RECV, 0, 64, None, 17, 18, WcFlags(0))


def test_a_completion_is_read_from_c() -> None:
    read = completion()
    assert read == PLAIN
    assert read.check() is read
    flags = WcFlags.WITH_IMM | WcFlags.GRH
    with_imm = completion(wc_flags=flags, imm_data=socket.htonl(0x1020304))
    assert with_imm == dataclasses.replace(PLAIN, imm=0x1020304, flags=flags)
    with_key = completion(wc_flags=WcFlags.WITH_INV, imm_data=5)  # the key is no immediate
    assert with_key == dataclasses.replace(PLAIN, flags=WcFlags.WITH_INV)


def test_a_failed_completion_has_no_flags_and_raises_when_it_is_checked() -> None:
    status = WcStatus.LOC_LEN_ERR
    failed = completion(status=status, wc_flags=WcFlags.WITH_IMM, imm_data=5, vendor_err=0x81)
    assert failed == dataclasses.replace(PLAIN, status=status, vendor_err=0x81)
    with pytest.raises(WorkRequestError) as caught:
        failed.check()
    assert (caught.value.status, caught.value.vendor_err) == (status, 0x81)


def copied_event(kind: CmEventType, parameters: int = OTHERS, **fields: int) -> Any:
    copy: Any = ffi.new("struct aiordma_cm_event *")
    copy.event, copy.parameters = kind, parameters
    for name, value in fields.items():
        setattr(copy, name, value)
    return copy


CONNECTION_NUMBERS = (
    "responder_resources", "initiator_depth", "flow_control", "retry_count", "rnr_retry_count",
    "srq", "qp_num",
)  # fmt: skip


@pytest.mark.parametrize("parameters", [NONE, lib.AIORDMA_CONNECTION_PARAMETERS, OTHERS])
def test_an_event_is_read_from_c(parameters: int) -> None:
    numbers: dict[str, Any] = {"id": 1 << 47, "listen_id": 3, "status": -7}
    if parameters == OTHERS:
        numbers |= {"arg": 1 << 63 | 1, "qp_num": 0xABCDEF, "qkey": 4, "context": 5}
    elif parameters != NONE:
        numbers |= {name: number for number, name in enumerate(CONNECTION_NUMBERS, 6)}
    copy = copied_event(E.CONNECT_REQUEST, parameters, **numbers, private_data_len=5)
    ffi.memmove(copy.private_data, b"hello, and no more", 18)
    event = read_event(copy)
    data = b"" if parameters == NONE else b"hello"
    assert event == CmEvent(E.CONNECT_REQUEST, **numbers, private_data=data)
    assert str(event) == "RDMA_CM_EVENT_CONNECT_REQUEST"


def test_the_name_of_an_unknown_event_has_its_number() -> None:
    unknown = read_event(copied_event(CmEventType(1000)))
    assert unknown.type.name == "UNKNOWN_1000"
    assert str(unknown)


def test_the_errno_of_an_event_is_read_from_its_status() -> None:
    for status, error, expected in (
        (0, 5, 0), (28, 0, 0), (-110, 0, 110), (-1, 19, 19), (-1, -19, 19), (-1, 0, 1)
    ):  # fmt: skip
        event = read_event(copied_event(E.ADDR_ERROR, status=status, error=error))
        assert (event.status, event.errno) == (status, expected)


def test_only_events_with_a_destination_have_ah_attr() -> None:
    for kind, port_num, has_attributes in (
        (E.ESTABLISHED, 1, True),
        (E.MULTICAST_JOIN, 1, True),
        (E.ESTABLISHED, 0, False),
        (E.CONNECT_REQUEST, 1, False),
        (E.MULTICAST_ERROR, 1, False),
    ):
        value = distinct(AddressHandleAttributes, dgid=RAW_GID, is_global=True, port_num=port_num)
        copy = copied_event(kind)
        memory = untyped_ffi.addressof(copy, "ah_attr")
        ffi.memmove(memory, value.write(), untyped_ffi.sizeof(copy.ah_attr))
        assert read_event(copy).ah_attr == (value if has_attributes else None)
