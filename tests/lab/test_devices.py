"""The soft RDMA devices in the virtual machine."""

from pathlib import Path

from .conftest import lab_run

# A client that connects before its server listens can wait for ever. So attempts have a time limit.
RPING = """
rdma link
port=7174
for address in $AIORDMA_LAB_RXE $AIORDMA_LAB_RXE6 $AIORDMA_LAB_SIW $AIORDMA_LAB_SIW6; do
    for attempt in 1 2 3 4 5; do
        port=$((port + 1))
        rping -s -a $address -p $port -C 3 >/dev/null 2>&1 &
        sleep $attempt
        timeout 10 rping -c -a $address -p $port -C 3 >/dev/null 2>&1 && break
    done && echo "$address answers"
done
modprobe sch_netem && echo netem
ulimit -l
"""


def test_both_devices_pass_rping(tmp_path: Path) -> None:
    done = lab_run("bash", "-c", RPING, cwd=tmp_path, options=("--device", "both"))
    lines = done.stdout.decode().splitlines()
    assert [line.split()[1] for line in lines[:2]] == ["rxe0/1", "siw0/1"]
    assert all("state ACTIVE" in line for line in lines[:2])
    assert lines[2:] == [
        "10.7.1.1 answers",
        "fd07:1::1 answers",
        "10.7.2.1 answers",
        "fd07:2::1 answers",
        "netem",
        "unlimited",
    ], done.stderr.decode()


def test_the_processors_stay_awake(tmp_path: Path) -> None:
    done = lab_run("dmesg", cwd=tmp_path, options=("--awake",))
    assert b"using polling idle threads" in done.stdout, done.stderr.decode()
