"""Late binding: without the libraries; with broken, newer and older ones; refused builds.

A preloaded library hides the libraries, or replaces or hides the functions that are new in
rdma-core 60. So the result does not depend on the rdma-core that is installed.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import ROOT

# A dlopen() that does not find the libraries, and what dlerror() says then.
NONE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <string.h>
void *dlopen(const char *name, int flags)
{
    void *(*real)(const char *, int) = dlsym(RTLD_NEXT, "dlopen");
    return name && strstr(name, "librdmacm") ? 0 : real(name, flags);
}
char *dlerror(void)
{
    static char text[200];
    strcat(strcpy(text, "librdmacm.so.1: cannot open shared object file: "), strerror(2));
    return text;
}
"""

# A dlsym() that does not find the newer functions. AddressSanitizer calls it before it has found
# strcmp().
OLDER = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
static int is_same(const char *one, const char *other)
{
    while (*one && *one == *other)
        one++, other++;
    return *one == *other;
}
void *dlsym(void *handle, const char *name)
{
    static void *(*real)(void *, const char *);
    if (is_same(name, "rdma_resolve_addrinfo") || is_same(name, "rdma_query_addrinfo") ||
        is_same(name, "rdma_write_cm_event"))
        return 0;
    if (!real)
        real = dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.34");
    return real(handle, name);
}
"""

# The newer functions. Each prints its arguments. rdma_write_cm_event() refuses a status of 22.
NEWER = r"""
#include <errno.h>
#include <string.h>
#include <stdio.h>
#include <sys/socket.h>
#include <rdma/rdma_cma.h>
__attribute__((constructor)) static void print_at_once(void)
{
    setvbuf(stdout, NULL, _IONBF, 0);
}
static char connect_data[] = "hello";
static struct rdma_addrinfo second = {
    .ai_flags = 0x21, .ai_family = AF_INET6, .ai_qp_type = IBV_QPT_UD, .ai_port_space = RDMA_PS_UDP,
};
static struct rdma_addrinfo first = {
    .ai_family = AF_INET, .ai_qp_type = IBV_QPT_RC, .ai_port_space = RDMA_PS_TCP,
    .ai_dst_canonname = "peer", .ai_connect = connect_data, .ai_connect_len = 5, .ai_next = &second,
};
int rdma_resolve_addrinfo(struct rdma_cm_id *id, const char *node, const char *service,
                          const struct rdma_addrinfo *hints)
{
    printf("resolve %p %s %s", (void *)id, node ? node : "-", service ? service : "-");
    if (hints)
        printf(" %#x %#x", hints->ai_flags, hints->ai_port_space);
    printf("\n");
    errno = -1; /* rdma-core 60 to 64 store their own result in errno */
    return service && !strcmp(service, "refused") ? -1 : 0;
}
int rdma_query_addrinfo(struct rdma_cm_id *id, struct rdma_addrinfo **info)
{
    printf("query %p\n", (void *)id);
    *info = &first;
    return 0;
}
void rdma_freeaddrinfo(struct rdma_addrinfo *info)
{
    printf("free %s\n", info == &first ? "first" : "another");
}
int rdma_write_cm_event(struct rdma_cm_id *id, enum rdma_cm_event_type event, int status,
                        uint64_t arg)
{
    printf("write %p %d %d %#llx\n", (void *)id, (int)event, status, (unsigned long long)arg);
    errno = EINVAL;
    return status == 22 ? -1 : 0;
}
"""

PROLOGUE = """
import errno
from aiordma import AddrInfo, PortSpace, VerbsError
from aiordma._native import ffi, lib
from aiordma.enums import AddrInfoFlags, QpType
from aiordma.rdmacm import CmId

cm_id = CmId.from_address(0x1230)  # not a valid pointer
"""


def run(source: str, code: str, directory: Path) -> str:
    """Run `code` with a library made of `source` preloaded. Return its output."""
    library = directory / "first.so"
    (directory / "first.c").write_text(source)
    command = ["cc", "-shared", "-fPIC", "-o", str(library), str(directory / "first.c")]
    subprocess.run(command, check=True)
    return run_python(code, LD_PRELOAD=f"{os.environ.get('LD_PRELOAD', '')} {library}")


def run_python(code: str, **variables: str) -> str:
    """Run `code` with these environment variables. Return its output."""
    ended = subprocess.run(
        [sys.executable, "-u", "-c", PROLOGUE + code],
        env={**os.environ, **variables},
        timeout=600,
        capture_output=True,
        text=True,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    return ended.stdout


def test_without_the_libraries_each_first_call_names_the_packages(tmp_path: Path) -> None:
    code = """
import asyncio, sys
import aiordma.anyio, aiordma.asyncio, aiordma.cli, aiordma.trio
from aiordma import AsyncCmId, SyncCmId, WorkRequestError, rdmacm
from aiordma.enums import CmEventType, WcOpcode, WcStatus

print(WorkRequestError(WcStatus.RETRY_EXC_ERR, WcOpcode.SEND))

async def first_call(call):
    await call()

for call in (
    lambda: aiordma.connect("192.0.2.1", 1),
    lambda: aiordma.listen("192.0.2.1", 1),
    lambda: aiordma.connect_stream("192.0.2.1", 1),
    lambda: aiordma.listen_stream("192.0.2.1", 1),
    lambda: aiordma.open_datagram(("192.0.2.1", 0)),
    AsyncCmId.create,
    SyncCmId.create,
):
    try:
        asyncio.run(first_call(call))
    except VerbsError as error:
        assert error.errno == errno.ELIBACC
        assert "install the packages librdmacm1 and ibverbs-providers" in str(error)
        print(error.function)
for function in (rdmacm.EventChannel, lambda: rdmacm.getaddrinfo("peer")):
    try:
        function()
    except VerbsError as error:
        print(errno.errorcode[error.errno], error.function)
print(CmEventType.REJECTED.name, ffi.string(lib.rdma_event_str(CmEventType.REJECTED)))
from aiordma.doctor.host import examine_libraries
print(examine_libraries())
sys.stderr = sys.stdout
print(aiordma.cli.main(["devices"]), aiordma.cli.main(["ping", "192.0.2.1"]))
"""
    printed = run(NONE, code, tmp_path).splitlines()
    assert printed[0] == "SEND failed: RETRY_EXC_ERR (the peer stopped answering)"
    assert printed[1:8] == ["rdma_get_devices"] * 7
    assert printed[8:10] == ["ELIBACC rdma_create_event_channel", "ELIBACC rdma_getaddrinfo"]
    assert printed[10] == "REJECTED b''"
    absent = "problem  libraries: librdmacm.so.1 is not installed; install the packages "
    assert printed[11].startswith(absent)
    for line, command in zip(printed[12:14], ("devices", "ping"), strict=True):
        assert line.startswith(f"aiordma {command}: ")
        assert "librdmacm.so.1 is not installed: install the packages" in line
    assert printed[14:] == ["1 1"]


def make_empty(directory: Path) -> str:
    """Make a library that is an empty file. Return what dlerror(3) says about it."""
    (directory / "librdmacm.so.1").touch()
    return f"{directory}/librdmacm.so.1: file too short"


def make_incomplete(directory: Path) -> str:
    """Make a library that needs one that does not exist. Return what dlerror(3) says about it."""
    needed = directory / "libneeded.so.9"
    for name, code, more in (
        (needed.name, "int needed(void) { return 0; }", [f"-Wl,-soname,{needed.name}"]),
        ("librdmacm.so.1", "int needed(void); int user(void) { return needed(); }", [str(needed)]),
    ):
        (directory / "source.c").write_text(code)
        command = ["cc", "-shared", "-fPIC", "-o", str(directory / name)]
        subprocess.run([*command, str(directory / "source.c"), *more], check=True)
    needed.unlink()
    return f"{needed.name}: cannot open shared object file: {os.strerror(errno.ENOENT)}"


@pytest.mark.parametrize("make", [make_empty, make_incomplete])
def test_a_library_that_is_installed_and_cannot_be_loaded(
    make: Callable[[Path], str], tmp_path: Path
) -> None:
    reason = make(tmp_path)
    code = """
from aiordma.doctor.host import examine_libraries
from aiordma.rdmacm import EventChannel
try:
    EventChannel()
except VerbsError as error:
    assert error.errno == errno.ELIBACC
    print(error)
print(examine_libraries())
"""
    error, finding = run_python(code, LD_LIBRARY_PATH=str(tmp_path)).splitlines()
    text = f"librdmacm.so.1 cannot be loaded ({reason})"
    mend = "reinstall the packages librdmacm1 and ibverbs-providers"
    assert f"({text}: {mend}" in error
    assert finding.startswith(f"problem  libraries: {text}; {mend}")


def test_with_an_older_rdma_core_only_the_newer_functions_fail(tmp_path: Path) -> None:
    """No function of the library reads the id, which is NULL or not valid here."""
    code = """
for function, call in (
    ("rdma_write_cm_event", lambda: cm_id.write_event(0, 1)),
    ("rdma_query_addrinfo", cm_id.query_addrinfo),
    ("rdma_resolve_addrinfo", lambda: cm_id.resolve_addrinfo("peer", "7471", AddrInfo())),
):
    try:
        call()
    except VerbsError as error:
        assert (error.errno, error.function) == (errno.ENOSYS, function)
        assert "this rdma-core does not have the function: rdma-core 60 or later" in str(error)
for call in (
    lambda: lib.rdma_write_cm_event(ffi.NULL, 18, 0, 0),
    lambda: lib.rdma_query_addrinfo(ffi.NULL, ffi.NULL),
    lambda: lib.aiordma_resolve_addrinfo(ffi.NULL, ffi.NULL, ffi.NULL, ffi.NULL),
):
    ffi.errno = 0
    print(call(), errno.errorcode[ffi.errno])
print(ffi.string(lib.rdma_event_str(lib.RDMA_CM_EVENT_REJECTED)).decode())
"""
    assert run(OLDER, code, tmp_path).splitlines() == ["-1 ENOSYS"] * 3 + ["RDMA_CM_EVENT_REJECTED"]


def test_the_functions_of_a_newer_rdma_core_are_called(tmp_path: Path) -> None:
    """Their errors have a valid errno. EINVAL of rdma_write_cm_event(): the kernel is too old."""
    code = """
import socket
both = AddrInfoFlags.DNS | AddrInfoFlags.PASSIVE
cm_id.write_event(-7, 1 << 63 | 5)
cm_id.write_event()
cm_id.resolve_addrinfo("peer", "7471", AddrInfo(both, port_space=PortSpace.UDP))
cm_id.resolve_addrinfo(None, "7471")
cm_id.resolve_addrinfo("peer", None)
assert cm_id.query_addrinfo() == [
    AddrInfo(
        family=socket.AF_INET, qp_type=QpType.RC, destination_canonname="peer", connect=b"hello"
    ),
    AddrInfo(both, family=socket.AF_INET6, qp_type=QpType.UD, port_space=PortSpace.UDP),
]
for call in (lambda: cm_id.write_event(22), lambda: cm_id.resolve_addrinfo("peer", "refused")):
    try:
        call()
    except VerbsError as error:
        assert error.errno == errno.EINVAL
        print(error.function, "older than Linux 6.18" in str(error))
"""
    assert run(NEWER, code, tmp_path).splitlines() == [
        "write 0x1230 18 -7 0x8000000000000005",
        "write 0x1230 18 0 0",
        "resolve 0x1230 peer 7471 0x21 0x111",
        "resolve 0x1230 - 7471",
        "resolve 0x1230 peer -",
        "query 0x1230",
        "free first",
        "write 0x1230 18 22 0",
        "rdma_write_cm_event True",
        "resolve 0x1230 peer refused",
        "rdma_resolve_addrinfo True",
    ]


def test_the_free_threaded_build_is_refused_with_one_sentence() -> None:
    """Before a C module is loaded: its objects do not have the layout of that build."""
    code = "import sys; sys.abiflags = 't'; import aiordma"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    sentence = "aiordma does not support the free-threaded build of CPython: use the usual build"
    assert done.stderr.splitlines()[-1] == f"ImportError: {sentence}"
    build = "import sysconfig; sysconfig.get_config_vars()['Py_GIL_DISABLED'] = 1; import setup"
    done = subprocess.run([sys.executable, "-c", build], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("aiordma does not support the free-threaded build of CPython: ")
