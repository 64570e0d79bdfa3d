"""The C module of the simulator: it defines the functions of librdmacm and libibverbs.

The module is loaded before aiordma's, with its symbols global. So aiordma's own C modules, which
are not changed, call these functions. The queues are C (device.c). All other functions call Python:
each function `f` of the libraries is an alias of `sim_f`, which cffi generates.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType

from cffi import FFI

HERE = Path(__file__).parent
NATIVE = HERE.parents[1] / "aiordma" / "_native"
CACHE = HERE.parents[1] / "build" / "simulator"
SOURCES = [HERE / "device.c", HERE / "device.h", Path(__file__), NATIVE / "cdef.h"]
MODULE = "aiordma_simulator"

# Members of C structs that the simulator uses, and aiordma does not.
_MEMBERS = {
    "ibv_pd": "struct ibv_context *context;",
    "ibv_mr": "struct ibv_context *context; struct ibv_pd *pd;",
    "ibv_comp_channel": "struct ibv_context *context;",
    "ibv_cq": "struct ibv_comp_channel *channel; struct ibv_context *context;",
    "ibv_qp": (
        "struct ibv_context *context; struct ibv_pd *pd; struct ibv_cq *send_cq; "
        "struct ibv_cq *recv_cq; struct ibv_srq *srq; int state; int qp_type;"
    ),
    "ibv_srq": "struct ibv_context *context;",
    "ibv_mw": "struct ibv_context *context; struct ibv_pd *pd;",
    "ibv_ah": "struct ibv_context *context; struct ibv_pd *pd;",
}
# Functions that cdef.h does not declare, because C code of aiordma calls them.
_MORE = """
struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *pd, void *addr, size_t length, uint64_t iova,
                                unsigned int access);
int ibv_query_port(struct ibv_context *context, uint8_t port_num, struct ibv_port_attr *attr);
int ibv_init_ah_from_wc(struct ibv_context *context, uint8_t port_num, struct ibv_wc *wc,
                        struct ibv_grh *grh, struct ibv_ah_attr *attr);
"""
# Inline functions, which call a function of the device: see sim_new_context().
_INLINE = {"ibv_alloc_mw", "ibv_dealloc_mw"}
# Functions of device.c, inline functions, and functions that only read memory.
_NOT_SIMULATED = {
    "ibv_poll_cq",
    "ibv_req_notify_cq",
    "ibv_inc_rkey",
    "ibv_get_srq_num",
    "ibv_wc_status_str",
    "ibv_event_type_str",
    "ibv_get_device_name",
    "rdma_event_str",
    "rdma_get_local_addr",
    "rdma_get_peer_addr",
    "rdma_get_src_port",
    "rdma_get_dst_port",
    "rdma_dereg_mr",
    "rdma_get_send_comp",
    "rdma_get_recv_comp",
}
_PROTOTYPE = re.compile(r"^[a-z][\w ]*[ *]+((?:rdma|ibv)_\w+)\([^;{]*\);[^\n]*\n", re.MULTILINE)
_FUNCTION = re.compile(r"^(?:struct|int|void)[^;{}]*?sim_\w+\([^;{}]*\);", re.MULTILINE)
_STRUCTS = """
struct ibv_grh { ...; };
struct sim_request {
    unsigned int order; uint64_t wr_id; int opcode; unsigned int flags; uint32_t imm_data;
    int num_sge;
    struct ibv_sge sge[...]; uint64_t remote_addr; uint32_t rkey; uint64_t compare_add;
    uint64_t swap; struct ibv_ah *ah; uint32_t remote_qpn; uint32_t remote_qkey;
    struct ibv_mw *mw; struct ibv_mr *mr; uint64_t bind_addr; uint64_t bind_length;
    unsigned int bind_access; unsigned int inline_length; char inline_data[...];
};
struct sim_queue {
    struct sim_request *ring;
    unsigned int capacity; unsigned int posted; unsigned int taken; unsigned int freed;
    unsigned int calls; int refusal; int refusal_errno; unsigned int accepted; ...;
};
struct sim_qp {
    struct ibv_qp qp; struct sim_queue sends; struct sim_queue receives;
    struct sim_queue *receive_queue; ...;
};
struct sim_srq { struct ibv_srq srq; struct sim_queue receives; ...; };
struct sim_cq {
    struct ibv_cq cq; unsigned int capacity; unsigned int put; unsigned int visible;
    unsigned int polled; int is_armed; int has_overflowed; unsigned int hidden_until;
    int poll_failure; int arm_failure; unsigned int polls; unsigned int arms;
    unsigned int events; unsigned int acknowledged; ...;
};
struct sim_channel { struct ibv_comp_channel channel; unsigned int raised; unsigned int read;
    int failure; ...; };
struct sim_context { unsigned int raised; unsigned int read; int failure; ...; };
struct ibv_context *sim_ibv_context(struct sim_context *context);
"""


class _Declarations:
    """The declarations for cffi, and the names of the functions that Python defines."""

    def __init__(self) -> None:
        text = (NATIVE / "cdef.h").read_text().partition("/* --- helpers.h")[0]
        prototypes = {found[1]: found[0] for found in _PROTOTYPE.finditer(text + _MORE)}
        self.names = sorted(
            name
            for name in prototypes
            if name not in _NOT_SIMULATED and not name.startswith(("rdma_post_", "rdma_reg_"))
        )
        structs = re.sub(
            r"^const char \*gai_strerror.*\n", "", _PROTOTYPE.sub("", text), flags=re.M
        )
        for name, members in _MEMBERS.items():
            structs, count = re.subn(rf"^(struct {name} {{)", rf"\1 {members}", structs, flags=re.M)
            assert count == 1, f"cdef.h does not define struct {name}"
            if not re.search(rf"^struct {name} {{[^}}]*\.\.\.;", structs, re.M):
                raise AssertionError(f"struct {name} is not partial in cdef.h")
        header = (HERE / "device.h").read_text()
        functions = "\n".join(_FUNCTION.findall(header))
        simulated = "".join(
            prototypes[name].replace(f"{name}(", f"sim_{name}(", 1) for name in self.names
        )
        self.text = f'{structs}{_STRUCTS}{functions}extern "Python+C" {{\n{simulated}}}\n'

    def aliases(self) -> str:
        """Return C code that gives each function its name in the libraries."""
        undefine = "#undef ibv_reg_mr\n#undef ibv_query_port\n"
        return undefine + "".join(
            f'extern __typeof__({name}) {name} __attribute__((alias("sim_{name}")));\n'
            for name in self.names
            if name not in _INLINE
        )


_SOURCE = """
#include "helpers.h"
#include "device.h"
struct ibv_context *sim_ibv_context(struct sim_context *context)
{
    return &context->verbs.context;
}
"""


def build(folder: Path) -> None:
    """Compile the module into `folder`, with the options of CFLAGS."""
    declarations = _Declarations()
    shutil.copy(HERE / "device.c", folder)  # a relative path, so that the object stays in `folder`
    ffi = FFI()
    ffi.cdef(declarations.text)
    ffi.set_source(
        MODULE,
        _SOURCE + declarations.aliases(),
        sources=["device.c"],
        include_dirs=[str(HERE), str(NATIVE)],
        extra_compile_args=["-O1", "-g", "-Wno-attribute-alias", "-Wno-unused-parameter"],
    )
    ffi.compile(tmpdir=str(folder))


def load() -> ModuleType:
    """Load the module with its symbols global. Compile it first if its sources have changed.

    Raises:
        RuntimeError: aiordma is loaded already, and uses the real libraries.
    """
    if "aiordma._native._lib" in sys.modules:
        raise RuntimeError("the simulator must be loaded before aiordma")
    key = hashlib.sha256(b"".join(path.read_bytes() for path in SOURCES))
    key.update(f"{sys.version}{os.environ.get('CFLAGS', '')}".encode())
    folder = CACHE / key.hexdigest()[:16]
    if not folder.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as made:
            _compile_in_process(Path(made))
            try:
                Path(made).rename(folder)
            except OSError:
                assert folder.exists()  # another process was faster
            else:
                Path(made).mkdir()  # for the end of the block
    (path,) = folder.glob(f"{MODULE}*.so")
    flags = sys.getdlopenflags()
    sys.setdlopenflags(os.RTLD_NOW | os.RTLD_GLOBAL)
    try:
        loader = importlib.machinery.ExtensionFileLoader(MODULE, str(path))
        spec = importlib.util.spec_from_file_location(MODULE, path, loader=loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    finally:
        sys.setdlopenflags(flags)
    return module


def _compile_in_process(folder: Path) -> None:
    """Compile in a process of its own: setuptools changes its process."""
    done = subprocess.run(
        [sys.executable, __file__, str(folder)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"the simulator cannot be compiled:\n{done.stdout}{done.stderr}")


if __name__ == "__main__":
    build(Path(sys.argv[1]))
