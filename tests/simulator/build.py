"""The C module of the simulator: it defines the functions of librdmacm and libibverbs.

The module is loaded before aiordma's, with its symbols global. So aiordma's own C modules, which
are not changed, call these functions. The queues are C (device.c). All other functions call Python:
each function `f` of the libraries is an alias of `sim_f`, which cffi generates.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
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
int ibv_query_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask,
                 struct ibv_qp_init_attr *init);
int ibv_init_ah_from_wc(struct ibv_context *context, uint8_t port_num, struct ibv_wc *wc,
                        struct ibv_grh *grh, struct ibv_ah_attr *attr);
"""
# Inline functions, which call a function of the device: see sim_new_context().
_INLINE = {"ibv_alloc_mw", "ibv_dealloc_mw"}
# Functions of device.c, inline functions, and functions that only read memory.
_NOT_SIMULATED = {
    "ibv_poll_cq", "ibv_req_notify_cq", "ibv_inc_rkey", "ibv_get_srq_num", "ibv_wc_status_str",
    "ibv_event_type_str", "ibv_get_device_name", "rdma_event_str", "rdma_get_local_addr",
    "rdma_get_peer_addr", "rdma_get_src_port", "rdma_get_dst_port", "rdma_dereg_mr",
    "rdma_get_send_comp", "rdma_get_recv_comp", "rdma_query_addrinfo", "rdma_write_cm_event",
}  # fmt: skip
_PROTOTYPE = re.compile(r"^[a-z][\w ]*[ *]+((?:rdma|ibv)_\w+)\([^;{]*\);[^\n]*\n", re.MULTILINE)
# Types of C that device.h uses, and cdef.h does not declare.
_TYPES = """
struct ibv_grh { ...; };
struct ibv_async_event { ...; };
struct verbs_context { struct ibv_context context; ...; };
"""


def _declare() -> tuple[str, list[str]]:
    """Return the declarations for cffi, and the names of the functions that Python defines."""
    text = (NATIVE / "cdef.h").read_text().partition("/* --- helpers.h")[0]
    prototypes = {found[1]: found[0] for found in _PROTOTYPE.finditer(text + _MORE)}
    names = sorted(
        name
        for name in prototypes
        if name not in _NOT_SIMULATED and not name.startswith(("rdma_post_", "rdma_reg_"))
    )
    structs = re.sub(r"^const char \*gai_strerror.*\n", "", _PROTOTYPE.sub("", text), flags=re.M)
    for name, members in _MEMBERS.items():
        structs, count = re.subn(rf"^(struct {name} {{)", rf"\1 {members}", structs, flags=re.M)
        assert count == 1, f"cdef.h does not define struct {name}"
    device = (HERE / "device.h").read_text().partition("<stdint.h>\n")[2].partition("#endif")[0]
    simulated = "".join(prototypes[name].replace(f"{name}(", f"sim_{name}(", 1) for name in names)
    return f'{structs}{_TYPES}{device}extern "Python+C" {{\n{simulated}}}\n', names


def build(folder: Path) -> None:
    """Compile the module into `folder`, with the options of CFLAGS."""
    declarations, names = _declare()
    # Each function has its name in the libraries, too.
    aliases = "#undef ibv_reg_mr\n#undef ibv_query_port\n" + "".join(
        f'extern __typeof__({name}) {name} __attribute__((alias("sim_{name}")));\n'
        for name in names
        if name not in _INLINE
    )
    shutil.copy(HERE / "device.c", folder)  # a relative path, so that the object stays in `folder`
    ffi = FFI()
    ffi.cdef(declarations)
    ffi.set_source(
        MODULE,
        f'#include "helpers.h"\n#include "device.h"\n{aliases}',
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
            # In a process of its own: setuptools changes its process.
            command = [sys.executable, __file__, made]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"the simulator cannot be compiled:\n{done.stdout}{done.stderr}")
            with contextlib.suppress(OSError):  # another process was faster
                Path(made).rename(folder)
    flags = sys.getdlopenflags()
    sys.setdlopenflags(os.RTLD_NOW | os.RTLD_GLOBAL)
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(MODULE)
    finally:
        sys.path.remove(str(folder))
        sys.setdlopenflags(flags)


if __name__ == "__main__":
    build(Path(sys.argv[1]))
