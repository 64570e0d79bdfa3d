"""Every exception aiordma raises on purpose, and the functions that turn C results into them.

    RdmaError
    |-- VerbsError (also OSError)             a C call failed: errno, and the function's name
    |-- ConnectError (also ConnectionError)   a connection could not be made
    |   |-- AddressError                      no RDMA path to that address
    |   |-- RouteError                        the address is known, the way to it is not
    |   |-- Unreachable                       nobody answered
    |   `-- Rejected                          somebody answered no: .status, .private_data
    |-- ConnectionClosed                      a connection that was is no more
    |   |-- LocalClosed                       you closed it
    |   |-- PeerClosed                        the peer closed it, or died
    |   `-- DeviceRemoved                     the RDMA device went away
    |-- ReceiveOverrun                        the peer sent more than was received
    |-- ProtocolError (also ConnectionError)  a stream's peer does not speak rsocket, or not well
    |-- WorkRequestError                      the device could not do one operation: .status
    `-- BusyError                             two tasks at one receiver

Wrong arguments (a message that is too long, private data that does not fit) are ValueErrors.
"""

from __future__ import annotations

import errno
import os

from aiordma._native import ffi
from aiordma.enums import WcOpcode, WcStatus

NO_DEVICE = (
    "no RDMA device on this machine; `python -m aiordma lab run -- COMMAND` runs COMMAND on a "
    "virtual machine that has a soft one"
)
MEMLOCK = (
    "registered memory counts against the locked-memory limit (RLIMIT_MEMLOCK); see `ulimit -l`, "
    "and raise it in /etc/security/limits.conf, with LimitMEMLOCK= in a systemd unit, or with "
    "--ulimit memlock=-1 for a container"
)
ADDRESS_TAKEN = "the port is taken by another RDMA id, or the address is not one of this machine's"
NO_SUCH_RDMA_ADDRESS = (
    "no RDMA device has this address (127.0.0.1 and ::1 have none); "
    "`python -m aiordma devices` lists the addresses that do"
)
BEYOND_DEVICE = "more than the device can do: try a smaller max_inline, send_depth or recv_depth"
UNPINNABLE = (
    "the kernel cannot pin this memory; of mapped files it pins private copies (mmap.ACCESS_COPY) "
    "for sure, others or not depending on its version"
)
NO_DMABUF = "this device, or its driver in this kernel, cannot register a dma-buf"
NO_SUCH_QP = "the device has no such queue pairs: iWARP, for one, has no datagrams"
NO_SUCH_GROUPS = "on RoCE, multicast groups are IPv4 ones"
NEEDS_RDMA_CORE_60 = "this rdma-core does not have it: rdma-core 60 or later"
NEEDS_LINUX_6_18 = "the kernel is older than Linux 6.18, or a value is not allowed"

# The kernel's own number for "not supported", which it lets out in places; C has no text for it.
ENOTSUPP = 524

# What to do about an errno, where the man page's sentence alone would leave one searching.
_HINTS: dict[tuple[str, int], str] = {
    ("rdma_create_event_channel", errno.ENODEV): NO_DEVICE,
    ("rdma_create_event_channel", errno.ENOENT): NO_DEVICE,
    ("rdma_create_id", errno.ENODEV): NO_DEVICE,
    ("rdma_get_devices", errno.ENODEV): NO_DEVICE,
    ("rdma_bind_addr", errno.EADDRINUSE): ADDRESS_TAKEN,
    ("rdma_bind_addr", errno.EADDRNOTAVAIL): ADDRESS_TAKEN,
    ("rdma_listen", errno.EADDRINUSE): ADDRESS_TAKEN,
    ("rdma_listen", errno.EADDRNOTAVAIL): ADDRESS_TAKEN,
    ("rdma_bind_addr", errno.ENODEV): NO_SUCH_RDMA_ADDRESS,
    ("rdma_resolve_addr", errno.ENODEV): NO_SUCH_RDMA_ADDRESS,
    ("rdma_resolve_addr", errno.EINVAL): NO_SUCH_RDMA_ADDRESS,
    ("rdma_resolve_route", errno.ENODEV): NO_SUCH_RDMA_ADDRESS,
    ("ibv_reg_mr", errno.ENOMEM): MEMLOCK,
    ("ibv_reg_mr", errno.EFAULT): UNPINNABLE,
    ("ibv_reg_dmabuf_mr", errno.EOPNOTSUPP): NO_DMABUF,
    ("rdma_create_qp", errno.ENOMEM): MEMLOCK,
    ("rdma_create_qp", errno.EINVAL): BEYOND_DEVICE,
    ("rdma_create_qp", errno.EOPNOTSUPP): NO_SUCH_QP,
    ("ibv_create_cq", errno.ENOMEM): MEMLOCK,
    ("rdma_join_multicast", ENOTSUPP): NO_SUCH_GROUPS,
    ("rdma_join_multicast_ex", ENOTSUPP): NO_SUCH_GROUPS,
    ("rdma_getaddrinfo", errno.ENODEV): NO_DEVICE,
    ("rdma_resolve_addrinfo", errno.ENOSYS): NEEDS_RDMA_CORE_60,
    ("rdma_query_addrinfo", errno.ENOSYS): NEEDS_RDMA_CORE_60,
    ("rdma_write_cm_event", errno.ENOSYS): NEEDS_RDMA_CORE_60,
    ("rdma_resolve_addrinfo", errno.EINVAL): NEEDS_LINUX_6_18,
    ("rdma_write_cm_event", errno.EINVAL): NEEDS_LINUX_6_18,
}


def reason(function: str, code: int) -> str:
    """What `code` means when `function` reports it, with the advice there is."""
    text = os.strerror(errno.EOPNOTSUPP if code == ENOTSUPP else code)
    hint = _HINTS.get((function, code))
    return f"{text} ({hint})" if hint else text


class RdmaError(Exception):
    """Any failure of an RDMA operation; the root of all others here."""


class VerbsError(RdmaError, OSError):
    """A call into librdmacm or libibverbs failed. `errno` is its errno, `function` its name."""

    function: str

    def __init__(self, code: int, function: str) -> None:
        super().__init__(code, f"{function}: {reason(function, code)}")
        self.function = function

    @property
    def would_block(self) -> bool:
        """Whether a call on a non-blocking descriptor has begun something that is not done yet."""
        return self.errno == errno.EAGAIN

    def __reduce__(self) -> tuple[type[VerbsError], tuple[int, str]]:
        return type(self), (self.errno or 0, self.function)


class ConnectError(RdmaError, ConnectionError):
    """A connection could not be made."""


class AddressError(ConnectError):
    """The address cannot be reached from any RDMA device here (`RDMA_CM_EVENT_ADDR_ERROR`)."""


class RouteError(ConnectError):
    """No route to the address was found (`RDMA_CM_EVENT_ROUTE_ERROR`)."""


class Unreachable(ConnectError):
    """The peer's machine did not answer (`RDMA_CM_EVENT_UNREACHABLE`)."""


class Rejected(ConnectError):
    """The peer refused the connection (`RDMA_CM_EVENT_REJECTED`).

    `status` is the transport's reason (InfiniBand and RoCE: the CM's reject reason, 8 when nobody
    listens, 28 when the application said no; iWARP: a negative errno). `private_data` is what the
    peer sent along; InfiniBand and RoCE pad it with zeros to 148 bytes.
    """

    status: int
    private_data: bytes

    def __init__(self, message: str, status: int, private_data: bytes = b"") -> None:
        super().__init__(message)
        self.status = status
        self.private_data = private_data

    def __reduce__(self) -> tuple[type[Rejected], tuple[str, int, bytes]]:
        return type(self), (str(self), self.status, self.private_data)


class ConnectionClosed(RdmaError):
    """The connection is closed."""


class LocalClosed(ConnectionClosed):
    """This side closed the connection, the listener or the id."""


class PeerClosed(ConnectionClosed):
    """The peer disconnected, or its process ended."""


class DeviceRemoved(ConnectionClosed):
    """The RDMA device under the connection went away (`RDMA_CM_EVENT_DEVICE_REMOVAL`)."""


class ProtocolError(RdmaError, ConnectionError):
    """The peer of a byte stream speaks another protocol than rsocket's, or breaks its rules."""


class WorkRequestError(RdmaError):
    """The device could not complete an operation; the queue pair is unusable afterwards.

    `status` says how it failed, `opcode` what was asked, `vendor_err` is the device's own number.
    """

    status: WcStatus
    opcode: WcOpcode
    vendor_err: int

    def __init__(self, status: WcStatus, opcode: WcOpcode, vendor_err: int = 0) -> None:
        super().__init__(f"{opcode.name} failed: {status.name}{_explain(status)}")
        self.status = status
        self.opcode = opcode
        self.vendor_err = vendor_err

    def __reduce__(self) -> tuple[type[WorkRequestError], tuple[WcStatus, WcOpcode, int]]:
        return type(self), (self.status, self.opcode, self.vendor_err)


class ReceiveOverrun(RdmaError):
    """The peer sent more messages than were received in time, where nothing holds it back.

    On iWARP, and with a shared receive queue. What came in time could still be received. Either
    take messages faster, or let the peer wait for answers, or raise `recv_depth` or `recv_backlog`.
    """


class BusyError(RdmaError):
    """Another task is already waiting at the same place."""


_STATUS_HINTS = {
    WcStatus.LOC_LEN_ERR: "the message was larger than the receive buffer posted for it",
    WcStatus.REM_INV_REQ_ERR: "refused by the peer: larger than its receive buffer, or not allowed",
    WcStatus.REM_ACCESS_ERR: "the peer's memory does not allow it: key, bounds or permission",
    WcStatus.RETRY_EXC_ERR: "the peer stopped answering",
    WcStatus.RNR_RETRY_EXC_ERR: "the peer had no receive posted",
}


def _explain(status: WcStatus) -> str:
    hint = _STATUS_HINTS.get(status)
    return f" ({hint})" if hint else ""


def last_error(function: str) -> VerbsError:
    """The VerbsError for the errno that the C call just made by this thread left behind."""
    # Some providers store a negative errno, and some none at all (libsiw does both).
    return VerbsError(abs(ffi.errno) or errno.EIO, function)


def check(result: int, function: str) -> None:
    """Raise VerbsError if an rdma_* call returned other than 0 (it then set errno)."""
    if result:
        raise last_error(function)


def check_errno(result: int, function: str) -> None:
    """Raise VerbsError if a call that returns an errno (ibv_*) returned one, of either sign."""
    if result:
        raise VerbsError(abs(result), function)
