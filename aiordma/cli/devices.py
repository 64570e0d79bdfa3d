"""`aiordma devices`: list this machine's RDMA devices and their IP addresses."""

from __future__ import annotations

import argparse
import sys

_DESCRIPTION = "List the RDMA devices of this machine, and the IP addresses that reach them."
_EPILOG = "The exit code is 0 if there is at least one address to use, otherwise 1."


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare `devices`."""
    devices = subparsers.add_parser(
        "devices", help=_DESCRIPTION, description=_DESCRIPTION, epilog=_EPILOG
    )
    devices.set_defaults(handler=_devices)


def _devices(_: argparse.Namespace) -> int:
    from aiordma.errors import RdmaError
    from aiordma.rdmacm import device_addresses

    try:
        addresses = device_addresses()
    except RdmaError as error:
        print(f"aiordma devices: {error}", file=sys.stderr)
        return 1
    for found in addresses:
        print(f"{found.device}\t{found.transport.name}\t{found.interface}\t{found.host}")
    if not addresses:
        print("aiordma devices: no RDMA device has an IP address", file=sys.stderr)
    return 0 if addresses else 1
