"""The functions that are new in rdma-core 60, with a newer and with an older rdma-core.

A preloaded library replaces them, or hides them, independently of the installed rdma-core.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# A dlsym() that does not find the newer functions.
OLDER = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <string.h>
void *dlsym(void *handle, const char *name)
{
    static void *(*real)(void *, const char *);
    if (!strcmp(name, "rdma_resolve_addrinfo") || !strcmp(name, "rdma_query_addrinfo") ||
        !strcmp(name, "rdma_write_cm_event"))
        return NULL;
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
    ended = subprocess.run(
        [sys.executable, "-c", PROLOGUE + code],
        env={**os.environ, "LD_PRELOAD": str(library)},
        timeout=30,
        capture_output=True,
        text=True,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    return ended.stdout


@pytest.mark.parametrize(
    ("call", "function"),
    [
        ("cm_id.write_event(0, 1)", "rdma_write_cm_event"),
        ("cm_id.query_addrinfo()", "rdma_query_addrinfo"),
        ("cm_id.resolve_addrinfo('peer', '7471', AddrInfo())", "rdma_resolve_addrinfo"),
    ],
)
def test_an_error_of_an_older_rdma_core_says_that_it_is_too_old(
    call: str, function: str, tmp_path: Path
) -> None:
    code = f"""
try:
    {call}
except VerbsError as error:
    assert (error.errno, error.function) == (errno.ENOSYS, {function!r})
    print(error)
"""
    text = run(OLDER, code, tmp_path)
    assert "this rdma-core does not have the function: rdma-core 60 or later" in text


def test_an_older_rdma_core_is_detected_before_the_id_is_read(tmp_path: Path) -> None:
    code = """
for call in (
    lambda: lib.aiordma_write_cm_event(ffi.NULL, 18, 0, 0),
    lambda: lib.aiordma_query_addrinfo(ffi.NULL, ffi.NULL),
    lambda: lib.aiordma_resolve_addrinfo(ffi.NULL, ffi.NULL, ffi.NULL, ffi.NULL),
):
    ffi.errno = 0
    print(call(), errno.errorcode[ffi.errno])
"""
    assert run(OLDER, code, tmp_path).splitlines() == ["-1 ENOSYS"] * 3


def test_other_functions_work_with_an_older_rdma_core(tmp_path: Path) -> None:
    code = "print(ffi.string(lib.rdma_event_str(lib.RDMA_CM_EVENT_REJECTED)).decode())"
    assert run(OLDER, code, tmp_path) == "RDMA_CM_EVENT_REJECTED\n"


def test_write_event_calls_a_newer_rdma_core(tmp_path: Path) -> None:
    code = "cm_id.write_event(-7, 1 << 63 | 5); cm_id.write_event()"
    assert run(NEWER, code, tmp_path).splitlines() == [
        "write 0x1230 18 -7 0x8000000000000005",
        "write 0x1230 18 0 0",
    ]


def test_an_error_of_an_older_kernel_says_that_it_is_too_old(tmp_path: Path) -> None:
    code = """
try:
    cm_id.write_event(22)
except VerbsError as error:
    assert error.errno == errno.EINVAL
    print(error)
"""
    assert "older than Linux 6.18" in run(NEWER, code, tmp_path)


def test_resolve_addrinfo_calls_a_newer_rdma_core(tmp_path: Path) -> None:
    code = """
hints = AddrInfo(AddrInfoFlags.DNS | AddrInfoFlags.PASSIVE, port_space=PortSpace.UDP)
cm_id.resolve_addrinfo("peer", "7471", hints)
cm_id.resolve_addrinfo(None, "7471")
cm_id.resolve_addrinfo("peer", None)
"""
    assert run(NEWER, code, tmp_path).splitlines() == [
        "resolve 0x1230 peer 7471 0x21 0x111",
        "resolve 0x1230 - 7471",
        "resolve 0x1230 peer -",
    ]


def test_a_refused_name_raises_a_valid_errno(tmp_path: Path) -> None:
    code = """
try:
    cm_id.resolve_addrinfo("peer", "refused")
except VerbsError as error:
    assert error.errno == errno.EINVAL
    print(error)
"""
    assert "rdma_resolve_addrinfo" in run(NEWER, code, tmp_path)


def test_the_results_of_query_addrinfo_are_read_and_freed(tmp_path: Path) -> None:
    code = """
import socket
found = cm_id.query_addrinfo()
assert found == [
    AddrInfo(
        family=socket.AF_INET,
        qp_type=QpType.RC,
        port_space=PortSpace.TCP,
        destination_canonname="peer",
        connect=b"hello",
    ),
    AddrInfo(
        flags=AddrInfoFlags.DNS | AddrInfoFlags.PASSIVE,
        family=socket.AF_INET6,
        qp_type=QpType.UD,
        port_space=PortSpace.UDP,
    ),
], found
"""
    assert run(NEWER, code, tmp_path).splitlines() == ["query 0x1230", "free first"]
