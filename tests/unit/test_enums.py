"""The enumerations, compared with the installed C headers."""

from __future__ import annotations

import copy
import enum
import functools
import pickle
import re
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from aiordma import enums
from aiordma._native import ffi, lib

Kind = type[enum.IntEnum] | type[enum.IntFlag]

# The prefix of the members in C, and the enumeration there. Those without a name are macros.
IN_C: dict[Kind, tuple[str, str]] = {
    enums.CmEventType: ("RDMA_CM_EVENT_", "rdma_cm_event_type"),
    enums.PortSpace: ("RDMA_PS_", "rdma_port_space"),
    enums.IdOption: ("RDMA_OPTION_ID_", ""),
    enums.IbOption: ("RDMA_OPTION_IB_", ""),
    enums.AddrInfoFlags: ("RAI_", ""),
    enums.JoinFlags: ("RDMA_MC_JOIN_FLAG_", "rdma_cm_mc_join_flags"),
    enums.TransportType: ("IBV_TRANSPORT_", "ibv_transport_type"),
    enums.AccessFlags: ("IBV_ACCESS_", "ibv_access_flags"),
    enums.QpType: ("IBV_QPT_", "ibv_qp_type"),
    enums.QpState: ("IBV_QPS_", "ibv_qp_state"),
    enums.SrqType: ("IBV_SRQT_", "ibv_srq_type"),
    enums.PortState: ("IBV_PORT_", "ibv_port_state"),
    enums.AsyncEventType: ("IBV_EVENT_", "ibv_event_type"),
    enums.SendFlags: ("IBV_SEND_", "ibv_send_flags"),
    enums.WcStatus: ("IBV_WC_", "ibv_wc_status"),
    enums.WrOpcode: ("IBV_WR_", "ibv_wr_opcode"),
    enums.WcOpcode: ("IBV_WC_", "ibv_wc_opcode"),
    enums.WcFlags: ("IBV_WC_", "ibv_wc_flags"),
}
OPEN = [kind for kind in IN_C if issubclass(kind, enums.OpenIntEnum)]
FLAGS = [kind for kind in IN_C if issubclass(kind, enum.IntFlag)]
LEFT_OUT = """
The ends of lists: RDMA_MC_JOIN_FLAG_RESERVED IBV_QPS_UNKNOWN
Devices of other kinds, which librdmacm does not drive: IBV_TRANSPORT_UNKNOWN IBV_TRANSPORT_USNIC
IBV_TRANSPORT_USNIC_UDP IBV_TRANSPORT_UNSPECIFIED IBV_QPT_DRIVER IBV_WR_DRIVER1 IBV_WC_DRIVER1
IBV_WC_DRIVER2 IBV_WC_DRIVER3
Tag matching: IBV_SRQT_TM IBV_WC_TM_ADD IBV_WC_TM_DEL IBV_WC_TM_SYNC IBV_WC_TM_RECV
IBV_WC_TM_NO_TAG IBV_WC_TM_SYNC_REQ IBV_WC_TM_MATCH IBV_WC_TM_DATA_VALID
Raw packets: IBV_SEND_IP_CSUM IBV_WC_IP_CSUM_OK IBV_WC_TSO IBV_WR_TSO
Not used yet: IBV_WR_LOCAL_INV
Newer than the bindings: IBV_ACCESS_FLUSH_GLOBAL IBV_ACCESS_FLUSH_PERSISTENT
IBV_EVENT_DEVICE_SPEED_CHANGE IBV_WC_ATOMIC_WRITE IBV_WC_FLUSH IBV_WR_ATOMIC_WRITE IBV_WR_FLUSH
"""
"""The enumerators that the Python enumerations leave out."""

# Members for rdma-core 60 and later: the kernel's numbers, which rdma-core 44 has in no header.
NEWER = {
    "RDMA_CM_EVENT_ADDRINFO_RESOLVED": 16,
    "RDMA_CM_EVENT_ADDRINFO_ERROR": 17,
    "RDMA_CM_EVENT_USER": 18,
    "RDMA_CM_EVENT_INTERNAL": 19,
    "RAI_SA": 0x10,
    "RAI_DNS": 0x20,
}
NOT_MEMBERS = """
RDMA_OPTION_ID RDMA_OPTION_IB RDMA_MAX_RESP_RES RDMA_MAX_INIT_DEPTH RDMA_IB_IP_PS_MASK
RDMA_IB_IP_PORT_MASK RDMA_IB_IP_PS_TCP RDMA_IB_IP_PS_UDP RDMA_IB_PS_IB RDMA_UDP_QKEY
RDMA_CM_JOIN_MC_ATTR_ADDRESS RDMA_CM_JOIN_MC_ATTR_JOIN_FLAGS RDMA_CM_JOIN_MC_ATTR_RESERVED
RDMA_MC_JOIN_FLAG_RESERVED IBV_QP_INIT_ATTR_PD IBV_QP_INIT_ATTR_XRCD IBV_QP_INIT_ATTR_CREATE_FLAGS
IBV_QP_CREATE_BLOCK_SELF_MCAST_LB IBV_SRQ_INIT_ATTR_TYPE IBV_SRQ_INIT_ATTR_PD
IBV_SRQ_INIT_ATTR_XRCD IBV_SRQ_INIT_ATTR_CQ IBV_SRQ_LIMIT IBV_QP_STATE IBV_QP_RETRY_CNT
AIORDMA_CREATE_QP AIORDMA_POST_RECV AIORDMA_RESOLVE_ROUTE AIORDMA_ACCEPT AIORDMA_DISCONNECT
AIORDMA_DESTROY_ID AIORDMA_DESTROY_QP AIORDMA_CONNECT AIORDMA_NO_PARAMETERS
AIORDMA_CONNECTION_PARAMETERS IBV_MW_TYPE_2 IBV_DEVICE_MEM_WINDOW_TYPE_2B IBV_ODP_SUPPORT
"""
"""The constants that are no members: the bindings write them to structs, or compare with them."""


@functools.cache
def preprocessed() -> str:
    """Return the headers after the preprocessor, with the macros that they define."""
    source = "#include <infiniband/verbs.h>\n#include <rdma/rdma_cma.h>\n"
    command = ["cc", "-E", "-P", "-dD", "-"]
    done = subprocess.run(command, input=source, capture_output=True, check=True, text=True)
    return done.stdout


def in_headers(kind: Kind) -> set[str]:
    """Return the names that the headers have for an enumeration."""
    prefix, name = IN_C[kind]
    if not name:
        return set(re.findall(rf"\b{prefix}\w+", preprocessed()))
    text = re.sub("^#.*$", "", preprocessed(), flags=re.MULTILINE)
    body = re.search(rf"enum {name}\s*{{(.*?)}}", text, re.DOTALL)
    assert body, f"the headers have no enum {name}"
    return {part.split("=")[0].strip() for part in body[1].split(",") if part.strip()}


def members(kind: Kind) -> dict[str, int]:
    """Return the values of the members by their names in C."""
    return {f"{IN_C[kind][0]}{name}": int(value) for name, value in kind.__members__.items()}


ALL_MEMBERS = {name: value for kind in IN_C for name, value in members(kind).items()}


def test_every_constant_of_the_compiled_module_is_a_member_with_its_value() -> None:
    constants = {name: getattr(lib, name) for name in dir(lib)}
    in_c = {name: value for name, value in constants.items() if not callable(value)}
    for name in NEWER:
        in_c[name] = in_c.pop(re.sub("^RDMA_|^(?=RAI_)", "AIORDMA_", name))
    assert in_c.keys() - ALL_MEMBERS.keys() == set(NOT_MEMBERS.split())
    assert {name: in_c[name] for name in ALL_MEMBERS} == ALL_MEMBERS
    assert {name: in_c[name] for name in NEWER} == NEWER
    assert len(ALL_MEMBERS) > 100


def test_every_enumeration_is_compared_with_the_headers() -> None:
    here = vars(enums).values()
    assert {kind for kind in here if isinstance(kind, enum.EnumType) and len(kind)} == IN_C.keys()


@pytest.mark.parametrize("kind", IN_C)
def test_every_enumerator_option_and_macro_of_the_headers_is_a_member(kind: Kind) -> None:
    found, known = in_headers(kind), members(kind).keys()
    assert found
    assert found - known - set(re.findall(r"\w+_\w+", LEFT_OUT)) == set()
    assert known - found - NEWER.keys() == set()
    assert len(known) == len(list(kind))  # no two names have one value


@pytest.mark.parametrize("kind", OPEN)
def test_an_unknown_number_becomes_a_member(kind: type[enums.OpenIntEnum]) -> None:
    before = list(kind)
    for number in (1000, -5):
        member = kind(number)
        assert isinstance(member, kind)
        assert member == member.value == number
        assert (member, hash(member)) == (kind(number), hash(kind(number)))
        assert member.name == f"UNKNOWN_{number}"
        assert f"UNKNOWN_{number}" in repr(member)
        assert member.name not in kind.__members__
    assert list(kind) == before


SET_BY_THIS_SIDE = (enums.PortSpace, enums.IdOption, enums.IbOption, enums.JoinFlags)
REFUSED: list[Any] = [(kind, value) for kind in OPEN for value in ("1000", None, 1.5)]
REFUSED += [(kind, 1000) for kind in SET_BY_THIS_SIDE]


@pytest.mark.parametrize(("kind", "value"), REFUSED)
def test_other_values_are_refused(kind: type[enum.IntEnum], value: Any) -> None:
    with pytest.raises(ValueError, match="not a valid"):
        kind(value)


def through_pickle(member: object) -> object:
    return pickle.loads(pickle.dumps(member))


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, through_pickle])
def test_members_known_or_not_can_be_copied_and_pickled(
    duplicate: Callable[[enum.IntEnum | enum.IntFlag], enum.IntEnum | enum.IntFlag],
) -> None:
    kind = enums.CmEventType
    for member in (kind.REJECTED, kind(1000), enums.AccessFlags(3), enums.WcStatus.SUCCESS):
        duplicated = duplicate(member)
        assert duplicated == member
        assert (type(duplicated), duplicated.name) == (type(member), member.name)


@pytest.mark.parametrize("kind", FLAGS)
def test_flags_combine_and_keep_unknown_bits(kind: type[enum.IntFlag]) -> None:
    first, second = list(kind)[:2]
    both = first | second
    assert isinstance(both, kind)
    assert first in both
    assert both & ~first == second
    assert int(kind(1 << 30) | first) == 1 << 30 | first
    assert [member for member in kind if int(member).bit_count() != 1] == []


def test_the_library_has_a_text_for_each_status() -> None:
    texts = {ffi.string(lib.ibv_wc_status_str(status)) for status in enums.WcStatus}
    assert b"unknown" not in texts
    assert len(texts) == len(enums.WcStatus)
