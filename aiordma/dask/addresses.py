"""The addresses of comms: `host:port`, with IPv6 hosts in brackets, after `rdma://`."""

from __future__ import annotations

from collections.abc import Mapping

from distributed.comm.addressing import unparse_host_port

from aiordma.errors import AddressError, RdmaError
from aiordma.rdmacm.devices import device_addresses

PREFIX = "rdma://"
WILDCARDS = {"0.0.0.0": False, "::": True}
"""The hosts that mean all addresses, and True if those are of IPv6."""


def to_uri(host: str, port: int) -> str:
    """Return an address as distributed writes it."""
    return PREFIX + unparse_host_port(host, port)


def refuse_encryption(address: str, arguments: Mapping[str, object]) -> None:
    """Make sure that the arguments of a connection or a listener ask for no encryption.

    Raises:
        RuntimeError: they do. RDMA has no TLS.
    """
    if arguments.get("require_encryption") or arguments.get("ssl_context"):
        raise RuntimeError(
            f"encryption is required by the security options or the configuration, and {PREFIX} "
            f"has none: refusing communication from/to {PREFIX}{address}; use tls://"
        )


def device_host(is_ipv6: bool) -> str:
    """Return the first address of an RDMA device of this machine. Blocks: opens devices.

    Raises:
        AddressError: no device has an address of the family.
        VerbsError: ENODEV (no RDMA device).
    """
    for found in device_addresses():
        if (":" in found.host) == is_ipv6:
            return found.host
    family = "IPv6" if is_ipv6 else "IPv4"
    raise AddressError(f"no RDMA device has an {family} address: see `python -m aiordma devices`")


def is_device_host(host: str) -> bool:
    """Return True if an RDMA device of this machine has the address. Blocks: opens devices."""
    try:
        return any(found.host == host for found in device_addresses())
    except RdmaError:
        return False
