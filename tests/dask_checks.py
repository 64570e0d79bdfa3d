"""`python tests/dask_checks.py CHECKOUT`: run the checks of distributed for backends with rdma://.

CHECKOUT is a checkout of distributed, whose tests its packages leave out: `make dask-checks`
fetches one. The checks are the functions `check_*` of its distributed/comm/tests/test_comms.py, and
a test that only needs a pair of comms. They run with the first address of each family of an RDMA
device, and with each way to write all addresses.

These do not apply: the tests of TLS and of inproc, and those that replace methods of the TCP
backend's stream or that measure in which buffers it receives.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import logging
import sys
import time
import warnings
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from typing import Any

from aiordma.rdmacm import device_addresses

LIMIT = 120.0
"""The time limit of a check in seconds."""

Check = Callable[[], Coroutine[Any, Any, object]]


def hosts() -> dict[str, str]:
    """Return the first address of each family of the RDMA devices, link-local ones excluded."""
    found: dict[str, str] = {}
    for address in device_addresses():
        if "%" not in address.host:
            found.setdefault("::" if ":" in address.host else "0.0.0.0", address.host)
    return found


def in_brackets(host: str) -> str:
    """Return a host as it stands in an address."""
    return f"[{host}]" if ":" in host else host


def checks_at(comms: Any, wildcard: str, host: str, port: int) -> Iterator[tuple[str, Check]]:
    """Yield the name of each check with the address that it uses, and the check."""
    at, at_all = f"rdma://{in_brackets(host)}", f"rdma://{in_brackets(wildcard)}"

    async def with_pair(check: Callable[[Any, Any], Coroutine[Any, Any, None]]) -> None:
        await check(*await comms.get_comm_pair(at))

    def equal(expected: str, port: int | None = None) -> Any:
        return comms.tcp_eq(expected, port)

    for address, *expected in [
        (at, equal(host)),
        (f"{at}:{port}", equal(host, port)),
        (at_all, equal(wildcard), equal(host)),
        (f"{at_all}:{port + 1}", equal(wildcard, port + 1), equal(host, port + 1)),
    ]:
        yield (
            f"check_client_server({address})",
            partial(comms.check_client_server, address, *expected),
        )
    for name in (
        "check_comm_closed_implicit",
        "check_comm_closed_explicit",
        "check_many_listeners",
        "check_deserialize",
        "check_deserialize_roundtrip",
        "check_deserialize_eoferror",
    ):
        yield f"{name}({at})", partial(getattr(comms, name), at)
    yield f"check_many_listeners({at_all})", partial(comms.check_many_listeners, at_all)
    yield f"check_connect_timeout({at}:1)", partial(comms.check_connect_timeout, f"{at}:1")
    for name in ("check_repr", "check_addresses"):
        yield f"{name}({at})", partial(with_pair, getattr(comms, name))


def all_checks(comms: Any, port: int) -> Iterator[tuple[str, Check]]:
    """Yield each check, with each kind of address."""
    found = hosts()
    for number, (wildcard, host) in enumerate(found.items()):
        yield from checks_at(comms, wildcard, host, port + 10 * number)
    if "0.0.0.0" in found:
        equal = partial(comms.tcp_eq, found["0.0.0.0"])
        for address, ports in (("rdma://", ()), (f"rdma://:{port + 5}", (port + 5,))):
            yield (
                f"check_client_server({address})",
                partial(
                    comms.check_client_server,
                    address,
                    comms.tcp_eq("0.0.0.0", *ports),
                    equal(*ports),
                ),
            )
        yield "check_many_listeners(rdma://)", partial(comms.check_many_listeners, "rdma://")
        yield "check_deserialize(rdma://)", partial(comms.check_deserialize, "rdma://")
    # A test that gets its pair of comms from a function of the module. Its fixture is not used.
    comms.get_tcp_comm_pair = partial(comms.get_comm_pair, f"rdma://{next(iter(found.values()))}")
    test = comms.test_comm_closed_on_read_error
    yield "test_comm_closed_on_read_error", partial(test.__wrapped__, None)


def run(name: str, check: Check) -> bool:
    """Run a check on a new loop, print its result, and return True if it passed."""
    start, problem = time.monotonic(), ""
    try:
        asyncio.run(asyncio.wait_for(check(), LIMIT))
    except Exception as error:
        problem = f": {type(error).__name__}: {error}"
    print(f"{'FAILED' if problem else 'passed'} {name} {time.monotonic() - start:.1f} s{problem}")
    return not problem


def main() -> int:
    """Run all checks. Return the exit code: 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", help="a directory with a checkout of distributed")
    parser.add_argument("--port", type=int, default=3300, help="of the checks that need one")
    arguments = parser.parse_args()
    sys.path.insert(0, arguments.checkout)
    comms = importlib.import_module("distributed.comm.tests.test_comms")
    warnings.simplefilter("ignore", ResourceWarning)  # the checks leave comms open
    logging.disable()  # of errors that the checks bring about
    results = [run(*check) for check in all_checks(comms, arguments.port)]
    print(f"{sum(results)} of {len(results)} checks of {comms.__file__} passed")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
