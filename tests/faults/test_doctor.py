"""`aiordma doctor` on a machine where one thing is broken after the other."""

from __future__ import annotations

import gc
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import loops
import machine
import pytest
from helpers import TIME_LIMIT, run_program
from removing import SoftDevice, device, links, users_of_devices

from aiordma.doctor.finding import Finding, Status
from aiordma.rdmacm import DeviceAddress

__all__ = ["device"]

pytestmark = [pytest.mark.loops("asyncio"), pytest.mark.may_block]

WITHOUT_IPC_LOCK = ("setpriv", "--bounding-set", "-ipc_lock")
WITHOUT_DAC_OVERRIDE = ("setpriv", "--bounding-set", "-dac_override,-dac_read_search")


def run_doctor(
    script: str = "", *under: str, seconds: int = TIME_LIMIT
) -> tuple[int, list[Finding]]:
    """Run the doctor after a shell script, whose mounts nothing else sees. Return its findings.

    `seconds` is the limit for each self-test.
    """
    doctor = (sys.executable, "-m", "aiordma", "doctor", "--json", f"--timeout={seconds}")
    command = ["unshare", "--mount", "sh", "-ec", f'{script}\nexec "$@"', "sh", *under, *doctor]
    limit = TIME_LIMIT + len(links()) * seconds
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
    assert done.stderr == ""
    printed = json.loads(done.stdout)
    findings = [Finding(**{**one, "status": Status(one["status"])}) for one in printed]
    assert done.returncode == any(one.status is Status.PROBLEM for one in findings)
    return done.returncode, findings


def find(findings: list[Finding], subject: str, status: Status) -> Finding:
    """Return the finding about a subject that has this status. There must be exactly one."""
    found = [one for one in findings if one.subject == subject and one.status is status]
    assert len(found) == 1, [str(one) for one in findings]
    return found[0]


@pytest.mark.soft_device
async def test_nothing_is_broken(address: DeviceAddress) -> None:
    code, findings = run_doctor()
    assert (code, {one.status for one in findings}) == (0, {Status.OK}), findings
    assert find(findings, "libraries", Status.OK).text.startswith("rdma-core ")
    assert "opened by the libraries" in find(findings, address.device, Status.OK).text
    port = [one.text for one in findings if one.subject == f"{address.device} port 1"]
    assert any(address.host in text for text in port if text.startswith("is reached at"))
    tested = find(findings, f"{address.device} self-test", Status.OK)
    assert tested.text.startswith(f"20 messages there and back through {address.host}, each in ")


@pytest.mark.parametrize(
    ("script", "subject", "text", "mend"),
    [
        (
            "mount --bind /dev/null $(ldconfig -p | sed -n 's/.*librdmacm.so.1 .* => //p')",
            "libraries",
            r"librdmacm\.so\.1 cannot be loaded \(/.*/librdmacm\.so\.1: file too short\)",
            "reinstall the packages librdmacm1 and ibverbs-providers (Debian, ",
        ),
        (
            "mount -t tmpfs none /etc/libibverbs.d",
            "DEVICE",
            "the libraries cannot open it",
            "install its provider: the package ibverbs-providers",
        ),
        (
            "mount -t tmpfs none /dev/infiniband",
            "/dev/infiniband/rdma_cm",
            "does not exist, for connections",
            "in a container, start it with --device=/dev/infiniband",
        ),
    ],
    ids=["library", "provider", "device files"],
)
async def test_a_part_of_the_software_is_missing(
    address: DeviceAddress, script: str, subject: str, text: str, mend: str
) -> None:
    code, findings = run_doctor(script)
    found = find(findings, subject.replace("DEVICE", address.device), Status.PROBLEM)
    assert code == 1
    assert re.fullmatch(text, found.text)
    assert found.mend.startswith(mend)
    assert [one for one in findings if one.subject.endswith("self-test")] == []


def copy_device_files(options: str = "") -> str:
    """Return a script that mounts a file system with copies of the device files over them."""
    return (
        f"cp -a /dev/infiniband /run/copied; mount -t tmpfs {options} none /dev/infiniband; "
        "cp -a /run/copied/* /dev/infiniband; rm -r /run/copied"
    )


@pytest.fixture
def device_cgroup(tmp_path: Path) -> Iterator[Path]:
    """Yield a cgroup that allows no device of RDMA: that of a container without --device."""
    cgroup = tmp_path / "doctor"
    run_program("mount", "-t", "cgroup", "-o", "devices", "none", str(tmp_path))
    try:
        cgroup.mkdir()
        for file in Path("/dev/infiniband").iterdir():
            number = file.stat().st_rdev
            denied = f"c {os.major(number)}:{os.minor(number)} rwm"
            (cgroup / "devices.deny").write_text(denied)
        yield cgroup
    finally:
        cgroup.rmdir()
        run_program("umount", str(tmp_path))


def check_refused_files(done: tuple[int, list[Finding]], reason: str, device: str) -> None:
    code, findings = done
    found = find(findings, "/dev/infiniband/rdma_cm", Status.PROBLEM)
    assert code == 1
    assert found.text == f"cannot be opened, though its mode allows it ({reason})"
    assert found.mend.startswith("in a container, start it with --device=/dev/infiniband")
    find(findings, device, Status.PROBLEM)


@pytest.mark.soft_device
async def test_device_files_that_the_cgroup_of_a_container_refuses(
    address: DeviceAddress, device_cgroup: Path
) -> None:
    done = run_doctor(f"echo $$ >{device_cgroup}/cgroup.procs")
    check_refused_files(done, "Operation not permitted", address.device)


async def test_device_files_on_a_file_system_without_devices(address: DeviceAddress) -> None:
    done = run_doctor(copy_device_files("-o nodev"))
    check_refused_files(done, "Permission denied", address.device)


async def test_device_files_without_permission(address: DeviceAddress) -> None:
    script = f"{copy_device_files()}; chmod 000 /dev/infiniband/*"
    _, findings = run_doctor(script, *WITHOUT_DAC_OVERRIDE)
    found = find(findings, "/dev/infiniband/rdma_cm", Status.PROBLEM)
    assert found.text == "this user cannot read and write it (mode 0)"
    assert "udev" in found.mend
    find(findings, address.device, Status.PROBLEM)


async def test_a_low_limit_of_locked_memory(address: DeviceAddress) -> None:
    check_low_limit(address, *WITHOUT_IPC_LOCK)


async def test_a_low_limit_of_locked_memory_in_a_user_namespace(address: DeviceAddress) -> None:
    """Root of a container without root has CAP_IPC_LOCK, and the kernel does not look at it."""
    check_low_limit(address, "unshare", "--user", "--map-root-user")


def check_low_limit(address: DeviceAddress, *under: str) -> None:
    _, findings = run_doctor("", "prlimit", f"--memlock={1 << 17}", *under)
    found = find(findings, "locked memory", Status.PROBLEM)
    assert found.text.startswith("0.125 MiB; a connection with default options")
    assert "LimitMEMLOCK" in found.mend
    failed = find(findings, f"{address.device} self-test", Status.PROBLEM)
    assert "locked-memory limit" in failed.text


@pytest.mark.soft_device
async def test_a_limit_of_locked_memory_for_some_connections(address: DeviceAddress) -> None:
    code, findings = run_doctor("", *WITHOUT_IPC_LOCK, "prlimit", f"--memlock={1 << 24}")
    found = find(findings, "locked memory", Status.WARNING)
    assert found.text.startswith("16 MiB; ")
    assert found.text.endswith("so the limit is enough for 31 of them")
    assert code == 0
    find(findings, f"{address.device} self-test", Status.OK)


@pytest.mark.soft_device
async def test_a_limit_of_locked_memory_for_the_self_test_only(address: DeviceAddress) -> None:
    code, findings = run_doctor("", *WITHOUT_IPC_LOCK, "prlimit", f"--memlock={1400 << 10}")
    found = find(findings, "locked memory", Status.WARNING)
    assert found.text.endswith("so the limit is enough for 2 of them")
    assert code == 0
    find(findings, f"{address.device} self-test", Status.OK)


def other_devices(address: DeviceAddress) -> list[DeviceAddress]:
    """Return an address of each other device of this machine."""
    return [one for one in machine.one_per_device() if one.device != address.device]


async def test_a_link_that_is_down_while_other_devices_work(
    address: DeviceAddress, device: SoftDevice
) -> None:
    status = Status.WARNING if other_devices(address) else Status.PROBLEM
    device.set_link("down")
    code, findings = run_doctor()
    assert code == (status is Status.PROBLEM)
    assert find(findings, f"{address.device} port 1", status).text.startswith("down, Ethernet")
    for other in other_devices(address):
        find(findings, f"{other.device} self-test", Status.OK)


async def test_a_link_that_is_down(address: DeviceAddress, device: SoftDevice) -> None:
    """The links of the other devices are down, too."""
    with ExitStack() as restored:
        for other in other_devices(address):
            soft = SoftDevice.of_address(other)
            restored.enter_context(soft.restored()).set_link("down")
        device.set_link("down")
        code, findings = run_doctor()
    found = find(findings, f"{address.device} port 1", Status.PROBLEM)
    assert code == 1
    assert found.text.startswith("down, Ethernet")
    assert found.mend.startswith("plug in the cable")


@contextmanager
def restored_addresses(netdev: str) -> Iterator[None]:
    """Give an interface after the block the addresses that it had before."""
    shown = subprocess.run(
        ["ip", "-j", "address", "show", "dev", netdev], capture_output=True, check=True
    )
    (interface,) = json.loads(shown.stdout)
    try:
        yield
    finally:
        for one in interface["addr_info"]:
            where = f"{one['local']}/{one['prefixlen']}"
            more = ["nodad"] if one["family"] == "inet6" else []
            subprocess.run(["ip", "address", "replace", where, "dev", netdev, *more], check=True)


async def test_a_device_without_an_address(address: DeviceAddress, device: SoftDevice) -> None:
    with restored_addresses(device.netdev):
        subprocess.run(["ip", "address", "flush", "dev", device.netdev], check=True)
        _, findings = run_doctor()
    found = [one for one in findings if one.subject == f"{address.device} port 1"]
    (missing,) = (one for one in found if one.text.startswith("has no IP address"))
    assert missing.status is (Status.WARNING if other_devices(address) else Status.PROBLEM)
    assert missing.mend.startswith("add one with `ip address add")
    test = find(findings, f"{address.device} self-test", Status.WARNING)
    assert test.text == "not made, because no active port of the device has an IP address"


@pytest.mark.transport("IB")
async def test_a_small_mtu(address: DeviceAddress, device: SoftDevice) -> None:
    set_mtu = ("ip", "link", "set", device.netdev, "mtu")
    with restored_addresses(device.netdev):  # an interface with a small MTU has no IPv6
        subprocess.run([*set_mtu, "700"], check=True)
        try:
            _, findings = run_doctor()
        finally:
            subprocess.run([*set_mtu, "1500"], check=True)
    found = find(findings, f"{address.device} port 1", Status.WARNING)
    assert found.text == "MTU 512 bytes, which makes transfers slow"
    assert "mtu 4200" in found.mend


@pytest.mark.parametrize(
    ("more", "status", "text"),
    [
        ("", Status.OK, "installed: "),
        ("; mount -t tmpfs none /etc/libibverbs.d", Status.WARNING, "none in /etc/libibverbs.d"),
    ],
    ids=["with providers", "without providers"],
)
async def test_a_machine_without_devices(
    address: DeviceAddress, more: str, status: Status, text: str
) -> None:
    script = "mount -t tmpfs none /sys/class/infiniband; mount -t tmpfs none /dev/infiniband"
    _, findings = run_doctor(script + more)
    assert find(findings, "providers", status).text.startswith(text)
    found = find(findings, "devices", Status.PROBLEM)
    assert found.text == "this machine has no RDMA device"
    assert "rdma link add rxe0 type rxe netdev NETDEV" in found.mend


@pytest.mark.transport("IWARP")
async def test_a_network_that_loses_everything(address: DeviceAddress) -> None:
    """Packets of rxe to itself do not leave the driver. Those of siw cross the interface lo."""
    subprocess.run(["modprobe", "sch_netem"], check=True)
    netem = ["tc", "qdisc", "add", "dev", "lo", "root", "netem", "loss", "100%"]
    subprocess.run(netem, check=True)
    try:
        code, findings = run_doctor(seconds=2)
    finally:
        subprocess.run(["tc", "qdisc", "delete", "dev", "lo", "root"], check=True)
    found = find(findings, f"{address.device} self-test", Status.PROBLEM)
    assert code == 1
    assert found.text == f"no answer through {address.host} within 2 s"
    assert "firewall" in found.mend


async def wait_until_unused(module: str) -> None:
    """Wait until no process uses a kernel module. Ids of earlier tests may still use it."""

    def is_unused() -> bool:
        gc.collect()
        return Path(f"/sys/module/{module}/refcnt").read_text().strip() == "0"

    try:
        await loops.until(is_unused, f"{module} to be unused", seconds=TIME_LIMIT)
    except AssertionError as error:
        raise AssertionError(f"{error}:\n{users_of_devices()}") from None


@pytest.mark.soft_device
async def test_a_kernel_module_that_is_not_loaded(address: DeviceAddress) -> None:
    """The kernel would load it when a program needs it, with the program named here."""
    loader = Path("/proc/sys/kernel/modprobe")
    before = loader.read_text()
    await wait_until_unused("rdma_ucm")
    subprocess.run(["modprobe", "--remove", "rdma_ucm"], check=True)
    try:
        loader.write_text("/bin/false")
        code, findings = run_doctor()
    finally:
        loader.write_text(before)
        subprocess.run(["modprobe", "rdma_ucm"], check=True)
    assert code == 1
    problems = [one for one in findings if one.status is Status.PROBLEM]
    assert problems[0].text == "rdma_ucm is not loaded"
    assert problems[0].mend.startswith("run `modprobe rdma_ucm` as root")
    assert address.device in links()
