"""Run the echo server and the echo client as two processes, on an RDMA device of this machine.

    python examples/demo.py

The exit code is 0 only if the echo was right. `make demo` runs this program, in the lab if this
machine has no RDMA device.
"""

import contextlib
import pathlib
import signal
import subprocess
import sys

from aiordma import RdmaError
from aiordma.rdmacm import DeviceAddress, device_addresses

HERE = pathlib.Path(__file__).parent
TIMEOUT = 60


def pick_address() -> DeviceAddress:
    """Return the first RDMA address of this machine, an IPv4 address if possible."""
    try:
        addresses = device_addresses()
    except RdmaError as error:
        sys.exit(f"demo: {error}")
    if not addresses:
        sys.exit("demo: there is an RDMA device, but its interfaces have no IP address")
    return min(addresses, key=lambda address: ":" in address.host)


def start_server(host: str) -> tuple["subprocess.Popen[str]", str]:
    """Start the echo server; return its process and its port."""
    command = [sys.executable, str(HERE / "echo_server.py"), host, "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    announcement = server.stdout.readline()
    if not announcement:
        sys.exit("demo: the server did not start")
    return server, announcement.split()[-1]


def stop(server: "subprocess.Popen[str]") -> int:
    """Press Ctrl-C for the server until it ends; return its exit code.

    asyncio.run() can miss a signal that comes just before its loop sleeps.
    """
    for _ in range(TIMEOUT):
        server.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return server.wait(1)
    server.kill()
    return server.wait()


def main() -> None:
    address = pick_address()
    print(f"device: {address.device} ({address.transport.name}) at {address.host}", flush=True)
    server, port = start_server(address.host)
    try:
        client = [sys.executable, str(HERE / "echo_client.py"), address.host, port]
        client_code = subprocess.run(client, timeout=TIMEOUT, check=False).returncode
    finally:
        server_code = stop(server)
    if client_code or server_code:
        sys.exit(f"demo: FAILED (client {client_code}, server {server_code})")
    print("demo: the echo was right")


if __name__ == "__main__":
    main()
