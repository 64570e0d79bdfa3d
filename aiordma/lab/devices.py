"""The soft RDMA devices: names, addresses, kernel modules, and the script that creates them.

Each device uses one end of its own veth pair. Neither driver works on `lo`: rxe finds no GID there,
and siw's route resolution fails. With two pairs, a test can take down the link of one device only.
"""

from dataclasses import dataclass

__all__ = ["DEVICES", "Device", "addresses", "setup_script"]


@dataclass(frozen=True)
class Device:
    """A soft RDMA device that the guest creates."""

    driver: str  # "rxe" or "siw"; the link type of `rdma link add`
    ipv4: str
    ipv6: str
    module: str
    checksum: str  # a module that older kernels need, and that newer ones do not have
    gids: tuple[str, ...]  # the GID table must contain these before a command uses the device

    @property
    def name(self) -> str:
        """The name of the RDMA device that ibv_devices(1) prints."""
        return f"{self.driver}0"

    @property
    def netdev(self) -> str:
        """The name of the network interface that the RDMA device uses."""
        return f"{self.driver}-veth"

    @property
    def peer(self) -> str:
        """The other end of the veth pair. Setting it down takes down the device's link."""
        return f"{self.driver}-peer"


# In older kernels, rxe requests "crc32" from the crypto API when a link is added, and siw
# requests "crc32c". Their module dependencies do not list these. Without them `rdma link add` fails
# with "No such file or directory".
_RXE = Device(
    driver="rxe",
    ipv4="10.7.1.1",
    ipv6="fd07:1::1",
    module="rdma_rxe",
    checksum="crc32_generic",
    gids=(
        "0000:0000:0000:0000:0000:ffff:0a07:0101",
        "fd07:0001:0000:0000:0000:0000:0000:0001",
    ),
)
_SIW = Device(
    driver="siw",
    ipv4="10.7.2.1",
    ipv6="fd07:2::1",
    module="siw",
    checksum="libcrc32c",
    gids=(),  # the only GID of an iWARP device is the MAC address
)
DEVICES = {"rxe": (_RXE,), "siw": (_SIW,), "both": (_RXE, _SIW)}


def addresses(devices: tuple[Device, ...]) -> dict[str, str]:
    """Return the environment variables that hold the devices' addresses."""
    variables = {}
    for device in devices:
        variable = f"AIORDMA_LAB_{device.driver.upper()}"
        variables[variable] = device.ipv4
        variables[f"{variable}6"] = device.ipv6
    return variables


_DEVICE_SCRIPT = """\
ip -batch - <<'END' || fail "could not create the network interface for {driver}"
link add {netdev} type veth peer name {peer}
link set {peer} up
link set {netdev} up
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

    They call the functions `fail` and `wait_for` of the script `lab/devices`.
    """
    lines = []
    for device in devices:
        lines.append(
            _DEVICE_SCRIPT.format(
                driver=device.driver,
                name=device.name,
                netdev=device.netdev,
                peer=device.peer,
                ipv4=device.ipv4,
                ipv6=device.ipv6,
            )
        )
        lines += [_WAIT_FOR_GID.format(gid=gid, name=device.name) for gid in device.gids]
    return "".join(lines)
