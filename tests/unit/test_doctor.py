"""The checks of `aiordma doctor` for hardware and versions that the lab does not have.

tests/faults/test_doctor.py runs the command on a machine where something is broken.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import aiordma
from aiordma import cli
from aiordma.doctor import host, ports
from aiordma.doctor.examine import examine
from aiordma.doctor.finding import Finding, Status
from aiordma.enums import TransportType
from aiordma.rdmacm import DeviceAddress

GIDS = {
    "0": ("fe80:0000:0000:0000:0000:00ff:fe00:0001", "IB/RoCE v1", "eth1"),
    "1": ("0000:0000:0000:0000:0000:ffff:c000:0201", "RoCE v2", "eth1"),
    "2": ("0000:0000:0000:0000:0000:0000:0000:0000", "", ""),
}


def make_card(
    root: Path, layer: str, state: str, gids: dict[str, Any] = GIDS, number: int = 1
) -> ports.Port:
    """Make the files in sysfs of a card with a port, and return the port."""
    port = root / f"sys/class/infiniband/mlx5_0/ports/{number}"
    files = {"state": state, "link_layer": layer, "rate": "100 Gb/sec (4X EDR)"}
    for index, (value, kind, interface) in gids.items():
        files |= {f"gids/{index}": value, f"gid_attrs/ndevs/{index}": interface}
        if kind:  # sysfs fails to read the type of an empty entry
            files[f"gid_attrs/types/{index}"] = kind
    for name, text in files.items():
        (port / name).parent.mkdir(parents=True, exist_ok=True)
        (port / name).write_text(f"{text}\n")
    (root / "sys/class/infiniband/mlx5_0/device").mkdir(exist_ok=True)
    return next(one for one in ports.ports_of(root, "mlx5_0") if one.number == number)


def make_device(mtu: int = 4096) -> Any:
    query = lambda number: SimpleNamespace(active_mtu=mtu)  # noqa: E731
    return SimpleNamespace(name="mlx5_0", transport=TransportType.IB, query_port=query)


def lines(findings: Any) -> list[str]:
    return [str(finding) for finding in findings]


def test_a_port_of_a_roce_card(tmp_path: Path) -> None:
    port = make_card(tmp_path, "Ethernet", "4: ACTIVE")
    assert lines(ports.examine_port(port, make_device(), ["192.0.2.1"])) == [
        "ok       mlx5_0 port 1: active, Ethernet, 100 Gb/sec (4X EDR)",
        "ok       mlx5_0 port 1: MTU 4096 bytes",
        "ok       mlx5_0 port 1: GID 0 is fe80::ff:fe00:1 (IB/RoCE v1) on eth1",
        "ok       mlx5_0 port 1: GID 1 is 192.0.2.1 (RoCE v2) on eth1",
        "ok       mlx5_0 port 1: is reached at 192.0.2.1",
    ]
    assert lines(ports.examine_ibacm(tmp_path, [port])) == []


def test_a_card_that_has_only_roce_v1(tmp_path: Path) -> None:
    port = make_card(tmp_path, "Ethernet", "4: ACTIVE", {"0": GIDS["0"]})
    found = [one for one in ports.examine_port(port, make_device(), []) if one.mend]
    assert [one.status for one in found] == [Status.WARNING, Status.PROBLEM]
    assert found[0].text == "has no GID of RoCE v2, so connections do not cross routers"
    assert found[1].mend == "add one with `ip address add ADDRESS/PREFIX dev eth1`"


def test_an_address_belongs_to_one_port_of_a_card(tmp_path: Path) -> None:
    card = [make_card(tmp_path, "Ethernet", "4: ACTIVE", number=number) for number in (1, 2)]
    addresses = [
        DeviceAddress("192.0.2.1", "eth1", "mlx5_0", TransportType.IB, 1),
        DeviceAddress("192.0.2.2", "eth2", "mlx5_0", TransportType.IB, 2),
        DeviceAddress("192.0.2.3", "eth3", "mlx5_1", TransportType.IB, 1),
    ]
    found = lines(ports.examine_ports(card, {"mlx5_0": make_device()}, addresses))
    assert "ok       mlx5_0 port 1: is reached at 192.0.2.1" in found
    assert "ok       mlx5_0 port 2: is reached at 192.0.2.2" in found
    found = lines(ports.examine_ports(card, {"mlx5_0": make_device()}, addresses[:1]))
    assert [line for line in found if "port 2: has no IP address" in line]


def test_a_port_that_does_not_work_is_a_warning_if_another_one_works(tmp_path: Path) -> None:
    states = {1: "1: DOWN", 2: "4: ACTIVE", 3: "4: ACTIVE"}
    card = [make_card(tmp_path, "Ethernet", state, number=n) for n, state in states.items()]
    second = DeviceAddress("192.0.2.2", "eth2", "mlx5_0", TransportType.IB, 2)
    first = DeviceAddress("192.0.2.1", "eth1", "mlx5_0", TransportType.IB, 1)
    for addresses, status in (([second], Status.WARNING), ([first], Status.PROBLEM)):
        found = list(ports.examine_ports(card, {"mlx5_0": make_device()}, addresses))
        (down,) = (one for one in found if one.text == "down, Ethernet")
        assert (down.subject, down.status) == ("mlx5_0 port 1", status)
        (missing,) = (
            one for one in found if one.subject == "mlx5_0 port 3" and "no IP address" in one.text
        )
        assert missing.status is status


def test_a_device_without_an_address_at_an_active_port_has_no_self_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The address of a port that is not active leads nowhere."""
    make_card(tmp_path, "Ethernet", "1: DOWN")
    opened = SimpleNamespace(devices=[make_device()], close=lambda: None)
    address = DeviceAddress("192.0.2.1", "eth1", "mlx5_0", TransportType.IB, 1)
    monkeypatch.setattr("aiordma.doctor.examine._open_devices", lambda: opened)
    monkeypatch.setattr("aiordma.doctor.examine._addresses", lambda: [address])

    async def last() -> Finding:
        return [one async for one in examine(1.0, tmp_path)][-1]

    assert str(asyncio.run(last())) == (
        "warning  mlx5_0 self-test: not made, because no active port of the device has an IP "
        "address; mend its ports first"
    )


def test_providers_are_examined_where_no_device_shows_them(tmp_path: Path) -> None:
    missing = ports.examine_providers(tmp_path)
    assert missing.status is Status.WARNING
    assert missing.text.startswith("none in /etc/libibverbs.d")
    assert "the package ibverbs-providers (Debian" in missing.mend
    (tmp_path / "etc/libibverbs.d").mkdir(parents=True)
    for name in ("rxe", "mlx5"):
        (tmp_path / f"etc/libibverbs.d/{name}.driver").touch()
    assert str(ports.examine_providers(tmp_path)) == "ok       providers: installed: mlx5, rxe"


def test_a_port_of_infiniband_needs_ipoib(tmp_path: Path) -> None:
    port = make_card(tmp_path, "InfiniBand", "4: ACTIVE", {})
    *_, missing = ports.examine_port(port, make_device(), [])
    assert missing.text.startswith("has no IP address")
    assert missing.mend == (
        "make its network interface with `modprobe ib_ipoib`, and "
        "add one with `ip address add ADDRESS/PREFIX dev NETDEV`"
    )


@pytest.mark.parametrize(
    ("layer", "mend"),
    [("InfiniBand", "a subnet manager (opensm) must run"), ("Ethernet", "ip link set NETDEV up")],
)
def test_a_port_that_is_not_active(tmp_path: Path, layer: str, mend: str) -> None:
    port = make_card(tmp_path, layer, "2: INIT")
    (found,) = ports.examine_port(port, make_device(), [])
    assert (found.status, found.text) == (Status.PROBLEM, f"init, {layer}")
    assert mend in found.mend


def test_ibacm_is_only_of_interest_on_infiniband(tmp_path: Path) -> None:
    port = make_card(tmp_path, "InfiniBand", "4: ACTIVE", {})
    (absent,) = ports.examine_ibacm(tmp_path, [port])
    (tmp_path / "run").mkdir()
    (tmp_path / "run/ibacm-unix.sock").touch()
    (running,) = ports.examine_ibacm(tmp_path, [port])
    assert absent.text.startswith("is not running; the kernel resolves")
    assert running.text == "is running"


@pytest.mark.parametrize(
    ("script", "status", "text"),
    [
        ("echo prio-pfc 0:off 3:on", Status.OK, "priority flow control: prio-pfc 0:off 3:on"),
        ("echo prio-pfc 0:off 3:off", Status.WARNING, "priority flow control is off for each"),
        ("exit 1", Status.OK, "priority flow control cannot be read"),
    ],
    ids=["on", "off", "unknown"],
)
def test_priority_flow_control(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, status: Status, text: str
) -> None:
    expected = "pfc show dev eth1 prio-pfc"
    (tmp_path / "dcb").write_text(f'#!/bin/sh\n[ "$*" = "{expected}" ] && {script}\n')
    (tmp_path / "dcb").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    port = make_card(tmp_path, "Ethernet", "4: ACTIVE")
    (found,) = ports.examine_flow_control(tmp_path, port)
    assert (found.subject, found.status) == ("eth1", status)
    assert found.text.startswith(text)
    (tmp_path / "sys/class/infiniband/mlx5_0/device").rmdir()  # a soft device
    assert lines(ports.examine_flow_control(tmp_path, port)) == []


def test_a_device_that_is_removed_meanwhile(tmp_path: Path) -> None:
    def removed(number: int) -> None:
        raise aiordma.VerbsError(5, "ibv_query_port")

    port = make_card(tmp_path, "Ethernet", "4: ACTIVE")
    device: Any = SimpleNamespace(transport=TransportType.IB, query_port=removed)
    texts = [one.text for one in ports.examine_port(port, device, ["192.0.2.1"])]
    assert "[Errno 5] ibv_query_port: Input/output error" in texts


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("libibverbs.so.1.14.44.0", "ok       libraries: rdma-core 44.0"),
        ("libibverbs.so.1.11.28.0", "warning  libraries: rdma-core 28.0 is older than the oldest"),
        ("other.so", "ok       libraries: librdmacm and libibverbs are installed"),
    ],
)
def test_the_version_of_the_libraries(tmp_path: Path, name: str, line: str) -> None:
    maps = tmp_path / "maps"
    maps.write_text(f"7f00-7f01 r-xp 00000000 fe:00 1 /usr/lib/x86_64-linux-gnu/{name}\n")
    assert str(host.examine_libraries(maps)).startswith(line)


def make_device_files(root: Path, *names: str) -> Path:
    """Make device files, and their entries in sysfs. Return the directory of the files."""
    directory = root / "dev/infiniband"
    directory.mkdir(parents=True)
    for name in ("rdma_cm", *names):
        (directory / name).touch()
    for name in names:
        (root / "sys/class/infiniband_verbs" / name).mkdir(parents=True)
        (root / "sys/class/infiniband_verbs" / name / "ibdev").write_text("mlx5_0\n")
    return directory


@pytest.mark.parametrize(
    ("code", "text", "mend"),
    [
        (errno.EPERM, "cannot be opened, though its mode allows it", "--device=/dev/infiniband"),
        (errno.EACCES, "cannot be opened, though its mode allows it", "with nodev"),
        (errno.ENXIO, "leads to no device", "load its driver"),
    ],
    ids=["device cgroup", "nodev", "no driver"],
)
def test_a_device_file_that_the_kernel_does_not_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, text: str, mend: str
) -> None:
    directory = make_device_files(tmp_path, "uverbs0")
    opened = os.open

    def refuse(path: Any, flags: int) -> int:
        if Path(path) == directory / "uverbs0":
            raise OSError(code, os.strerror(code), str(path))
        return opened(path, flags)

    monkeypatch.setattr(os, "open", refuse)
    if code == errno.EPERM:  # access(2) sees the device cgroup, and not nodev
        monkeypatch.setattr(os, "access", lambda path, mode: False)
    usable, refused = host.examine_device_files(tmp_path)
    assert str(usable) == "ok       /dev/infiniband/rdma_cm: can be used, for connections"
    assert (refused.subject, refused.status) == ("/dev/infiniband/uverbs0", Status.PROBLEM)
    assert refused.text == f"{text} ({os.strerror(code)})"
    assert mend in refused.mend


def test_the_file_of_a_device_that_is_removed_meanwhile_is_not_examined(tmp_path: Path) -> None:
    make_device_files(tmp_path, "uverbs0", "uverbs1")
    (tmp_path / "sys/class/infiniband_verbs/uverbs0/ibdev").unlink()
    subjects = [one.subject for one in host.examine_device_files(tmp_path)]
    assert subjects == ["/dev/infiniband/rdma_cm", "/dev/infiniband/uverbs1"]


def test_locked_memory_without_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status = tmp_path / "status"
    status.write_text("Name:\tpython\nCapEff:\t0000000000004000\n")
    assert host.examine_locked_memory(process=tmp_path).text.endswith("has CAP_IPC_LOCK")
    status.write_text("CapEff:\t0000000000000000\n")
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (resource.RLIM_INFINITY, 0))
    assert host.examine_locked_memory(process=tmp_path).text == "no limit"


def test_a_capability_counts_only_in_the_initial_user_namespace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "status").write_text("CapEff:\t0000000000004000\n")
    namespace = tmp_path / "ns/user"
    namespace.parent.mkdir()
    namespace.touch()
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1 << 17, 1 << 17))
    assert host.examine_locked_memory(process=tmp_path).status is Status.PROBLEM
    monkeypatch.setattr(host, "INITIAL_USER_NAMESPACE", namespace.stat().st_ino)
    assert host.examine_locked_memory(process=tmp_path).status is Status.OK


@pytest.mark.parametrize(
    ("limit", "status", "count"),
    [
        ((768 << 10) - 1, Status.PROBLEM, 0),
        (768 << 10, Status.WARNING, 1),
        (1400 << 10, Status.WARNING, 2),
        (1 << 24, Status.WARNING, 31),
    ],
)
def test_the_number_of_connections_that_the_limit_of_locked_memory_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int, status: Status, count: int
) -> None:
    """Each needs 512 KiB. The messages that a loop sends need 256 KiB."""
    (tmp_path / "status").write_text("CapEff:\t0000000000000000\n")
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limit, limit))
    found = host.examine_locked_memory(process=tmp_path)
    assert found.status is status
    assert found.text.endswith(f"so the limit is enough for {count} of them")


def test_the_report_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [
        Finding(Status.OK, "a", "is there"),
        Finding(Status.WARNING, "b", "is low", "raise it"),
    ]

    async def examine(seconds: float) -> Any:
        for one in found:
            yield one

    monkeypatch.setattr("aiordma.doctor.examine.examine", examine)
    assert cli.main(["doctor"]) == 0
    assert capsys.readouterr().out == "ok       a: is there\nwarning  b: is low; raise it\n"
    found.append(Finding(Status.PROBLEM, "c", "is gone", "get it"))
    assert cli.main(["doctor", "--json"]) == 1
    assert '"status": "problem"' in capsys.readouterr().out


def test_a_check_that_raises_loses_no_result(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def examine(seconds: float) -> Any:
        yield Finding(Status.OK, "a", "is there")
        raise KeyError("b")

    monkeypatch.setattr("aiordma.doctor.examine.examine", examine)
    assert cli.main(["doctor", "--json"]) == 1
    printed = capsys.readouterr()
    first, last = json.loads(printed.out)
    assert (first["subject"], last["subject"], last["status"]) == ("a", "doctor", "problem")
    assert "KeyError('b')" in last["text"]
    assert printed.err.splitlines()[-1] == "KeyError: 'b'"


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_closed_pipe_ends_the_command_silently(options: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "aiordma", "doctor", *options]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, b"")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"aiordma {aiordma.__version__}\n"
