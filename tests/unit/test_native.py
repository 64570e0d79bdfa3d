"""The compiled module: its functions, its types in the stub, and the libraries that it needs."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from parsing import parse

from aiordma._native import _lib, ffi, lib

untyped_ffi: Any = ffi  # _lib.pyi does not declare typeof() and CType
EXTENSION = Path(_lib.__file__)
STUB = EXTENSION.with_name("_lib.pyi")
CDEF = EXTENSION.with_name("cdef.h")

# The newest symbol versions of rdma-core 44, the version in Debian 12.
NEWEST = {"RDMACM": (1, 3), "IBVERBS": (1, 14)}
# Names with an underscore that are part of the stable ABI of CPython.
STABLE_PRIVATE = {"_Py_Dealloc", "_Py_NoneStruct", "_Py_TrueStruct", "_Py_FalseStruct"}


def stub_classes() -> dict[str, ast.ClassDef]:
    body = parse(STUB.read_text()).body
    return {node.name: node for node in body if isinstance(node, ast.ClassDef)}


def stub_fields(name: str) -> dict[str, str]:
    """Return the fields of a class and of its bases, with their annotations."""
    node = stub_classes()[name]
    fields: dict[str, str] = {}
    for base in node.bases:
        fields |= stub_fields(ast.unparse(base))
    annotated = [entry for entry in node.body if isinstance(entry, ast.AnnAssign)]
    return fields | {ast.unparse(e.target): ast.unparse(e.annotation) for e in annotated}


def stub_constants() -> set[str]:
    return set(stub_fields("Lib"))


def stub_functions() -> dict[str, ast.FunctionDef]:
    body = stub_classes()["Lib"].body
    return {node.name: node for node in body if isinstance(node, ast.FunctionDef)}


def compiled_functions() -> set[str]:
    return {name for name in dir(lib) if callable(getattr(lib, name))}


def readelf(*arguments: str) -> str:
    command = ["readelf", "--wide", *arguments, str(EXTENSION)]
    return subprocess.run(command, capture_output=True, check=True, text=True).stdout


def undefined_symbols() -> list[str]:
    """Return `name` or `name@VERSION` of each symbol that another library defines."""
    lines = [line.split() for line in readelf("--dyn-syms").splitlines()]
    return [fields[7] for fields in lines if len(fields) > 7 and fields[6] == "UND"]


def versions_of(library: str) -> list[tuple[int, ...]]:
    found = re.findall(rf"Name: {library}_(\S+)", readelf("--version-info"))
    return [tuple(map(int, version.split("."))) for version in found]


def test_the_stub_has_exactly_the_compiled_functions() -> None:
    assert stub_functions().keys() == compiled_functions()


def test_the_stub_has_exactly_the_compiled_constants() -> None:
    assert stub_constants() == set(dir(lib)) - compiled_functions()


def test_every_constant_is_an_int() -> None:
    assert {name for name in stub_constants() if type(getattr(lib, name)) is not int} == set()


@pytest.mark.parametrize("name", sorted(compiled_functions()))
def test_the_stub_has_the_right_number_of_arguments(name: str) -> None:
    arguments = stub_functions()[name].args.args
    assert len(arguments) - 1 == len(untyped_ffi.typeof(getattr(lib, name)).args)


@pytest.mark.parametrize("name", sorted(compiled_functions()))
def test_the_stub_has_the_right_return_types(name: str) -> None:
    returns = ast.unparse(stub_functions()[name].returns or ast.Constant(...))
    kind = untyped_ffi.typeof(getattr(lib, name)).result.kind
    expected = {"void": returns == "None", "primitive": returns == "int"}
    assert expected.get(kind, returns not in ("None", "int")), f"{kind} is not {returns}"


def test_every_function_of_cdef_is_compiled() -> None:
    text = re.sub(r"/\*.*?\*/", "", CDEF.read_text(), flags=re.DOTALL)
    declared = re.findall(r"^\w[\w *]*?[ *](\w+)\([^;{]*\);", text, flags=re.MULTILINE)
    assert declared
    assert set(declared) == compiled_functions()


STRUCTS = {
    "AddrInfoPtr": "struct rdma_addrinfo",
    "AddrUnion": "struct rdma_addr.addr",
    "AsyncEventCopy": "struct aiordma_async_event",
    "CmEventCopy": "struct aiordma_cm_event",
    "CmEventPtr": "struct rdma_cm_event",
    "CmIdPtr": "struct rdma_cm_id",
    "CmRoute": "struct rdma_route",
    "ConnParam": "struct rdma_conn_param",
    "EventChannelPtr": "struct rdma_event_channel",
    "Gid": "union ibv_gid",
    "GlobalRoute": "struct ibv_global_route",
    "IbAddr": "struct rdma_ib_addr",
    "IbvAhAttr": "struct ibv_ah_attr",
    "IbvCompChannel": "struct ibv_comp_channel",
    "IbvContext": "struct ibv_context",
    "IbvCq": "struct ibv_cq",
    "IbvDevice": "struct ibv_device",
    "IbvDeviceAttr": "struct ibv_device_attr",
    "IbvEce": "struct ibv_ece",
    "IbvMr": "struct ibv_mr",
    "IbvMw": "struct ibv_mw",
    "IbvPortAttr": "struct ibv_port_attr",
    "IbvQp": "struct ibv_qp",
    "IbvQpAttr": "struct ibv_qp_attr",
    "IbvQpCap": "struct ibv_qp_cap",
    "IbvQpInitAttr": "struct ibv_qp_init_attr",
    "IbvQpInitAttrEx": "struct ibv_qp_init_attr_ex",
    "IbvSge": "struct ibv_sge",
    "IbvSrqAttr": "struct ibv_srq_attr",
    "IbvSrqInitAttr": "struct ibv_srq_init_attr",
    "IbvSrqInitAttrEx": "struct ibv_srq_init_attr_ex",
    "IbvWc": "struct ibv_wc",
    "JoinAttr": "struct rdma_cm_join_mc_attr_ex",
    "RequestChainPtr": "struct aiordma_chain",
    "RouteAddr": "struct rdma_addr",
    "SaPathRec": "struct ibv_sa_path_rec",
}
# Fields that only C code reads: those of an event, which is copied, and the socket addresses, for
# which librdmacm has functions.
UNTYPED = {
    "CmEventPtr": {"listen_id", "event", "status", "param"},
    "RouteAddr": {
        f"{side}_{form}" for side in ("src", "dst") for form in ("addr", "sin", "sin6", "storage")
    },
}


def c_type(cdecl: str) -> Any:
    """Return the type of a struct, or of a struct's field."""
    struct, _, field = cdecl.partition(".")
    kind = untyped_ffi.typeof(struct)
    return dict(kind.fields)[field].type if field else kind


def fields_in_c(name: str) -> dict[str, Any]:
    found = c_type(STRUCTS[name]).fields
    assert found
    return {field: entry.type for field, entry in found}


@pytest.mark.parametrize("name", STRUCTS)
def test_the_stub_has_the_fields_of_each_struct(name: str) -> None:
    assert stub_fields(name).keys() | UNTYPED.get(name, set()) == fields_in_c(name).keys()
    assert stub_fields(name).keys().isdisjoint(UNTYPED.get(name, set()))


@pytest.mark.parametrize("name", STRUCTS)
def test_the_stub_types_the_fields_of_each_struct(name: str) -> None:
    in_c = fields_in_c(name)
    for field, annotation in stub_fields(name).items():
        annotated = re.sub(r"Final\[(.*)\]", r"\1", annotation)
        kind = in_c[field].item if in_c[field].kind == "pointer" else in_c[field]
        if in_c[field].kind == "primitive":
            assert annotated == "int", field
        elif annotated in STRUCTS:
            assert kind is c_type(STRUCTS[annotated]), field
        else:
            assert kind.kind in ("primitive", "array", "void", "struct"), field
            assert annotated != "int", field


def test_all_typed_structs_are_in_this_test() -> None:
    structs = {name for name in stub_classes() if stub_fields(name)}
    assert structs - {"Lib", "Ffi", "NullPtr"} == STRUCTS.keys()


def test_the_extension_is_for_the_stable_abi() -> None:
    assert EXTENSION.name.endswith(".abi3.so")
    private = {name for name in undefined_symbols() if name.startswith("_Py")}
    assert private <= STABLE_PRIVATE


@pytest.mark.parametrize("library", NEWEST)
def test_nothing_newer_than_rdma_core_44_is_linked(library: str) -> None:
    versions = versions_of(library)
    assert versions
    assert max(versions) <= NEWEST[library]


def test_no_private_symbol_of_rdma_core_is_linked() -> None:
    assert [name for name in undefined_symbols() if "_PRIVATE" in name] == []


def test_every_function_of_rdma_core_has_a_symbol_version() -> None:
    rdma_core_symbols = [name for name in undefined_symbols() if name.startswith(("rdma_", "ibv_"))]
    assert len(rdma_core_symbols) > 20
    assert [name for name in rdma_core_symbols if not re.search(r"@(RDMACM|IBVERBS)_", name)] == []


def test_only_rdma_core_and_libc_are_needed() -> None:
    needed = set(re.findall(r"NEEDED.*\[(.+?)\]", readelf("--dynamic")))
    assert needed - {"libpthread.so.0"} == {"librdmacm.so.1", "libibverbs.so.1", "libc.so.6"}


def test_a_function_calls_the_library() -> None:
    assert ffi.string(lib.ibv_wc_status_str(lib.IBV_WC_SUCCESS)) == b"success"
