"""Run a command in a new lab: start its machines, run the command on the first, end them."""

import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

from . import initramfs, is_inside, job, kernel, kvm, packages, qemu
from .devices import DEVICES, Device, addresses, on_wire
from .errors import LabError
from .node import NodeOptions
from .relay import Relay
from .server import Server
from .steps import show

__all__ = ["MAX_NODES", "Options", "choose_kernel", "run"]

MAX_NODES = 4


@dataclass(frozen=True)
class Options:
    """The user's choices.

    `boot_timeout` (in seconds) and `accelerator` are chosen by the lab if they are None. `awake`:
    the processors of the machines are never halted.
    """

    device: str = "rxe"
    nodes: int = 1
    cpus: int = field(default_factory=lambda: min(os.cpu_count() or 1, 4))
    memory: str = "2G"
    boot_timeout: float | None = None
    accelerator: str | None = None
    awake: bool = False

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices that the guest creates."""
        return DEVICES[self.device]


def run(argv: Sequence[str], options: Options) -> int:
    """Run `argv` in the lab. Return its exit code.

    Raises: LabError if the lab itself fails.
    """
    if is_inside():
        raise LabError(
            "this process runs in the lab already: run the command without `aiordma lab run`"
        )
    qemu.check_machine()
    closed = job.open_closed_streams()
    the_job = job.describe(argv, closed)
    lab_id = secrets.token_hex(3)
    with Server(lab_id, _nodes(options, lab_id, the_job["cwd"])) as lab:
        return Relay(lab.caller, "node1", the_job).run()


def _nodes(options: Options, lab_id: str, cwd: str) -> list[NodeOptions]:
    """Return the settings of the lab's machines.

    Raises: LabError if something is missing on this machine.
    """
    program = qemu.find()
    the_kernel, devices = choose_kernel(options.devices)
    accelerator = options.accelerator or kvm.choose(program, the_kernel)
    machine = qemu.Machine(
        kernel=the_kernel.image,
        initramfs="",
        console="",
        accelerator=accelerator,
        cpus=options.cpus,
        memory=options.memory,
        cwd=cwd,
        awake=options.awake,
    )
    nodes = _devices_of_nodes(devices, options.nodes)
    busybox = packages.busybox()
    common = {"AIORDMA_LAB": "1", "AIORDMA_LAB_ID": lab_id, **_variables(nodes)}
    return [
        NodeOptions(
            name=name,
            title=f"the virtual machine of {name}" if len(nodes) > 1 else "the virtual machine",
            hostname=name if len(nodes) > 1 else os.uname().nodename,
            program=program,
            machine=machine,
            initramfs=initramfs.build(the_kernel, own, cwd, busybox, _hosts(nodes)),
            devices=own,
            variables={**common, "AIORDMA_LAB_NODE": name},
            boot_timeout=options.boot_timeout or kvm.BOOT_TIMEOUT[accelerator] * len(nodes),
        )
        for name, own in nodes.items()
    ]


def _devices_of_nodes(devices: tuple[Device, ...], nodes: int) -> dict[str, tuple[Device, ...]]:
    """Return the devices of each node, by its name."""
    if nodes == 1:
        return {"node1": devices}
    return {
        f"node{number}": tuple(on_wire(device, number) for device in devices)
        for number in range(1, nodes + 1)
    }


def _hosts(nodes: dict[str, tuple[Device, ...]]) -> str:
    """Return the lines of /etc/hosts with the names of the nodes: none for a single one.

    The name of a node is its address of the first device. `node2-siw` is the address of siw.
    """
    if len(nodes) == 1:
        return ""
    lines = []
    for name, devices in nodes.items():
        for device in devices:
            names = f"{name} {name}-{device.driver}" if device is devices[0] else ""
            names = names or f"{name}-{device.driver}"
            lines += [f"{device.ipv4} {names}\n", f"{device.ipv6} {names}\n"]
    return "".join(lines)


def _variables(nodes: dict[str, tuple[Device, ...]]) -> dict[str, str]:
    """Return the variables that name the nodes and their addresses: none for a single one."""
    if len(nodes) == 1:
        return {}
    variables = {"AIORDMA_LAB_NODES": " ".join(nodes)}
    for name, devices in nodes.items():
        variables |= addresses(devices, f"AIORDMA_LAB_{name.upper()}")
    return variables


def choose_kernel(wanted: tuple[Device, ...]) -> tuple[kernel.Kernel, tuple[Device, ...]]:
    """Return a kernel and the devices to create. If siw could not be built, "both" means rxe.

    Raises: LabError if no kernel has the driver.
    """
    try:
        return kernel.find([device.driver for device in wanted]), wanted
    except LabError:
        if len(wanted) == 1:
            raise
        found = kernel.find(["rxe"])
    show("lab: with rxe alone: siw could not be built for this kernel\n")
    return found, DEVICES["rxe"]
