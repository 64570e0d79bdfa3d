"""One sentence for each failure of a ping: the cause, and the next step for the user."""

from __future__ import annotations

import errno

from aiordma.errors import (
    AddressError,
    PeerClosed,
    PeerTimeout,
    Rejected,
    RouteError,
    Unreachable,
    VerbsError,
)
from aiordma.ping.options import DEFAULT_PORT, PingOptions
from aiordma.ping.private_data import rejection_reason
from aiordma.rdmacm import interface_addresses

_NO_ROUTE = (
    "no RDMA device of this machine has a route to that address; `aiordma devices` lists this "
    "machine's RDMA addresses, and 127.0.0.1 is never one of them"
)
# The status of a reject if no program listens: "invalid service ID" of the InfiniBand CM, and the
# errno of TCP on iWARP.
_NO_LISTENER = (8, -errno.ECONNREFUSED)


def explain(error: Exception, options: PingOptions) -> str:
    """Return the sentence for the error that ended a ping."""
    peer = options.host or "this machine"
    match error:
        case AddressError() | RouteError():
            return _no_route(error)
        case Rejected():
            return _rejected(error, options)
        case Unreachable():
            return _no_answer(error, options)
        case PeerClosed():
            return f"the connection to {peer} ended: {error}"
        case PeerTimeout():
            return f"{peer} stopped answering: its machine or the network failed ({error})"
        case _:
            return str(error)


def explain_listening(error: Exception, host: str | None, port: int) -> str:
    """Return the sentence for the error that ended `aiordma ping --listen`."""
    match error:
        case VerbsError(errno=errno.EADDRINUSE):
            return f"port {port} is in use: another program listens on it; choose another with -p"
        case VerbsError(errno=errno.EADDRNOTAVAIL):
            return f"{host} is not an address of this machine; `aiordma devices` lists those to use"
        case _:
            return str(error)


def _no_route(error: AddressError | RouteError) -> str:
    cause = error.__cause__
    is_about_name = isinstance(cause, OSError) and not isinstance(cause, VerbsError)
    if is_about_name or "aiordma devices" in str(error):  # no more advice is needed
        return str(error)
    return f"{error}: {_NO_ROUTE}"


def _rejected(error: Rejected, options: PingOptions) -> str:
    reason = rejection_reason(error.private_data)
    if reason is not None:
        return f"{options.host} rejected the connection: {reason}"
    if error.status not in _NO_LISTENER:
        return f"{options.host} answers over RDMA, but {error}"
    command = "aiordma ping --listen"
    if options.port != DEFAULT_PORT:
        command += f" -p {options.port}"
    if _is_own(options.host):
        return (
            f"{options.host} is this machine and RDMA reaches it, but no program listens on port "
            f"{options.port}: run `{command}` in another terminal, or `aiordma ping` without a host"
        )
    return (
        f"{options.host} answers over RDMA, but no program listens on port {options.port}: "
        f"run `{command}` on that machine"
    )


def _no_answer(error: Unreachable, options: PingOptions) -> str:
    return (
        f"{error}: check that an RDMA device has that address, and that no firewall blocks "
        f"UDP port 4791 (RoCE) or TCP port {options.port} (iWARP)"
    )


def _is_own(host: str) -> bool:
    return host in {address.pair[0] for _, address in interface_addresses()}
