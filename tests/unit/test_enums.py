"""The enumerations, compared with the installed C headers."""

from __future__ import annotations

import copy
import enum
import pickle
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from aiordma import enums
from aiordma._native import ffi, lib
from aiordma.enums import (
    AccessFlags,
    AddrInfoFlags,
    AsyncEventType,
    CmEventType,
    IbOption,
    IdOption,
    JoinFlags,
    OpenIntEnum,
    PortSpace,
    PortState,
    QpState,
    QpType,
    SendFlags,
    SrqType,
    TransportType,
    WcFlags,
    WcOpcode,
    WcStatus,
    WrOpcode,
)

PREFIXES: dict[type[enum.IntEnum] | type[enum.IntFlag], str] = {
    CmEventType: "RDMA_CM_EVENT_",
    PortSpace: "RDMA_PS_",
    IdOption: "RDMA_OPTION_ID_",
    IbOption: "RDMA_OPTION_IB_",
    AddrInfoFlags: "RAI_",
    JoinFlags: "RDMA_MC_JOIN_FLAG_",
    TransportType: "IBV_TRANSPORT_",
    AccessFlags: "IBV_ACCESS_",
    QpType: "IBV_QPT_",
    QpState: "IBV_QPS_",
    SrqType: "IBV_SRQT_",
    PortState: "IBV_PORT_",
    AsyncEventType: "IBV_EVENT_",
    SendFlags: "IBV_SEND_",
    WcStatus: "IBV_WC_",
    WrOpcode: "IBV_WR_",
    WcOpcode: "IBV_WC_",
    WcFlags: "IBV_WC_",
}
OPEN = [kind for kind in PREFIXES if issubclass(kind, OpenIntEnum)]
FLAGS = [kind for kind in PREFIXES if issubclass(kind, enum.IntFlag)]

# The name of each enumeration in C. The others are macros, or have no name in C.
IN_C: dict[type[enum.IntEnum] | type[enum.IntFlag], str] = {
    CmEventType: "rdma_cm_event_type",
    PortSpace: "rdma_port_space",
    JoinFlags: "rdma_cm_mc_join_flags",
    TransportType: "ibv_transport_type",
    AccessFlags: "ibv_access_flags",
    QpType: "ibv_qp_type",
    QpState: "ibv_qp_state",
    SrqType: "ibv_srq_type",
    PortState: "ibv_port_state",
    AsyncEventType: "ibv_event_type",
    SendFlags: "ibv_send_flags",
    WcStatus: "ibv_wc_status",
    WrOpcode: "ibv_wr_opcode",
    WcOpcode: "ibv_wc_opcode",
    WcFlags: "ibv_wc_flags",
}
# The enumerators that the Python enumerations leave out, by the reason.
LEFT_OUT = {
    "the end of the list": {"RDMA_MC_JOIN_FLAG_RESERVED", "IBV_QPS_UNKNOWN"},
    "devices of other kinds, which librdmacm does not drive": {
        "IBV_TRANSPORT_UNKNOWN",
        "IBV_TRANSPORT_USNIC",
        "IBV_TRANSPORT_USNIC_UDP",
        "IBV_TRANSPORT_UNSPECIFIED",
        "IBV_QPT_DRIVER",
        "IBV_WR_DRIVER1",
        "IBV_WC_DRIVER1",
        "IBV_WC_DRIVER2",
        "IBV_WC_DRIVER3",
    },
    "tag matching": {
        "IBV_SRQT_TM",
        "IBV_WC_TM_ADD",
        "IBV_WC_TM_DEL",
        "IBV_WC_TM_SYNC",
        "IBV_WC_TM_RECV",
        "IBV_WC_TM_NO_TAG",
        "IBV_WC_TM_SYNC_REQ",
        "IBV_WC_TM_MATCH",
        "IBV_WC_TM_DATA_VALID",
    },
    "raw packets": {"IBV_SEND_IP_CSUM", "IBV_WC_IP_CSUM_OK", "IBV_WC_TSO", "IBV_WR_TSO"},
    "not used yet": {"IBV_WR_LOCAL_INV"},
    "newer than the bindings": {
        "IBV_ACCESS_FLUSH_GLOBAL",
        "IBV_ACCESS_FLUSH_PERSISTENT",
        "IBV_EVENT_DEVICE_SPEED_CHANGE",
        "IBV_WC_ATOMIC_WRITE",
        "IBV_WC_FLUSH",
        "IBV_WR_ATOMIC_WRITE",
        "IBV_WR_FLUSH",
    },
}

# Members for rdma-core 60 and later: the kernel's numbers, which rdma-core 44 has in no header.
NEWER = {
    "RDMA_CM_EVENT_ADDRINFO_RESOLVED": 16,
    "RDMA_CM_EVENT_ADDRINFO_ERROR": 17,
    "RDMA_CM_EVENT_USER": 18,
    "RDMA_CM_EVENT_INTERNAL": 19,
    "RAI_SA": 0x10,
    "RAI_DNS": 0x20,
}
# Constants that are no members: the bindings write them to structs, or compare with them.
NOT_MEMBERS = {
    "RDMA_OPTION_ID",
    "RDMA_OPTION_IB",
    "RDMA_MAX_RESP_RES",
    "RDMA_MAX_INIT_DEPTH",
    "RDMA_IB_IP_PS_MASK",
    "RDMA_IB_IP_PORT_MASK",
    "RDMA_IB_IP_PS_TCP",
    "RDMA_IB_IP_PS_UDP",
    "RDMA_IB_PS_IB",
    "RDMA_UDP_QKEY",
    "RDMA_CM_JOIN_MC_ATTR_ADDRESS",
    "RDMA_CM_JOIN_MC_ATTR_JOIN_FLAGS",
    "RDMA_CM_JOIN_MC_ATTR_RESERVED",
    "RDMA_MC_JOIN_FLAG_RESERVED",
    "IBV_QP_INIT_ATTR_PD",
    "IBV_QP_INIT_ATTR_XRCD",
    "IBV_QP_INIT_ATTR_CREATE_FLAGS",
    "IBV_QP_CREATE_BLOCK_SELF_MCAST_LB",
    "IBV_SRQ_INIT_ATTR_TYPE",
    "IBV_SRQ_INIT_ATTR_PD",
    "IBV_SRQ_INIT_ATTR_XRCD",
    "IBV_SRQ_INIT_ATTR_CQ",
    "IBV_SRQ_LIMIT",
    "IBV_QP_STATE",
    "IBV_MW_TYPE_2",
    "IBV_DEVICE_MEM_WINDOW_TYPE_2B",
    "IBV_ODP_SUPPORT",
}
PROGRAM = """
#include <stdio.h>
#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>
int main(void) {{ {statements} return 0; }}
"""


def preprocessed(directory: Path) -> str:
    """Return the headers after the preprocessor, with the macros that they define."""
    source = directory / "headers.c"
    source.write_text("#include <infiniband/verbs.h>\n#include <rdma/rdma_cma.h>\n")
    command = ["cc", "-E", "-P", "-dD", str(source)]
    return subprocess.run(command, capture_output=True, check=True, text=True).stdout


def enumerators(name: str, directory: Path) -> list[str]:
    """Return the names that the headers list in `enum name`."""
    lines = preprocessed(directory).splitlines()
    text = "\n".join(line for line in lines if not line.startswith("#"))
    body = re.search(rf"enum {name}\s*{{(.*?)}}", text, re.DOTALL)
    assert body, f"the headers have no enum {name}"
    return [part.split("=")[0].strip() for part in body[1].split(",") if part.strip()]


def values_in_c(names: list[str], directory: Path) -> dict[str, int]:
    """Return the values of these names, as a compiled program prints them."""
    source, program = directory / "values.c", directory / "values"
    statements = " ".join(f'printf("%lld\\n", (long long)({name}));' for name in names)
    source.write_text(PROGRAM.format(statements=statements))
    subprocess.run(["cc", "-o", str(program), str(source)], check=True)
    output = subprocess.run([str(program)], capture_output=True, check=True, text=True).stdout
    return dict(zip(names, map(int, output.split()), strict=True))


def all_members() -> dict[str, int]:
    """Return the value of every member by its name in C."""
    return {
        f"{prefix}{member.name}": int(member)
        for kind, prefix in PREFIXES.items()
        for member in kind
    }


def test_every_member_has_the_value_of_the_header(tmp_path: Path) -> None:
    in_header = {name: value for name, value in all_members().items() if name not in NEWER}
    assert len(in_header) > 100
    assert values_in_c(list(in_header), tmp_path) == in_header


def test_members_newer_than_the_headers_have_the_numbers_of_the_kernel() -> None:
    assert {name: all_members()[name] for name in NEWER} == NEWER


def test_every_enumeration_is_compared_with_the_headers() -> None:
    here = vars(enums).values()
    found = {kind for kind in here if isinstance(kind, enum.EnumType) and len(kind)}
    assert found == PREFIXES.keys()
    assert PREFIXES.keys() - IN_C.keys() == {IdOption, IbOption, AddrInfoFlags}


@pytest.mark.parametrize(("kind", "name"), IN_C.items())
def test_every_enumerator_of_the_header_is_a_member(
    kind: type[enum.IntEnum] | type[enum.IntFlag], name: str, tmp_path: Path
) -> None:
    found = enumerators(name, tmp_path)
    known = {f"{PREFIXES[kind]}{member}" for member in kind.__members__}
    assert len(found) >= 3
    assert set(found) - known - set[str]().union(*LEFT_OUT.values()) == set()
    assert known - set(found) - NEWER.keys() == set()


@pytest.mark.parametrize("kind", [IdOption, IbOption, AddrInfoFlags])
def test_every_option_and_macro_of_the_header_is_a_member(
    kind: type[enum.IntEnum] | type[enum.IntFlag], tmp_path: Path
) -> None:
    found = set(re.findall(rf"\b{PREFIXES[kind]}\w+", preprocessed(tmp_path)))
    assert found
    known = {f"{PREFIXES[kind]}{member}" for member in kind.__members__}
    assert found - known == set()
    assert known - found - NEWER.keys() == set()


def test_an_enumeration_that_the_headers_lack_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="no enum"):
        enumerators("rdma_no_such_thing", tmp_path)


@pytest.mark.parametrize("kind", PREFIXES)
def test_no_two_names_share_a_value(kind: type[enum.IntEnum]) -> None:
    assert len(kind.__members__) == len(list(kind))


def test_every_constant_of_the_compiled_module_is_a_member() -> None:
    constants = {name for name in dir(lib) if not callable(getattr(lib, name))}
    newer = {re.sub("^RDMA_|^(?=RAI_)", "AIORDMA_", name) for name in NEWER}
    assert newer <= constants
    assert constants - all_members().keys() - newer == NOT_MEMBERS


@pytest.mark.parametrize("kind", OPEN)
@pytest.mark.parametrize("number", [1000, -5])
def test_an_unknown_number_becomes_a_member(kind: type[OpenIntEnum], number: int) -> None:
    member = kind(number)
    assert isinstance(member, kind)
    assert member == number
    assert member == kind(number)
    assert hash(member) == hash(kind(number))
    assert member.value == number
    assert member.name == f"UNKNOWN_{number}"
    assert f"UNKNOWN_{number}" in repr(member)


@pytest.mark.parametrize("kind", OPEN)
def test_an_unknown_number_is_not_listed_in_the_enumeration(kind: type[OpenIntEnum]) -> None:
    before = list(kind)
    kind(1000)
    assert list(kind) == before
    assert "UNKNOWN_1000" not in kind.__members__


@pytest.mark.parametrize("kind", OPEN)
@pytest.mark.parametrize("value", ["1000", None, 1.5])
def test_a_value_that_is_not_a_number_is_refused(kind: type[OpenIntEnum], value: object) -> None:
    with pytest.raises(ValueError, match="not a valid"):
        kind(value)  # type: ignore[arg-type]  # a wrong type on purpose


def through_pickle(member: object) -> object:
    return pickle.loads(pickle.dumps(member))


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, through_pickle])
def test_members_known_or_not_can_be_copied_and_pickled(
    duplicate: Callable[[enum.IntEnum | enum.IntFlag], enum.IntEnum | enum.IntFlag],
) -> None:
    for member in (CmEventType.REJECTED, CmEventType(1000), AccessFlags(3), WcStatus.SUCCESS):
        duplicated = duplicate(member)
        assert duplicated == member
        assert type(duplicated) is type(member)
        assert duplicated.name == member.name


@pytest.mark.parametrize("kind", [PortSpace, IdOption, IbOption, JoinFlags])
def test_an_unknown_number_is_refused_where_only_this_side_sets_it(
    kind: type[enum.IntEnum],
) -> None:
    with pytest.raises(ValueError, match="not a valid"):
        kind(1000)


@pytest.mark.parametrize("kind", FLAGS)
def test_flags_combine_and_keep_unknown_bits(kind: type[enum.IntFlag]) -> None:
    first, second = list(kind)[:2]
    both = first | second
    assert isinstance(both, kind)
    assert first in both
    assert both & ~first == second
    unknown = kind(1 << 30)
    assert int(unknown | first) == 1 << 30 | first


@pytest.mark.parametrize("kind", FLAGS)
def test_each_flag_is_one_bit(kind: type[enum.IntFlag]) -> None:
    assert [member for member in kind if int(member).bit_count() != 1] == []


def test_the_library_has_a_text_for_each_status() -> None:
    texts = {ffi.string(lib.ibv_wc_status_str(status)) for status in WcStatus}
    assert b"unknown" not in texts
    assert len(texts) == len(WcStatus)
