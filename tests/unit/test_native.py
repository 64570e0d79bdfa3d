"""The compiled module: its functions, its types in the stub, and the libraries that it needs."""

from __future__ import annotations

import ast
import ctypes
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from parsing import parse

from aiordma._native import _lib, fast_path, ffi, lib

untyped_ffi: Any = ffi  # _lib.pyi does not declare typeof() and CType
EXTENSION = Path(_lib.__file__)
STUB = EXTENSION.with_name("_lib.pyi")
CDEF = EXTENSION.with_name("cdef.h")

# The newest symbol versions of rdma-core 44, the version in Debian 12.
NEWEST = {"librdmacm.so.1": (1, 3), "libibverbs.so.1": (1, 14)}
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


def stub_functions() -> dict[str, ast.FunctionDef]:
    body = stub_classes()["Lib"].body
    return {node.name: node for node in body if isinstance(node, ast.FunctionDef)}


def compiled_functions() -> set[str]:
    return {name for name in dir(lib) if callable(getattr(lib, name))}


def readelf(path: Path, *arguments: str) -> str:
    command = ["readelf", "--wide", *arguments, str(path)]
    return subprocess.run(command, capture_output=True, check=True, text=True).stdout


def dynamic_symbols(path: Path) -> list[str]:
    """Return `name`, `name@VERSION` or `name@@VERSION` of each dynamic symbol of a library."""
    lines = [line.split() for line in readelf(path, "--dyn-syms").splitlines()]
    return [fields[7] for fields in lines if len(fields) > 7]


def library_path(name: str) -> Path:
    """Return the path of an installed library."""
    ctypes.CDLL(name)
    maps = Path("/proc/self/maps").read_text()
    return Path(re.findall(rf"/\S*/{name.split('.so')[0]}\.so\.\S*", maps)[0])


def test_the_stub_has_exactly_the_compiled_functions_and_constants() -> None:
    constants = stub_fields("Lib").keys()
    assert stub_functions().keys() == compiled_functions()
    assert constants == set(dir(lib)) - compiled_functions()
    assert {name for name in constants if type(getattr(lib, name)) is not int} == set()


@pytest.mark.parametrize("name", sorted(compiled_functions()))
def test_the_stub_has_the_signature_of_each_function(name: str) -> None:
    stub, signature = stub_functions()[name], untyped_ffi.typeof(getattr(lib, name))
    assert len(stub.args.args) - 1 == len(signature.args)
    returns = ast.unparse(stub.returns or ast.Constant(...))
    expected = {"void": returns == "None", "primitive": returns == "int"}
    assert expected.get(signature.result.kind, returns not in ("None", "int")), returns


def test_every_function_of_cdef_is_compiled() -> None:
    text = re.sub(r"/\*.*?\*/", "", CDEF.read_text(), flags=re.DOTALL)
    declared = re.findall(r"^\w[\w *]*?[ *](\w+)\([^;{]*\);", text, flags=re.MULTILINE)
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
    "IdCallsPtr": "struct aiordma_id_calls",
    "JoinAttr": "struct rdma_cm_join_mc_attr_ex",
    "RequestChainPtr": "struct aiordma_chain",
    "RouteAddr": "struct rdma_addr",
    "SaPathRec": "struct ibv_sa_path_rec",
}
STRUCTS |= {  # such as IbvQpAttr for struct ibv_qp_attr
    name: f"struct ibv{re.sub('[A-Z]', lambda letter: '_' + letter[0].lower(), name[3:])}"
    for name in stub_classes()
    if name.startswith("Ibv") and stub_fields(name)
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


@pytest.mark.parametrize("name", STRUCTS)
def test_the_stub_has_the_fields_and_types_of_each_struct(name: str) -> None:
    fields = {field: entry.type for field, entry in c_type(STRUCTS[name]).fields}
    assert stub_fields(name).keys() == fields.keys() - UNTYPED.get(name, set())
    for field, annotation in stub_fields(name).items():
        annotated = re.sub(r"Final\[(.*)\]", r"\1", annotation)
        kind = fields[field].item if fields[field].kind == "pointer" else fields[field]
        if fields[field].kind == "primitive":
            assert annotated == "int", field
        elif annotated in STRUCTS:
            assert kind is c_type(STRUCTS[annotated]), field
        else:
            assert kind.kind in ("primitive", "array", "void", "struct", "pointer"), field
            assert annotated != "int", field


def test_all_typed_structs_are_in_this_test() -> None:
    structs = {name for name in stub_classes() if stub_fields(name)}
    assert structs - {"Lib", "Ffi", "NullPtr"} == STRUCTS.keys()


def test_the_extension_is_for_the_stable_abi() -> None:
    assert EXTENSION.name.endswith(".abi3.so")
    private = {name for name in dynamic_symbols(EXTENSION) if name.startswith("_Py")}
    assert private <= STABLE_PRIVATE


@pytest.mark.parametrize("extension", [EXTENSION, Path(fast_path.__file__)])
def test_the_extensions_are_linked_with_libc_only(extension: Path) -> None:
    needed = set(re.findall(r"NEEDED.*\[(.+?)\]", readelf(extension, "--dynamic")))
    assert needed - {"libpthread.so.0", "libdl.so.2"} == {"libc.so.6"}
    assert [name for name in dynamic_symbols(extension) if name.startswith(("rdma_", "ibv_"))] == []


def test_only_public_functions_of_rdma_core_44_are_looked_up() -> None:
    """Except those of rdma-core 60, whose absence is an error of the call only."""
    text = (EXTENSION.parent / "libraries.c").read_text()
    old, _, new = text.partition("/* New in rdma-core 60. */")
    new, _, verbs = new.partition("\n\n")
    names = [re.findall(r"^(?:[A-Z]+)\((?:.*?\*, )?(\w+), \(", part, re.M) for part in (old, verbs)]
    for library, wanted in zip(("librdmacm.so.1", "libibverbs.so.1"), names, strict=True):
        assert len(wanted) > 25
        symbols = "\n".join(dynamic_symbols(library_path(library)))
        for name in wanted:
            (version,) = re.findall(rf"^{name}@@[A-Z]+_([\d.]+)$", symbols, re.M)
            assert tuple(map(int, version.split("."))) <= NEWEST[library], name


def test_the_fast_path_refuses_wrong_arguments() -> None:
    kinds: list[Any] = [kind for kind in vars(fast_path).values() if isinstance(kind, type)]
    kinds.remove(fast_path.Transfer)  # only start_transfer() makes one
    kinds.remove(fast_path.PooledBuffer)  # only FreeBuffers.add() makes one
    kinds.remove(fast_path.InlineFuture)  # it takes any loop and callback
    kinds.remove(fast_path.InlineFutureFactory)
    kinds.remove(fast_path.WaitQueue)
    kinds.remove(fast_path.AdaptivePolling)  # it takes any state
    kinds.remove(fast_path.Attempt)  # only other methods make one
    methods = [
        getattr(kind.__new__(kind), name)
        for kind in kinds
        for name in vars(kind)
        if callable(vars(kind)[name]) and not name.startswith("__")
        # These take any object.
        if name not in ("send", "try_send", "acquire", "commit", "recv", "next")
        if (kind, name) != (fast_path.SendQueueCore, "set_slow")
    ]
    for call in (*methods, *kinds, fast_path.set_functions):
        arguments = ["x"] * 4 if call is fast_path.CompletionDispatcher else ["x"]
        with pytest.raises(TypeError):
            call(*arguments)
    with pytest.raises(ValueError, match="must not be negative"):
        fast_path.ReceiveRingCore(1, -1)


def test_a_closed_queue_or_channel_has_no_completions() -> None:
    dispatcher = fast_path.CompletionDispatcher(pytest.fail)
    assert dispatcher.poll(0) == dispatcher.poll_for(0, 0) == 0
    dispatcher.watch(0)
    dispatcher.handle_event()
    dispatcher.arm_again(fast_path.PolledQueue())
