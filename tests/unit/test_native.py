"""The compiled module: what it offers, how it is typed, and what it can be loaded with."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

from aiordma._native import _lib, ffi, lib

EXTENSION = Path(_lib.__file__)
STUB = EXTENSION.with_name("_lib.pyi")
CDEF = EXTENSION.with_name("cdef.h")

# The newest symbol versions of rdma-core 44, which Debian 12 has.
NEWEST = {"RDMACM": (1, 3), "IBVERBS": (1, 14)}
# Names with an underscore that belong to the stable ABI of CPython nevertheless.
STABLE_PRIVATE = {"_Py_Dealloc", "_Py_NoneStruct", "_Py_TrueStruct", "_Py_FalseStruct"}


def stub_class(name: str) -> ast.ClassDef:
    for node in ast.parse(STUB.read_text()).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node
    raise AssertionError(f"{STUB.name} has no class {name}")


def stub_constants() -> set[str]:
    body = stub_class("Lib").body
    return {node.target.id for node in body if isinstance(node, ast.AnnAssign)}


def stub_functions() -> dict[str, ast.FunctionDef]:
    body = stub_class("Lib").body
    return {node.name: node for node in body if isinstance(node, ast.FunctionDef)}


def compiled_functions() -> set[str]:
    return {name for name in dir(lib) if callable(getattr(lib, name))}


def readelf(*arguments: str) -> str:
    command = ["readelf", "--wide", *arguments, str(EXTENSION)]
    return subprocess.run(command, capture_output=True, check=True, text=True).stdout


def undefined_symbols() -> list[str]:
    """`name` or `name@VERSION` of all that the dynamic linker has to find elsewhere."""
    lines = [line.split() for line in readelf("--dyn-syms").splitlines()]
    return [fields[7] for fields in lines if len(fields) > 7 and fields[6] == "UND"]


def versions_of(library: str) -> list[tuple[int, ...]]:
    found = re.findall(rf"Name: {library}_(\S+)", readelf("--version-info"))
    return [tuple(map(int, version.split("."))) for version in found]


def test_the_stub_names_every_function_and_no_other() -> None:
    assert stub_functions().keys() == compiled_functions()


def test_the_stub_names_every_constant_and_no_other() -> None:
    assert stub_constants() == set(dir(lib)) - compiled_functions()


def test_every_constant_is_an_int() -> None:
    assert {name for name in stub_constants() if type(getattr(lib, name)) is not int} == set()


@pytest.mark.parametrize("name", sorted(compiled_functions()))
def test_the_stub_counts_the_arguments_of_each_function(name: str) -> None:
    arguments = stub_functions()[name].args.args
    assert len(arguments) - 1 == len(ffi.typeof(getattr(lib, name)).args)


@pytest.mark.parametrize("name", sorted(compiled_functions()))
def test_the_stub_tells_what_each_function_returns(name: str) -> None:
    returns = ast.unparse(stub_functions()[name].returns or ast.Constant(...))
    kind = ffi.typeof(getattr(lib, name)).result.kind
    expected = {"void": returns == "None", "primitive": returns == "int"}
    assert expected.get(kind, returns not in ("None", "int")), f"{kind} is not {returns}"


def test_every_function_of_cdef_is_compiled() -> None:
    text = re.sub(r"/\*.*?\*/", "", CDEF.read_text(), flags=re.DOTALL)
    declared = re.findall(r"^\w[\w *]*?[ *](\w+)\([^;{]*\);", text, flags=re.MULTILINE)
    assert declared
    assert set(declared) == compiled_functions()


STRUCTS = {
    "EventChannelPtr": "struct rdma_event_channel",
    "IbvDevice": "struct ibv_device",
    "IbvContext": "struct ibv_context",
    "IbvDeviceAttr": "struct ibv_device_attr",
    "IbvMr": "struct ibv_mr",
    "IbvCompChannel": "struct ibv_comp_channel",
    "IbvCq": "struct ibv_cq",
    "IbvQp": "struct ibv_qp",
    "IbvQpCap": "struct ibv_qp_cap",
    "IbvQpInitAttr": "struct ibv_qp_init_attr",
    "IbvWc": "struct ibv_wc",
    "CmIdPtr": "struct rdma_cm_id",
    "ConnParam": "struct rdma_conn_param",
    "CmEventCopy": "struct aiordma_cm_event",
}


@pytest.mark.parametrize(("name", "cdecl"), STRUCTS.items())
def test_the_stub_names_the_fields_of_each_struct(name: str, cdecl: str) -> None:
    typed = {node.target.id for node in stub_class(name).body if isinstance(node, ast.AnnAssign)}
    compiled = ffi.typeof(cdecl).fields
    assert compiled is not None
    assert typed == {field for field, _ in compiled}


def test_no_typed_struct_was_forgotten_here() -> None:
    classes = [node for node in ast.parse(STUB.read_text()).body if isinstance(node, ast.ClassDef)]
    structs = {
        node.name
        for node in classes
        if node.name not in ("Lib", "Ffi") and any(isinstance(e, ast.AnnAssign) for e in node.body)
    }
    assert structs == STRUCTS.keys()


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


def test_every_function_of_rdma_core_comes_with_a_version() -> None:
    theirs = [name for name in undefined_symbols() if name.startswith(("rdma_", "ibv_"))]
    assert len(theirs) > 20
    assert [name for name in theirs if not re.search(r"@(RDMACM|IBVERBS)_", name)] == []


def test_only_rdma_core_and_libc_are_needed() -> None:
    needed = set(re.findall(r"NEEDED.*\[(.+?)\]", readelf("--dynamic")))
    assert needed - {"libpthread.so.0"} == {"librdmacm.so.1", "libibverbs.so.1", "libc.so.6"}


def test_functions_reach_the_libraries() -> None:
    assert ffi.string(lib.ibv_wc_status_str(lib.IBV_WC_SUCCESS)) == b"success"
