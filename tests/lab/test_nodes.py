"""A lab of two nodes on a wire: commands on each of them, and the faults that tests bring about."""

import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from aiordma.lab.errors import LabError
from aiordma.lab.nodes import Node, nodes
from aiordma.lab.remote import RemoteCommand

from .conftest import LAB_RUN, REPOSITORY, children, environment, is_running, wait_until

# One lab for all tests of this module.
pytestmark = pytest.mark.xdist_group("nodes")

# Prints its process id and sends datagrams: the number of them is the first word of each line read.
SEND = """
import socket, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
    for line in sys.stdin:
        count, host = line.split()
        for _ in range(int(count)):
            sock.sendto(b"x" * 1000, (host, 9))
        print("sent", flush=True)
"""
ADDRESSES = {
    "node1": {"rxe": "10.7.1.1", "rxe6": "fd07:1::1", "siw": "10.7.2.1", "siw6": "fd07:2::1"},
    "node2": {"rxe": "10.7.1.2", "rxe6": "fd07:1::2", "siw": "10.7.2.2", "siw6": "fd07:2::2"},
}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Run a lab of two nodes. Return its id."""
    here = tmp_path_factory.mktemp("lab")
    process = subprocess.Popen(
        [
            *LAB_RUN,
            "--nodes",
            "2",
            "--device",
            "both",
            "--",
            "sh",
            "-c",
            "echo $AIORDMA_LAB_ID; cat",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=here,
        env=environment(),
    )
    assert process.stdin is not None
    assert process.stdout is not None
    yield process.stdout.readline().decode().strip()
    process.stdin.close()
    assert process.wait(600) == 0
    process.stdout.close()


@pytest.fixture
def node1(lab: str) -> Node:
    return Node("node1", lab)


@pytest.fixture
def node2(lab: str) -> Node:
    return Node("node2", lab)


def test_nodes_have_names_addresses_and_variables(lab: str, node1: Node, node2: Node) -> None:
    found = {node.name: node for node in nodes(lab)}
    assert {name: node.addresses for name, node in found.items()} == ADDRESSES
    assert [node.state for node in found.values()] == ["up", "up"]
    assert [node.run("hostname") for node in (node1, node2)] == ["node1\n", "node2\n"]
    printed = "echo $AIORDMA_LAB_NODE $AIORDMA_LAB_SIW $AIORDMA_LAB_NODE1_RXE6 $AIORDMA_LAB_NODES"
    assert node2.run("sh", "-c", printed) == "node2 10.7.2.2 fd07:1::1 node1 node2\n"
    hosts = node1.run("getent", "ahostsv4", "node2", "node2-siw").splitlines()
    assert {line.split()[0] for line in hosts} == {"10.7.1.2", "10.7.2.2"}
    with pytest.raises(LabError, match=r"^the lab has no node node3: its nodes are node1, node2$"):
        Node("node3", lab).run("true")


@pytest.mark.parametrize("device", ["rxe", "siw", "rxe6", "siw6"])
def test_nodes_reach_each_other(node1: Node, node2: Node, device: str) -> None:
    """soft-iWARP sometimes loses the first connection. So each attempt has a time limit."""
    address = ADDRESSES["node2"][device]
    for _ in range(5):
        with node2.start("rping", "-s", "-a", address, "-C", "3") as server:
            listening = f"pid {server.pid} comm rping"
            wait_until(lambda: listening in node2.run("rdma", "resource", "show", "cm_id"))  # noqa: B023
            argv = ("timeout", "15", "rping", "-c", "-a", address, "-C", "3", "-v")
            with node1.start(*argv) as client:
                if client.wait() == 0:
                    assert client.take_output().count(b"ping data") == 3
                    return
    raise AssertionError("no attempt succeeded")


def test_a_node_runs_commands_on_another(node1: Node) -> None:
    program = [sys.executable, "-m", "aiordma", "lab", "exec", "node2", "--", "sh", "-c"]
    script = f"cat; hostname; exec {sys.executable} -c 'import sys; sys.exit(5)'"
    with node1.start("env", f"PYTHONPATH={REPOSITORY}", *program, script) as command:
        command.write(b"input\n")
        command.close_stdin()
        assert [command.read_line(), command.read_line()] == ["input", "node2"]
        assert command.wait() == 5


def test_exec_relays_streams_files_and_the_exit_code(lab: str, tmp_path: Path, node2: Node) -> None:
    argv = [sys.executable, "-m", "aiordma", "lab", "exec", "--lab", lab, "node2", "--"]
    script = "cat; echo error >&2; exit 7"
    data = bytes(range(256)) * 4000
    done = subprocess.run(
        [*argv, "sh", "-c", script], input=data, capture_output=True, cwd="/", env=environment()
    )
    assert (done.stdout == data, done.stderr, done.returncode) == (True, b"error\n", 7)
    done = subprocess.run([*argv, "no-such"], capture_output=True, cwd="/", env=environment())
    assert (done.returncode, done.stdout) == (127, b"")


def test_a_command_is_killed_when_its_caller_is_gone(node2: Node) -> None:
    with node2.start("sh", "-c", "sleep 3600 & sleep 3600 & echo; wait") as command:
        command.read_line()  # the processes exist
        assert len(processes(node2, command.pid)) == 3
    wait_until(lambda: not processes(node2, command.pid))


def test_commands_of_a_node_do_not_delay_each_other(node2: Node) -> None:
    """One command writes without a reader, and one reads nothing."""
    with node2.start("yes") as writer, node2.start("sleep", "3600"):
        writer.read_line()
        assert node2.run("echo", "hello") == "hello\n"


def test_netem_changes_what_a_node_sends(node1: Node, node2: Node) -> None:
    with node2.start(sys.executable, "-uc", SEND) as sender:
        target = ADDRESSES["node1"]["rxe"]
        deliver(sender, node1, target)  # the addresses are resolved before anything is lost
        for words, received in ((["loss", "100%"], 0), (["duplicate", "100%"], 200), ([], 100)):
            node2.netem(*words, device="rxe")
            before = datagrams(node1)
            send(sender, 100, target)
            if received:
                wait_until(lambda: datagrams(node1) - before >= received)  # noqa: B023
            else:
                wait_until(lambda: dropped(node2, "rxe") >= 100)
            assert datagrams(node1) - before == received
        node2.netem("corrupt", "100%", device="rxe")
        before = datagrams(node1, "InCsumErrors")
        send(sender, 100, target)
        wait_until(lambda: datagrams(node1, "InCsumErrors") - before > 50)
        node2.netem()


def test_a_block_is_one_way(node1: Node, node2: Node) -> None:
    node1.run("true")
    with (
        node1.start(sys.executable, "-uc", SEND) as one,
        node2.start(sys.executable, "-uc", SEND) as two,
    ):
        # Both nodes know each other's link address before node2 can ask for it in vain.
        deliver(one, node2, ADDRESSES["node2"]["siw"])
        deliver(two, node1, ADDRESSES["node1"]["siw"])
        at_one, at_two = datagrams(node1), datagrams(node2)
        node1.block("node2")
        try:
            send(one, 10, ADDRESSES["node2"]["siw"])
            send(two, 10, ADDRESSES["node1"]["siw"])
            wait_until(lambda: datagrams(node1) - at_one == 10)
        finally:  # the next tests have the same nodes
            node1.unblock("node2")
        send(one, 5, ADDRESSES["node2"]["siw"])
        wait_until(lambda: datagrams(node2) - at_two == 5)


def test_a_pulled_cable_takes_the_carrier_of_one_device(node1: Node, node2: Node) -> None:
    node2.pull_cable("rxe")
    wait_until(lambda: carriers(node2) == {"rxe": "0", "siw": "1"})
    assert carriers(node1) == {"rxe": "1", "siw": "1"}
    # The device notices it later than the interface.
    wait_until(lambda: "rxe0/1 state DOWN" in node2.run("rdma", "link"))
    node2.plug_cable("rxe")
    wait_until(lambda: carriers(node2) == {"rxe": "1", "siw": "1"})
    wait_until(lambda: "rxe0/1 state ACTIVE" in node2.run("rdma", "link"))
    with pytest.raises(LabError, match=r"^node2 has no cable of mlx5$"):
        node2.pull_cable("mlx5")


def test_power_is_cut_and_the_node_boots_again(lab: str, node1: Node, node2: Node) -> None:
    node2.run("touch", "/tmp/before")
    with node2.start("sleep", "3600") as command:
        node2.power_off()
        with pytest.raises(LabError, match=r"^the power of node2 was cut$"):
            command.wait()
    assert [node.state for node in nodes(lab)] == ["up", "off"]
    with pytest.raises(LabError, match=r"^node2 is off$"):
        node2.run("true")
    node2.power_on()
    assert [node.state for node in nodes(lab)] == ["up", "up"]
    assert "before" not in node2.run("ls", "/tmp").split()
    assert node2.run("rdma", "link").count("state ACTIVE") == 2
    with node1.start(sys.executable, "-uc", SEND) as sender:
        deliver(sender, node2, ADDRESSES["node2"]["rxe"])


def test_the_clock_of_one_node_jumps(node1: Node, node2: Node) -> None:
    node2.jump_clock(-7200)
    ahead = int(node1.run("date", "+%s")) - int(node2.run("date", "+%s"))
    node2.jump_clock(7200)
    assert 7000 < ahead < 7400


def test_memory_and_descriptors_are_taken_away(node2: Node) -> None:
    before = available(node2)
    with node2.take_memory(before // 2):  # other programs of the node use and free memory, too
        assert before / 4 < available(node2) < before * 3 / 4
    wait_until(lambda: available(node2) > before * 3 / 4)
    with node2.start("cat") as command:
        node2.limit_descriptors(command.pid, 7)
        node2.limit_locked_memory(command.pid, 65536)
        limits = node2.run("cat", f"/proc/{command.pid}/limits").splitlines()
    assert ["7", "7"] in [line.split()[3:5] for line in limits if line.startswith("Max open")]
    assert ["65536", "65536"] in [line.split()[3:5] for line in limits if "locked" in line]


def test_a_lab_that_is_killed_ends_its_machines(tmp_path: Path) -> None:
    with two_nodes(tmp_path) as (process, _, machines):
        process.kill()
    wait_until(lambda: not any(is_running(machine) for machine in machines))


def test_a_power_cut_of_the_node_that_runs_the_command_ends_the_lab(tmp_path: Path) -> None:
    with two_nodes(tmp_path) as (process, lab, machines):
        with contextlib.suppress(LabError):  # the lab may end before it answers
            Node("node1", lab).power_off()
        assert process.wait(600) == 125
        assert process.stderr is not None
        assert process.stderr.read() == b"aiordma lab: the power of node1 was cut\n"
    wait_until(lambda: not any(is_running(machine) for machine in machines))


@contextlib.contextmanager
def two_nodes(cwd: Path) -> Iterator[tuple["subprocess.Popen[bytes]", str, list[int]]]:
    """Run a lab. Return its process, its id, and the processes of its machines."""
    argv = [*LAB_RUN, "--nodes", "2", "--", "sh", "-c", "echo $AIORDMA_LAB_ID; sleep 3600"]
    with subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=cwd, env=environment()
    ) as process:
        try:
            assert process.stdout is not None
            lab = process.stdout.readline().decode().strip()
            machines = children(process.pid)
            assert len(machines) == 2
            yield process, lab, machines
        finally:
            process.kill()


def send(sender: RemoteCommand, count: int, host: str) -> None:
    """Send datagrams, and wait until the kernel has them."""
    sender.write(f"{count} {host}\n".encode())
    assert sender.read_line() == "sent"


def deliver(sender: RemoteCommand, node: Node, host: str) -> None:
    """Send a datagram to a node, and wait until the node has received it."""
    before = datagrams(node)
    send(sender, 1, host)
    wait_until(lambda: datagrams(node) == before + 1)


def datagrams(node: Node, counter: str = "received") -> int:
    """Return the number of datagrams of IPv4 that a node has received, or another counter of UDP.

    Without a listening program they are counted as datagrams to no port.
    """
    lines = node.run("cat", "/proc/net/snmp").splitlines()
    names, values = (line.split()[1:] for line in lines if line.startswith("Udp:"))
    counters = dict(zip(names, map(int, values), strict=True))
    return counters["NoPorts"] if counter == "received" else counters[counter]


def dropped(node: Node, device: str) -> int:
    """Return the number of packets that netem has dropped on a device of a node."""
    found = re.search(
        r"dropped (\d+)", node.run("tc", "-s", "qdisc", "show", "dev", f"{device}-wire")
    )
    return int(found[1]) if found else 0


def carriers(node: Node) -> dict[str, str]:
    """Return "1" for each device whose card has a carrier."""
    return {
        driver: node.run("cat", f"/sys/class/net/{driver}-wire/carrier").strip()
        for driver in ("rxe", "siw")
    }


def available(node: Node) -> int:
    """Return the available memory of a node in bytes."""
    lines = node.run("cat", "/proc/meminfo").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


def processes(node: Node, session: int) -> list[str]:
    """Return the processes of a session, in the sense of setsid(2). See proc_pid_stat(5)."""
    lines = node.run("sh", "-c", "cat /proc/[0-9]*/stat 2>/dev/null || true").splitlines()
    fields = [(line.split()[0], *line.rpartition(")")[2].split()) for line in lines]
    return [pid for pid, state, _, _, of, *_ in fields if int(of) == session and state != "Z"]
