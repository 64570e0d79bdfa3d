"""The devices and their ports: state, link layer, MTU, GIDs, addresses, flow control, ibacm."""

from __future__ import annotations

import ipaddress
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from aiordma.doctor.finding import Finding, ok, problem, warning
from aiordma.enums import TransportType
from aiordma.errors import VerbsError
from aiordma.rdmacm import DeviceAddress
from aiordma.verbs import Device

NO_DEVICE_MEND = (
    "install the driver of the card; or make a soft device with `modprobe rdma_rxe` and `rdma link "
    "add rxe0 type rxe netdev NETDEV`; or run the program in `aiordma lab run -- COMMAND`"
)
PROVIDERS = (
    "the package ibverbs-providers (Debian, Ubuntu), libibverbs (Fedora, RHEL) or rdma-core (Arch, "
    "SUSE)"
)
CANNOT_OPEN_MEND = f"install its provider: {PROVIDERS}; its file in /dev/infiniband must exist, too"
SMALL_MTU = 1024
ETHERNET = "Ethernet"
INFINIBAND = "InfiniBand"
ROCE_V2 = "RoCE v2"


PROVIDERS_DIRECTORY = "etc/libibverbs.d"
"""The directory with a file for each provider: a device's part of libibverbs."""


@dataclass(frozen=True, slots=True)
class Gid:
    """An entry of a port's GID table, as sysfs shows it."""

    index: int
    value: ipaddress.IPv6Address
    kind: str
    """"RoCE v2", "IB/RoCE v1", or "" if sysfs does not show it."""
    interface: str

    @property
    def address(self) -> str:
        """The IP address that the GID stands for."""
        return str(self.value.ipv4_mapped or self.value)


@dataclass(frozen=True, slots=True)
class Port:
    """A port of a device, as sysfs shows it."""

    device: str
    number: int
    state: str
    link_layer: str
    rate: str
    gids: Sequence[Gid]

    @property
    def subject(self) -> str:
        """The name of the port in a report."""
        return f"{self.device} port {self.number}"

    @property
    def is_active(self) -> bool:
        """True if the port can carry traffic."""
        return self.state == "ACTIVE"

    def hosts(self, addresses: Sequence[DeviceAddress]) -> list[str]:
        """Return the addresses of this port among those of all ports."""
        mine = (self.device, self.number)
        return [one.host for one in addresses if (one.device, one.port_num) == mine]


def device_names(root: Path) -> list[str]:
    """Return the RDMA devices that the kernel has, whether or not a library can open them."""
    return sorted(path.name for path in (root / "sys/class/infiniband").glob("*"))


def ports_of(root: Path, device: str) -> list[Port]:
    """Return the ports of a device."""
    directory = root / "sys/class/infiniband" / device / "ports"
    return [_read_port(path, device) for path in sorted(directory.glob("*"))]


def _read_port(path: Path, device: str) -> Port:
    return Port(
        device,
        int(path.name),
        _read(path / "state").partition(": ")[2],
        _read(path / "link_layer"),
        _read(path / "rate"),
        [gid for entry in _numbered(path / "gids") if (gid := _read_gid(path, entry)) is not None],
    )


def _read_gid(port: Path, entry: Path) -> Gid | None:
    """Return an entry of the GID table; None if it is empty."""
    text = _read(entry)
    if not text.replace(":", "").strip("0"):
        return None
    attributes = port / "gid_attrs"
    return Gid(
        int(entry.name),
        ipaddress.IPv6Address(text),
        _read(attributes / "types" / entry.name),
        _read(attributes / "ndevs" / entry.name),
    )


def _numbered(directory: Path) -> list[Path]:
    return sorted(directory.glob("*"), key=lambda path: int(path.name))


def _read(path: Path) -> str:
    """Return the content of a file; "" if it does not exist or, as in sysfs, has no value."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def examine_devices(names: Sequence[str], opened: Mapping[str, Device]) -> Iterator[Finding]:
    """Examine whether the libraries have opened the kernel's devices."""
    if not names:
        yield problem("devices", "this machine has no RDMA device", NO_DEVICE_MEND)
    for name in names:
        if name in opened:
            yield ok(name, f"{opened[name].transport.name} device, opened by the libraries")
        else:
            yield problem(name, "the libraries cannot open it", CANNOT_OPEN_MEND)


def examine_providers(root: Path) -> Finding:
    """Examine whether providers are installed, which no device shows where there is none."""
    names = sorted(path.stem for path in (root / PROVIDERS_DIRECTORY).glob("*.driver"))
    if names:
        return ok("providers", f"installed: {', '.join(names)}")
    text = f"none in /{PROVIDERS_DIRECTORY}, so the libraries could not open a device"
    return warning("providers", text, f"install {PROVIDERS}")


def examine_ports(
    ports: Sequence[Port], opened: Mapping[str, Device], addresses: Sequence[DeviceAddress]
) -> Iterator[Finding]:
    """Examine all ports of this machine. `addresses` are those of all ports.

    A port that is not active, or has no address, is a problem only if no other port works.
    """
    working = [port for port in ports if port.is_active and port.hosts(addresses)]
    for port in ports:
        others_work = any(other is not port for other in working)
        device, hosts = opened.get(port.device), port.hosts(addresses)
        yield from examine_port(port, device, hosts, others_work=others_work)


def examine_port(
    port: Port, device: Device | None, addresses: Sequence[str], *, others_work: bool = False
) -> Iterator[Finding]:
    """Examine a port: its state, its MTU, its GIDs and the addresses that reach it.

    `others_work` is True if another port of this machine is active and has an address.
    """
    report = warning if others_work else problem
    layer = port.link_layer or "unknown link layer"
    if not port.is_active:
        mend = "plug in the cable, and set up its network interface: `ip link set NETDEV up`"
        if port.link_layer == INFINIBAND:
            mend = "plug in the cable; a subnet manager (opensm) must run in the fabric"
        yield report(port.subject, f"{port.state.lower() or 'unknown state'}, {layer}", mend)
        return
    yield ok(port.subject, f"active, {layer}, {port.rate}")
    if device is None:
        return
    yield from _examine_mtu(port, device)
    if device.transport is not TransportType.IWARP:  # its only GID is the MAC address
        yield from _examine_gids(port)
    if addresses:
        yield ok(port.subject, f"is reached at {', '.join(addresses)}")
    else:
        interfaces = sorted({gid.interface for gid in port.gids if gid.interface})
        where = interfaces[0] if interfaces else "NETDEV"
        mend = f"add one with `ip address add ADDRESS/PREFIX dev {where}`"
        if port.link_layer == INFINIBAND:
            mend = f"make its network interface with `modprobe ib_ipoib`, and {mend}"
        text = "has no IP address, and connections are made by IP address"
        yield report(port.subject, text, mend)


def _examine_mtu(port: Port, device: Device) -> Iterator[Finding]:
    try:
        mtu = device.query_port(port.number).active_mtu
    except VerbsError as error:
        yield problem(port.subject, str(error), "look for the cause in the kernel's log (dmesg)")
        return
    if mtu >= SMALL_MTU:
        yield ok(port.subject, f"MTU {mtu} bytes")
    else:
        mend = "raise the MTU of the network interface: `ip link set NETDEV mtu 4200`"
        yield warning(port.subject, f"MTU {mtu} bytes, which makes transfers slow", mend)


def _examine_gids(port: Port) -> Iterator[Finding]:
    for gid in port.gids:
        where = f" on {gid.interface}" if gid.interface else ""
        kind = f" ({gid.kind})" if gid.kind else ""
        yield ok(port.subject, f"GID {gid.index} is {gid.address}{kind}{where}")
    if port.link_layer == ETHERNET and not any(gid.kind == ROCE_V2 for gid in port.gids):
        yield warning(
            port.subject,
            "has no GID of RoCE v2, so connections do not cross routers",
            "add an IP address to its interface; or enable RoCE v2 in the card's driver",
        )


def examine_flow_control(root: Path, port: Port) -> Iterator[Finding]:
    """Examine the priority flow control of a RoCE card's interface, if it can be read."""
    interfaces = {gid.interface for gid in port.gids if gid.interface}
    is_hardware = (root / "sys/class/infiniband" / port.device / "device").exists()
    for interface in sorted(interfaces) if is_hardware and port.link_layer == ETHERNET else ():
        argv = ["dcb", "pfc", "show", "dev", interface, "prio-pfc"]
        try:
            shown = subprocess.run(argv, capture_output=True, text=True, timeout=5, check=True)
        except (OSError, subprocess.SubprocessError):
            yield ok(interface, "priority flow control cannot be read (dcb(8), or the card's tool)")
            continue
        state = shown.stdout.strip()
        if ":on" in state:
            yield ok(interface, f"priority flow control: {state}")
        else:
            mend = "if connections are slow or fail under load, enable it for the RoCE priority"
            yield warning(interface, "priority flow control is off for each priority", mend)


def examine_ibacm(root: Path, ports: Sequence[Port]) -> Iterator[Finding]:
    """Examine whether ibacm runs, which resolves addresses for librdmacm on InfiniBand."""
    if not any(port.link_layer == INFINIBAND for port in ports):
        return
    is_there = any((root / "run" / name).exists() for name in ("ibacm-unix.sock", "ibacm.sock"))
    text = "is running" if is_there else "is not running; the kernel resolves addresses and routes"
    yield ok("ibacm", text)
