"""The enumerations against the C headers that are installed."""

from __future__ import annotations

import copy
import enum
import pickle
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from aiordma._native import ffi, lib
from aiordma.enums import (
    AccessFlags,
    CmEventType,
    IdOption,
    OpenIntEnum,
    PortSpace,
    QpType,
    SendFlags,
    TransportType,
    WcFlags,
    WcOpcode,
    WcStatus,
)

PREFIXES: dict[type[enum.IntEnum] | type[enum.IntFlag], str] = {
    CmEventType: "RDMA_CM_EVENT_",
    PortSpace: "RDMA_PS_",
    IdOption: "RDMA_OPTION_ID_",
    TransportType: "IBV_TRANSPORT_",
    AccessFlags: "IBV_ACCESS_",
    QpType: "IBV_QPT_",
    SendFlags: "IBV_SEND_",
    WcStatus: "IBV_WC_",
    WcOpcode: "IBV_WC_",
    WcFlags: "IBV_WC_",
}
OPEN = [kind for kind in PREFIXES if issubclass(kind, OpenIntEnum)]
FLAGS = [kind for kind in PREFIXES if issubclass(kind, enum.IntFlag)]

# Of rdma-core 60 and later; the kernel's numbers, which no header of rdma-core 44 has.
NEWER_EVENTS = {
    CmEventType.ADDRINFO_RESOLVED: 16,
    CmEventType.ADDRINFO_ERROR: 17,
    CmEventType.USER: 18,
    CmEventType.INTERNAL: 19,
}
PROGRAM = """
#include <stdio.h>
#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>
int main(void) {{ {statements} return 0; }}
"""


def enumerators(name: str, directory: Path) -> list[str]:
    """The names that the preprocessed headers list in `enum name`."""
    source = directory / "headers.c"
    source.write_text("#include <infiniband/verbs.h>\n#include <rdma/rdma_cma.h>\n")
    command = ["cc", "-E", "-P", str(source)]
    text = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    body = re.search(rf"enum {name}\s*{{(.*?)}}", text, re.DOTALL)
    assert body, f"the headers have no enum {name}"
    return [part.split("=")[0].strip() for part in body[1].split(",") if part.strip()]


def values_in_c(names: list[str], directory: Path) -> dict[str, int]:
    """What the compiler makes of these names."""
    source, program = directory / "values.c", directory / "values"
    statements = " ".join(f'printf("%lld\\n", (long long)({name}));' for name in names)
    source.write_text(PROGRAM.format(statements=statements))
    subprocess.run(["cc", "-o", str(program), str(source)], check=True)
    output = subprocess.run([str(program)], capture_output=True, check=True, text=True).stdout
    return dict(zip(names, map(int, output.split()), strict=True))


def test_every_member_has_the_value_of_the_header(tmp_path: Path) -> None:
    members = {
        f"{prefix}{member.name}": int(member)
        for kind, prefix in PREFIXES.items()
        for member in kind
        if member not in NEWER_EVENTS or kind is not CmEventType
    }
    assert values_in_c(list(members), tmp_path) == members


def test_events_newer_than_the_header_have_the_kernels_numbers() -> None:
    assert {event: int(event) for event in NEWER_EVENTS} == NEWER_EVENTS


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("rdma_cm_event_type", CmEventType),
        ("ibv_wc_status", WcStatus),
        ("rdma_port_space", PortSpace),
    ],
)
def test_every_enumerator_of_the_header_is_a_member(
    name: str, kind: type[enum.IntEnum], tmp_path: Path
) -> None:
    found = enumerators(name, tmp_path)
    known = {f"{PREFIXES[kind]}{member}" for member in kind.__members__}
    assert len(found) >= 4
    assert set(found) - known == set()


def test_the_header_is_read_and_not_guessed(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="no enum"):
        enumerators("rdma_no_such_thing", tmp_path)


@pytest.mark.parametrize("kind", PREFIXES)
def test_no_two_names_share_a_value(kind: type[enum.IntEnum]) -> None:
    assert len(kind.__members__) == len(list(kind))


def test_every_constant_of_the_compiled_module_is_a_member() -> None:
    constants = {name for name in dir(lib) if not callable(getattr(lib, name))}
    members = {f"{prefix}{name}" for kind, prefix in PREFIXES.items() for name in kind.__members__}
    members |= {f"AIORDMA_CM_EVENT_{event.name}" for event in NEWER_EVENTS}
    assert constants - members == {"RDMA_OPTION_ID", "IBV_EVENT_COMM_EST"}


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
def test_an_unknown_number_stays_out_of_the_enumeration(kind: type[OpenIntEnum]) -> None:
    before = list(kind)
    kind(1000)
    assert list(kind) == before
    assert "UNKNOWN_1000" not in kind.__members__


@pytest.mark.parametrize("kind", OPEN)
@pytest.mark.parametrize("value", ["1000", None, 1.5])
def test_what_is_no_number_is_no_member(kind: type[OpenIntEnum], value: object) -> None:
    with pytest.raises(ValueError, match="not a valid"):
        kind(value)


def through_pickle(member: object) -> object:
    return pickle.loads(pickle.dumps(member))


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, through_pickle])
def test_members_known_or_not_can_be_copied_and_pickled(
    duplicate: Callable[[enum.IntEnum], enum.IntEnum],
) -> None:
    for member in (CmEventType.REJECTED, CmEventType(1000), AccessFlags(3), WcStatus.SUCCESS):
        twin = duplicate(member)
        assert twin == member
        assert type(twin) is type(member)
        assert twin.name == member.name


@pytest.mark.parametrize("kind", [PortSpace, IdOption, QpType])
def test_what_this_side_chooses_must_be_known(kind: type[enum.IntEnum]) -> None:
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


def test_the_library_knows_each_status() -> None:
    texts = {ffi.string(lib.ibv_wc_status_str(status)) for status in WcStatus}
    assert b"unknown" not in texts
    assert len(texts) == len(WcStatus)
