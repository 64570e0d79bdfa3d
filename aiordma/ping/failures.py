"""What went wrong, in one sentence, and what to do about it."""

from __future__ import annotations

import errno

from aiordma.enums import WcStatus
from aiordma.errors import (
    AddressError,
    PeerClosed,
    Rejected,
    RouteError,
    Unreachable,
    VerbsError,
    WorkRequestError,
)
from aiordma.ping.handshake import refusal_reason
from aiordma.ping.options import DEFAULT_PORT, Plan
from aiordma.rdmacm import interface_addresses

_NO_WAY = (
    "no RDMA device here leads there; `aiordma devices` lists what can be reached at this machine, "
    "and 127.0.0.1 is never among it"
)
# The InfiniBand CM's "invalid service id", and what TCP says under iWARP.
_NOBODY_LISTENS = (8, -errno.ECONNREFUSED)


def explain(error: Exception, plan: Plan) -> str:
    """The sentence for what ended a ping."""
    peer = plan.host or "this machine"
    match error:
        case AddressError() | RouteError():
            return _no_way(error)
        case Rejected():
            return _rejected(error, plan)
        case Unreachable():
            return _silent(error, plan)
        case PeerClosed():
            return f"{peer} went away: {error}"
        case WorkRequestError(status=WcStatus.RETRY_EXC_ERR):
            return f"{peer} stopped answering: its machine or the network went away ({error})"
        case _:
            return str(error)


def explain_listening(error: Exception, host: str | None, port: int) -> str:
    """The sentence for what ended `aiordma ping --listen`."""
    match error:
        case VerbsError(errno=errno.EADDRINUSE):
            return f"port {port} is taken: somebody listens there already; choose another with -p"
        case VerbsError(errno=errno.EADDRNOTAVAIL):
            return f"{host} is no address of this machine; `aiordma devices` lists those to use"
        case _:
            return str(error)


def _no_way(error: AddressError | RouteError) -> str:
    cause = error.__cause__
    is_about_name = isinstance(cause, OSError) and not isinstance(cause, VerbsError)
    if is_about_name or "aiordma devices" in str(error):  # says enough already
        return str(error)
    return f"{error}: {_NO_WAY}"


def _rejected(error: Rejected, plan: Plan) -> str:
    reason = refusal_reason(error.private_data)
    if reason is not None:
        return f"{plan.host} refused: {reason}"
    if error.status not in _NOBODY_LISTENS:
        return f"{plan.host} answers over RDMA, but refused: {error}"
    command = "aiordma ping --listen"
    if plan.port != DEFAULT_PORT:
        command += f" -p {plan.port}"
    if _is_own(plan.host):
        return (
            f"{plan.host} is this machine, which RDMA reaches, but nobody listens on port "
            f"{plan.port}: run `{command}` in another terminal, or `aiordma ping` without a host"
        )
    return (
        f"{plan.host} answers over RDMA, but nobody listens on port {plan.port}: "
        f"run `{command}` there"
    )


def _silent(error: Unreachable, plan: Plan) -> str:
    return (
        f"{error}: is there an RDMA device with that address, and does no firewall stop "
        f"UDP port 4791 (RoCE) or TCP port {plan.port} (iWARP)?"
    )


def _is_own(host: str) -> bool:
    return host in {address.pair[0] for _, address in interface_addresses()}
