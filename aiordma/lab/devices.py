"""The soft RDMA devices: names, addresses, kernel modules, and the script that creates them.

In a lab of one machine, each device uses one end of its own veth pair. Neither driver works on
`lo`: rxe finds no GID there, and siw's route resolution fails. In a lab of several nodes, each
device uses a network card, which a wire connects with the same device of the other nodes. So a
test can take down the link of one device only.
"""

import ipaddress
from dataclasses import dataclass, replace

__all__ = ["DEVICES", "Device", "addresses", "on_wire", "setup_script"]


@dataclass(frozen=True)
class Device:
    """A soft RDMA device that the guest creates."""

    driver: str  # "rxe" or "siw"; the link type of `rdma link add`
    ipv4: str
    ipv6: str
    module: str
    checksum: str  # a module that older kernels need, and that newer ones do not have
    mac: str | None = None  # of the network card; None: the device uses a veth pair

    @property
    def name(self) -> str:
        """The name of the RDMA device that ibv_devices(1) prints."""
        return f"{self.driver}0"

    @property
    def netdev(self) -> str:
        """The name of the network interface that the RDMA device uses."""
        return f"{self.driver}-wire" if self.mac else f"{self.driver}-veth"

    @property
    def peer(self) -> str:
        """The other end of the veth pair. Setting it down takes down the device's link."""
        return f"{self.driver}-peer"

    @property
    def gids(self) -> tuple[str, ...]:
        """The entries that the GID table must have before a command uses the device.

        The only GID of an iWARP device is its MAC address.
        """
        if self.driver != "rxe":
            return ()
        gids = [ipaddress.IPv6Address(one) for one in (f"::ffff:{self.ipv4}", self.ipv6)]
        # IPv6Address.exploded is no GID: from Python 3.13 on it ends with the IPv4 address.
        return tuple(gid.packed.hex(":", 2) for gid in gids)


# In older kernels, rxe requests "crc32" from the crypto API when a link is added, and siw
# requests "crc32c". Their module dependencies do not list these. Without them `rdma link add` fails
# with "No such file or directory".
_RXE = Device("rxe", "10.7.1.1", "fd07:1::1", module="rdma_rxe", checksum="crc32_generic")
_SIW = Device("siw", "10.7.2.1", "fd07:2::1", module="siw", checksum="libcrc32c")
DEVICES = {"rxe": (_RXE,), "siw": (_SIW,), "both": (_RXE, _SIW)}


def on_wire(device: Device, number: int) -> Device:
    """Return a device as it is on the node of this number (from 1), in a lab of several nodes."""
    network = 1 if device.driver == "rxe" else 2
    return replace(
        device,
        ipv4=f"10.7.{network}.{number}",
        ipv6=f"fd07:{network}::{number}",
        mac=f"52:54:00:07:{network:02x}:{number:02x}",
    )


def addresses(devices: tuple[Device, ...], prefix: str = "AIORDMA_LAB") -> dict[str, str]:
    """Return the environment variables that hold the devices' addresses."""
    variables = {}
    for device in devices:
        variable = f"{prefix}_{device.driver.upper()}"
        variables[variable] = device.ipv4
        variables[f"{variable}6"] = device.ipv6
    return variables


_VETH_LINES = """\
link add {netdev} type veth peer name {peer}
link set {peer} up
"""
_CARD_LINES = """\
link set $(card {mac}) name {netdev}
"""
_DEVICE_SCRIPT = """\
ip -batch - <<END || fail "could not create the network interface for {driver}"
{interface}link set {netdev} up
addr add {ipv4}/24 dev {netdev}
addr add {ipv6}/64 dev {netdev} nodad
END
rdma link add {name} type {driver} netdev {netdev} || fail "could not create the {driver} device"
"""

_WAIT_FOR_GID = """\
wait_for "{gid}" /sys/class/infiniband/{name}/ports/1/gids || fail "{name} did not get its GIDs"
"""


def setup_script(devices: tuple[Device, ...]) -> str:
    """Return shell lines that create the devices.

    They call the functions `fail`, `wait_for` and `card` of the script `lab/devices`.
    """
    lines = []
    for device in devices:
        names = {"netdev": device.netdev, "peer": device.peer, "mac": device.mac}
        interface = (_CARD_LINES if device.mac else _VETH_LINES).format(**names)
        lines.append(
            _DEVICE_SCRIPT.format(
                interface=interface,
                netdev=device.netdev,
                driver=device.driver,
                name=device.name,
                ipv4=device.ipv4,
                ipv6=device.ipv6,
            )
        )
        lines += [_WAIT_FOR_GID.format(gid=gid, name=device.name) for gid in device.gids]
    return "".join(lines)
