"""The exceptions that aiordma raises, and the functions that turn results of C calls into them.

The hierarchy::

    RdmaError
    |-- VerbsError (also OSError)             a C call failed: errno, and the function's name
    |-- ConnectError (also ConnectionError)   a connection could not be made
    |   |-- AddressError                      no RDMA device leads to the address
    |   |-- RouteError                        no route to the address was found
    |   |-- Unreachable                       the peer's machine did not answer
    |   `-- Rejected                          the peer refused: .status, .private_data
    |-- ConnectionClosed                      an established connection has ended
    |   |-- LocalClosed                       this side closed it
    |   |-- PeerClosed                        the peer closed it, or its process ended
    |   |-- PeerTimeout                       the peer's machine does not answer any more
    |   `-- DeviceRemoved                     the RDMA device was removed
    |-- ReceiveOverrun                        messages came faster than they were received
    |-- ProtocolError (also ConnectionError)  the peer of a stream breaks its protocol
    |-- WorkRequestError                      the device could not do one operation: .status
    `-- BusyError                             another task already waits on the same object

Wrong arguments raise ValueError, for example a message that is too long or private data that does
not fit.
"""

from __future__ import annotations

import errno
import os
from typing import Any, Self

from aiordma._native import ffi, lib
from aiordma.enums import WcOpcode, WcStatus

NO_DEVICE = (
    "no RDMA device on this machine; `python -m aiordma lab run -- COMMAND` runs COMMAND in a "
    "virtual machine that has a software RDMA device"
)
RAISE_MEMLOCK = (
    "raise it in /etc/security/limits.conf, with LimitMEMLOCK= in a systemd unit, or with "
    "--ulimit memlock=-1 for a container"
)
MEMLOCK = (
    "registered memory counts against the locked-memory limit (RLIMIT_MEMLOCK); see `ulimit -l`, "
    f"and {RAISE_MEMLOCK}"
)
DESCRIPTORS = (
    "the process can open no more files (RLIMIT_NOFILE); see `ulimit -n`, and raise it in "
    "/etc/security/limits.conf, with LimitNOFILE= in a systemd unit, or with --ulimit nofile=N "
    "for a container"
)
CONTROL_GROUP = (
    "the rdma control group of the process allows no more objects on this device: raise hca_object "
    "in the file rdma.max of the group"
)
ADDRESS_IN_USE = "the port is in use by another RDMA id, or this machine does not have the address"
NO_SUCH_RDMA_ADDRESS = (
    "no RDMA device has this address (127.0.0.1 and ::1 are never RDMA addresses); "
    "`python -m aiordma devices` lists the addresses of the RDMA devices"
)
BEYOND_DEVICE = "more than the device allows: try a smaller max_inline, send_depth or recv_depth"
UNPINNABLE = (
    "the kernel cannot pin this memory; every kernel pins private mappings of files "
    "(mmap.ACCESS_COPY), other mappings of files only some versions"
)
NO_DMABUF = "this device, or its driver in this kernel, cannot register a dma-buf"
NO_SUCH_QP = (
    "the device does not have queue pairs of this type: iWARP, for example, has no datagrams"
)
NO_SUCH_GROUPS = "RoCE supports only IPv4 multicast groups"
NEEDS_RDMA_CORE_60 = "this rdma-core does not have the function: rdma-core 60 or later does"
LIBRARY = "librdmacm.so.1"
PACKAGES = (
    "librdmacm1 and ibverbs-providers (Debian, Ubuntu), librdmacm (Fedora, RHEL) or rdma-core "
    "(Arch, SUSE)"
)
NEEDS_LINUX_6_18 = "the kernel is older than Linux 6.18, or a value is not allowed"

# The kernel-internal number for "not supported". The kernel returns it in a few places; the C
# library has no text for it.
ENOTSUPP = 524

_DLERROR_SIZE = 1 << 12

# Advice for an errno of a function, where the sentence of the man page alone does not help.
_HINTS: dict[tuple[str, int], str] = {
    ("rdma_create_event_channel", errno.ENODEV): NO_DEVICE,
    ("rdma_create_event_channel", errno.ENOENT): NO_DEVICE,
    ("rdma_create_id", errno.ENODEV): NO_DEVICE,
    ("rdma_get_devices", errno.ENODEV): NO_DEVICE,
    ("rdma_bind_addr", errno.EADDRINUSE): ADDRESS_IN_USE,
    ("rdma_bind_addr", errno.EADDRNOTAVAIL): ADDRESS_IN_USE,
    ("rdma_listen", errno.EADDRINUSE): ADDRESS_IN_USE,
    ("rdma_listen", errno.EADDRNOTAVAIL): ADDRESS_IN_USE,
    ("rdma_bind_addr", errno.ENODEV): NO_SUCH_RDMA_ADDRESS,
    ("rdma_resolve_addr", errno.ENODEV): NO_SUCH_RDMA_ADDRESS,
    ("rdma_resolve_addr", errno.EINVAL): NO_SUCH_RDMA_ADDRESS,
    ("rdma_resolve_route", errno.ENODEV): NO_SUCH_RDMA_ADDRESS,
    ("ibv_reg_mr", errno.ENOMEM): MEMLOCK,
    ("ibv_reg_mr", errno.EPERM): MEMLOCK,  # the limit is 0
    ("ibv_reg_mr", errno.EFAULT): UNPINNABLE,
    ("ibv_reg_dmabuf_mr", errno.EOPNOTSUPP): NO_DMABUF,
    ("rdma_create_qp", errno.ENOMEM): MEMLOCK,
    ("rdma_create_qp", errno.EPERM): MEMLOCK,
    ("rdma_create_qp", errno.EINVAL): BEYOND_DEVICE,
    ("rdma_create_qp", errno.EOPNOTSUPP): NO_SUCH_QP,
    ("ibv_create_cq", errno.ENOMEM): MEMLOCK,
    ("ibv_create_cq", errno.EPERM): MEMLOCK,
    ("rdma_join_multicast", ENOTSUPP): NO_SUCH_GROUPS,
    ("rdma_join_multicast_ex", ENOTSUPP): NO_SUCH_GROUPS,
    ("rdma_getaddrinfo", errno.ENODEV): NO_DEVICE,
    ("rdma_resolve_addrinfo", errno.ENOSYS): NEEDS_RDMA_CORE_60,
    ("rdma_query_addrinfo", errno.ENOSYS): NEEDS_RDMA_CORE_60,
    ("rdma_write_cm_event", errno.ENOSYS): NEEDS_RDMA_CORE_60,
    ("rdma_resolve_addrinfo", errno.EINVAL): NEEDS_LINUX_6_18,
    ("rdma_write_cm_event", errno.EINVAL): NEEDS_LINUX_6_18,
}

_HINTS.update(
    ((function, errno.EMFILE), DESCRIPTORS)
    for function in (
        "rdma_create_event_channel",
        "rdma_create_id",
        "rdma_create_ep",
        "rdma_create_qp",
        "rdma_get_devices",
        "ibv_create_comp_channel",
        "ibv_create_cq",
    )
)
_HINTS.update(
    ((function, errno.EAGAIN), CONTROL_GROUP)
    for function in (
        "rdma_create_ep",
        "rdma_create_qp",
        "ibv_alloc_pd",
        "ibv_create_comp_channel",
        "ibv_create_cq",
        "ibv_create_qp",
        "ibv_create_srq",
        "ibv_reg_mr",
        "ibv_alloc_mw",
        "ibv_create_ah",
    )
)


def reason(function: str, code: int) -> str:
    """Return the meaning of errno `code` from `function`, with advice if there is any."""
    text = os.strerror(errno.EOPNOTSUPP if code == ENOTSUPP else code)
    hint = ": ".join(load_failure()) if code == errno.ELIBACC else _HINTS.get((function, code))
    return f"{text} ({hint})" if hint else text


def load_failure() -> tuple[str, str]:
    """Return why librdmacm cannot be loaded, in the words of dlerror(3), and the way to mend it.

    The library counts as not installed if its own file does not exist. If a library that it needs
    does not exist, the text names that one.
    """
    buffer = ffi.new("char[]", _DLERROR_SIZE)
    lib.aiordma_load_error(buffer, _DLERROR_SIZE)
    error = ffi.string(buffer).decode(errors="replace")
    absent = error.startswith(f"{LIBRARY}: ") and error.endswith(os.strerror(errno.ENOENT))
    if absent or not error:
        return f"{LIBRARY} is not installed", f"install the packages {PACKAGES}"
    return f"{LIBRARY} cannot be loaded ({error})", f"reinstall the packages {PACKAGES}"


class RdmaError(Exception):
    """A failure of an RDMA operation. The base class of all exceptions in this module."""

    def __copy__(self) -> Self:
        """Return a copy without the traceback and the cause.

        Without this method, copy.copy() asks copyreg, where tblib registers functions that keep the
        traceback, with all objects that its frames refer to. distributed installs tblib.
        """
        reduced: Any = self.__reduce__()
        kind, arguments, *state = reduced
        copied: Self = kind(*arguments)
        for attributes in state:
            copied.__dict__.update(attributes)
        return copied


class VerbsError(RdmaError, OSError):
    """A call into librdmacm or libibverbs failed. `errno` is the errno of the call."""

    function: str
    """The name of the C function that failed."""

    def __init__(self, code: int, function: str) -> None:
        super().__init__(code, f"{function}: {reason(function, code)}")
        self.function = function

    @property
    def would_block(self) -> bool:
        """True if the call, on a non-blocking descriptor, began an operation and did not end it."""
        return self.errno == errno.EAGAIN

    def __reduce__(self) -> tuple[type[VerbsError], tuple[int, str]]:
        return type(self), (self.errno or 0, self.function)


class ConnectError(RdmaError, ConnectionError):
    """A connection could not be made."""


class AddressError(ConnectError):
    """No RDMA device of this machine leads to the address (`RDMA_CM_EVENT_ADDR_ERROR`).

    Also raised for a host name that is unknown, and by listening on a loopback address.
    """


class RouteError(ConnectError):
    """No route to the address was found (`RDMA_CM_EVENT_ROUTE_ERROR`)."""


class Unreachable(ConnectError):
    """The peer's machine did not answer (`RDMA_CM_EVENT_UNREACHABLE`)."""


class Rejected(ConnectError):
    """The peer refused the connection (`RDMA_CM_EVENT_REJECTED`)."""

    status: int
    """The reason that the transport gives. On InfiniBand and RoCE the reject reason of the CM: 8 if
    no listener has the port, 28 if the application refused. On iWARP a negative errno."""
    private_data: bytes
    """The private data that the peer sent with the refusal. InfiniBand and RoCE pad it with zeros
    to 148 bytes."""

    def __init__(self, message: str, status: int, private_data: bytes = b"") -> None:
        super().__init__(message)
        self.status = status
        self.private_data = private_data

    def __reduce__(self) -> tuple[type[Rejected], tuple[str, int, bytes]]:
        return type(self), (str(self), self.status, self.private_data)


class ConnectionClosed(RdmaError):
    """The connection has ended."""


class LocalClosed(ConnectionClosed):
    """This side closed the connection, the listener or the id."""


class PeerClosed(ConnectionClosed):
    """The peer disconnected, or its process ended."""


class PeerTimeout(ConnectionClosed):
    """The peer's machine, or the network to it, does not answer any more.

    Its device did not acknowledge a request (`IBV_WC_RETRY_EXC_ERR`), or did not answer a probe. On
    InfiniBand and RoCE, `retry_count` and `ack_timeout` of the options decide how long that takes.
    On iWARP it is `peer_timeout`.
    """


class DeviceRemoved(ConnectionClosed):
    """The RDMA device of the connection was removed (`RDMA_CM_EVENT_DEVICE_REMOVAL`)."""


class ProtocolError(RdmaError, ConnectionError):
    """The peer of a byte stream or message stream uses another protocol, or breaks its rules."""


class WorkRequestError(RdmaError):
    """The device could not complete a work request. The queue pair is unusable afterwards."""

    status: WcStatus
    """The status of the completion."""
    opcode: WcOpcode
    """The operation that failed."""
    vendor_err: int
    """The error number of the device's vendor."""

    def __init__(self, status: WcStatus, opcode: WcOpcode, vendor_err: int = 0) -> None:
        super().__init__(f"{opcode.name} failed: {status.name}{_explain(status)}")
        self.status = status
        self.opcode = opcode
        self.vendor_err = vendor_err

    def __reduce__(self) -> tuple[type[WorkRequestError], tuple[WcStatus, WcOpcode, int]]:
        return type(self), (self.status, self.opcode, self.vendor_err)


class ReceiveOverrun(RdmaError):
    """The peer sent more messages than this side received in time, and nothing held it back.

    This happens on iWARP, and with a shared receive queue. Messages that arrived in time can still
    be received. To avoid it, receive faster, make the peer wait for answers, or raise `recv_depth`
    or `recv_backlog`.
    """


class BusyError(RdmaError):
    """Another task already waits on the same object, which allows one waiting task at a time."""


_STATUS_HINTS = {
    WcStatus.LOC_LEN_ERR: "the message was larger than the receive buffer posted for it",
    WcStatus.REM_INV_REQ_ERR: "refused by the peer: larger than its receive buffer, or not allowed",
    WcStatus.REM_ACCESS_ERR: "the peer's memory does not allow this: key, bounds or permission",
    WcStatus.RETRY_EXC_ERR: "the peer stopped answering",
    WcStatus.RNR_RETRY_EXC_ERR: "the peer had no receive posted",
}


def _explain(status: WcStatus) -> str:
    hint = _STATUS_HINTS.get(status)
    return f" ({hint})" if hint else ""


def last_error(function: str) -> VerbsError:
    """Return the VerbsError for the errno that the last C call of this thread set."""
    # Some providers set a negative errno, and some set none (libsiw does both).
    return VerbsError(abs(ffi.errno) or errno.EIO, function)


def check(result: int, function: str) -> None:
    """Raise VerbsError if the result of an `rdma_...` call, which sets errno, is not 0."""
    if result:
        raise last_error(function)


def check_errno(result: int, function: str) -> None:
    """Raise VerbsError if the result of an `ibv_...` call is an errno, of either sign."""
    if result:
        raise VerbsError(abs(result), function)
