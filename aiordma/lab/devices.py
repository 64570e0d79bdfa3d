"""The soft RDMA devices: their names, addresses, modules, and the script that creates them.

Each device sits on one end of a veth pair of its own. Neither driver is content with `lo` (rxe
finds no GID there, siw's route resolution fails), and so a test can pull one cable only.
"""

from dataclasses import dataclass

__all__ = ["DEVICES", "Device", "addresses", "setup_script"]


@dataclass(frozen=True)
class Device:
    """A soft RDMA device as the guest creates it."""

    driver: str  # also the link type for `rdma link add`
    ipv4: str
    ipv6: str
    modules: tuple[str, ...]
    gids: tuple[str, ...]  # what must stand in the GID table before a command can use the device

    @property
    def name(self) -> str:
        """The RDMA device, as `ibv_devices` shows it."""
        return f"{self.driver}0"

    @property
    def netdev(self) -> str:
        """The network interface under the RDMA device."""
        return f"{self.driver}-veth"

    @property
    def peer(self) -> str:
        """The other end of the veth pair: taking it down pulls the cable."""
        return f"{self.driver}-peer"


# rxe asks the crypto API for "crc32" when a link is added, siw for "crc32c": no dependency of
# theirs says so, and without them `rdma link add` answers "No such file or directory".
_RXE = Device(
    driver="rxe",
    ipv4="10.7.1.1",
    ipv6="fd07:1::1",
    modules=("crc32_generic", "rdma_rxe"),
    gids=(
        "0000:0000:0000:0000:0000:ffff:0a07:0101",
        "fd07:0001:0000:0000:0000:0000:0000:0001",
    ),
)
_SIW = Device(
    driver="siw",
    ipv4="10.7.2.1",
    ipv6="fd07:2::1",
    modules=("libcrc32c", "siw"),
    gids=(),  # iWARP's only GID is the MAC address
)
DEVICES = {"rxe": (_RXE,), "siw": (_SIW,), "both": (_RXE, _SIW)}


def addresses(devices: tuple[Device, ...]) -> dict[str, str]:
    """The environment variables that tell a command where the devices are."""
    found = {}
    for device in devices:
        variable = f"AIORDMA_LAB_{device.driver.upper()}"
        found[variable] = device.ipv4
        found[f"{variable}6"] = device.ipv6
    return found


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
    """Shell lines that create the devices; they call `fail` and `wait_for` of the guest's init."""
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
