"""All declarations of rdma_cma.h and rdma_verbs.h are bound and documented."""

from __future__ import annotations

import functools
import inspect
import re
import subprocess
from collections.abc import Iterator
from typing import Any

import cffi
import pytest
from helpers import ROOT

import aiordma
import aiordma.rdmacm
import aiordma.verbs
from aiordma import enums
from aiordma._native import ffi, lib

untyped_ffi: Any = ffi  # _lib.pyi does not declare typeof(), CType and CField
HEADERS = ("rdma/rdma_cma.h", "rdma/rdma_verbs.h")
TABLE = ROOT / "docs" / "rdmacm.md"

# New in rdma-core 60, with the names by which they are bound.
NEWER_FUNCTIONS = {
    "rdma_resolve_addrinfo": "aiordma_resolve_addrinfo",  # which corrects its errno
    "rdma_query_addrinfo": "rdma_query_addrinfo",
    "rdma_write_cm_event": "rdma_write_cm_event",
}
NEWER_EVENTS = ("ADDRINFO_RESOLVED", "ADDRINFO_ERROR", "USER", "INTERNAL")
NEWER_CONSTANTS = {"RAI_SA": "AIORDMA_RAI_SA", "RAI_DNS": "AIORDMA_RAI_DNS"}
NEWER_CONSTANTS |= {f"RDMA_CM_EVENT_{name}": f"AIORDMA_CM_EVENT_{name}" for name in NEWER_EVENTS}
NEWER_FIELDS = {("struct rdma_cm_event", "param.arg")}  # read by cm_events.c

UNBOUND = {
    "rdma_seterrno": "a private helper of the inline functions",
    "RDMA_CMA_H": "an include guard",
    "RDMA_VERBS_H": "an include guard",
}

# Types that the headers use and do not define. Only their names are compared.
TYPES = """
typedef uint16_t __be16; typedef unsigned int socklen_t;
struct sockaddr { int _; }; struct sockaddr_in { int _; }; struct sockaddr_in6 { int _; };
struct sockaddr_storage { int _; }; struct ibv_ah_attr { int _; }; union ibv_gid { int _; };
"""
PROTOTYPE = re.compile(r"^(?:static inline )?(\w[\w\s*]*?)(\w+)\(([^;{}]*)\);", re.MULTILINE)
STRUCT = re.compile(r"^struct \w+(?= \{)", re.MULTILINE)


@functools.cache
def preprocessed(*options: str) -> str:
    """Return the preprocessed text of the two headers, without the headers that they include."""
    source = "".join(f"#include <{header}>\n" for header in HEADERS)
    command = ["cc", "-E", "-DNDEBUG", *options, "-"]
    done = subprocess.run(command, input=source, capture_output=True, check=True, text=True)
    kept, is_in_headers = [], False
    for line in done.stdout.splitlines():
        if marker := re.match(r'# \d+ "(.*?)"', line):
            is_in_headers = marker[1].endswith(HEADERS)
        elif is_in_headers:
            kept.append(line)
    return "\n".join(kept)


@functools.cache
def declarations() -> str:
    """Return the declarations of the headers: functions without bodies, enumerations as int."""
    text = re.sub(r"\n\{.*?\n\}", ";", preprocessed(), flags=re.DOTALL)
    return re.sub(r"\benum \w+\b(?!\s*\{)", "int", text)


@functools.cache
def parsed() -> Any:
    """Return what cffi makes of the declarations. Functions are fields of `struct functions`."""
    pointers = (f"{result} (*{name})({types});" for result, name, types in prototypes())
    others = PROTOTYPE.sub("", declarations())
    made = cffi.FFI()
    made.cdef(f"{TYPES} {others} struct functions {{ {''.join(pointers)} }};")
    return made


def prototypes() -> list[tuple[str, str, str]]:
    """Return the result, the name and the arguments of each function, also of inline ones."""
    return PROTOTYPE.findall(declarations())


def functions() -> dict[str, list[str]]:
    """Return the result and the arguments of each function."""
    members = parsed().typeof("struct functions").fields
    return {name: types_of(member.type) for name, member in members}


def types_of(function: Any) -> list[str]:
    return [function.result.cname, *(argument.cname for argument in function.args)]


def enumerators() -> dict[str, int]:
    library = parsed().dlopen(None)
    return {name: getattr(library, name) for name in dir(library)}


def number(text: str) -> int:
    return int(text.rstrip("ULul"), 0)


def macros() -> dict[str, str]:
    """Return each macro and its text."""
    lines = (line.split(maxsplit=2) for line in preprocessed("-dD").splitlines())
    return {words[1]: "".join(words[2:]) for words in lines if words[:1] == ["#define"]}


def structs() -> dict[str, list[tuple[str, str]]]:
    return {name: list(fields(parsed().typeof(name))) for name in STRUCT.findall(declarations())}


def fields(kind: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Generate the fields of a struct and their types, with the fields of the unions in it."""
    for name, field in kind.fields:
        is_union = field.type.kind == "union" and "$" in field.type.cname
        if name:
            yield prefix + name, "a union" if is_union else field.type.cname
        if is_union:
            yield from fields(field.type, f"{prefix}{name}." if name else prefix)


def test_the_headers_are_read() -> None:
    assert (len(functions()) >= 55, len(enumerators()) >= 30, len(structs()) >= 10) == (True,) * 3
    assert functions()["rdma_reject"] == ["int", "struct rdma_cm_id *", "void *", "uint8_t"]
    assert functions()["rdma_create_event_channel"] == ["struct rdma_event_channel *"]
    assert functions()["rdma_get_src_port"] == ["uint16_t", "struct rdma_cm_id *"]
    assert "rdma_post_ud_send" in functions()
    assert enumerators()["RDMA_CM_EVENT_TIMEWAIT_EXIT"] == 15
    assert macros()["RDMA_UDP_QKEY"] == "0x01234567"
    assert ("dst_sin6", "struct sockaddr_in6") in structs()["struct rdma_addr"]
    assert functions().keys() | macros().keys() >= UNBOUND.keys()


def bound(function: str) -> list[str]:
    """Return the result and the arguments of a function as it is bound."""
    return types_of(untyped_ffi.typeof(getattr(lib, NEWER_FUNCTIONS.get(function, function))))


@pytest.mark.parametrize("name", sorted(functions().keys() - UNBOUND.keys()))
def test_every_function_is_bound_as_it_is_declared(name: str) -> None:
    assert bound(name) == functions()[name]


def test_every_constant_is_bound_with_its_value() -> None:
    defined = {name: number(macros()[name]) for name in macros().keys() - UNBOUND.keys()}
    expected = enumerators() | defined
    found = {name: getattr(lib, NEWER_CONSTANTS.get(name, name)) for name in expected}
    assert found == expected


@pytest.mark.parametrize("name", structs())
def test_every_field_of_every_struct_is_bound_as_it_is_declared(name: str) -> None:
    declared = [entry for entry in structs()[name] if (name, entry[0]) not in NEWER_FIELDS]
    assert list(fields(untyped_ffi.typeof(name))) == declared


def test_newer_functions_are_bound_although_older_headers_lack_them() -> None:
    assert [name for name in UNBOUND if hasattr(lib, name)] == []
    cm_id = "struct rdma_cm_id *"
    assert {name: bound(name)[1:] for name in NEWER_FUNCTIONS} == {
        "rdma_resolve_addrinfo": [cm_id, "char *", "char *", "struct rdma_addrinfo *"],
        "rdma_query_addrinfo": [cm_id, "struct rdma_addrinfo * *"],
        "rdma_write_cm_event": [cm_id, "int", "int", "uint64_t"],
    }


@functools.cache
def rows() -> dict[str, tuple[list[str], list[str]]]:
    """Return the names in the second and third column of the tables, by C function."""
    found: dict[str, tuple[list[str], list[str]]] = {}
    for line in TABLE.read_text().splitlines():
        if match := re.match(r"\| `((?:rdma|ibv)_\w+)` \|", line):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            assert len(cells) == 5, line
            assert all(cells), line
            assert match[1] not in found, f"{match[1]} has two rows"
            found[match[1]] = names_in(cells[1]), names_in(cells[2])
    return found


def names_in(cell: str) -> list[str]:
    return re.findall(r"`([\w.]+)`", cell)


def resolve(name: str) -> object:
    """Return `aiordma.<name>`, which can be a field of a value class."""
    *path, last = name.split(".")
    owner: object = functools.reduce(getattr, path, aiordma)
    return getattr(owner, last)


def test_the_rows_are_exactly_the_functions_of_the_headers() -> None:
    declared = functions().keys() - UNBOUND.keys()
    assert rows().keys() == declared | NEWER_FUNCTIONS.keys()


@pytest.mark.parametrize("name", rows())
def test_every_row_names_existing_bindings_and_awaitable_counterparts(name: str) -> None:
    bindings, awaiting = rows()[name]
    assert {binding.split(".")[0] for binding in bindings} <= {"rdmacm", "verbs"}
    texts = [inspect.getdoc(resolve(binding)) or "" for binding in bindings]
    assert any(f"{name}(3)" in text for text in texts)
    assert {entry.split(".")[0] for entry in awaiting} <= {"AsyncCmId", "SyncCmId", "getaddrinfo"}
    for entry in awaiting:  # the counterparts of async ids exist for sync ids
        assert resolve(entry)
        assert resolve(entry.replace("AsyncCmId.", "SyncCmId.", 1))


def first_cells() -> set[str]:
    """Return all names that are alone in the first cell of a row, in any table."""
    return set(re.findall(r"^\| `([\w.]+)`(?:, [^|`]*)? \|", TABLE.read_text(), re.MULTILINE))


def test_every_event_option_and_flag_is_documented() -> None:
    kinds = [enums.CmEventType, enums.IdOption, enums.IbOption, enums.AddrInfoFlags]
    members = {f"{kind.__name__}.{name}" for kind in kinds for name in kind.__members__}
    members |= {f"JoinFlags.{name}" for name in enums.JoinFlags.__members__}
    assert members == {cell for cell in first_cells() if "." in cell}
