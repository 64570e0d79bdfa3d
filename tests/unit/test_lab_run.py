"""`aiordma lab`: command lines, the device script, the relay, its frames and jobs."""

import marshal
import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from aiordma.cli import main
from aiordma.lab import frames, is_inside, job, kvm, qemu
from aiordma.lab.caller import CallerSocket
from aiordma.lab.devices import DEVICES, addresses, on_wire, setup_script
from aiordma.lab.errors import LabError
from aiordma.lab.relay import Relay
from aiordma.lab.run import Options, run

JOB = job.describe(["true"], closed=[])


def test_run_inside_the_lab_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AIORDMA_LAB", raising=False)
    assert not is_inside()
    monkeypatch.setenv("AIORDMA_LAB", "1")
    with pytest.raises(LabError, match=r"^this process runs in the lab already"):
        run(["true"], Options())


def test_devices_have_variables_and_setup_lines() -> None:
    variables = {"AIORDMA_LAB_SIW": "10.7.2.1", "AIORDMA_LAB_SIW6": "fd07:2::1"}
    assert addresses(DEVICES["siw"]) == variables
    script = setup_script(DEVICES["both"])
    assert "rdma link add rxe0 type rxe netdev rxe-veth" in script
    assert "rdma link add siw0 type siw netdev siw-veth" in script


def test_devices_on_a_wire_have_the_number_of_their_node() -> None:
    rxe, siw = (on_wire(device, 3) for device in DEVICES["both"])
    assert addresses((siw,), "SECOND") == {"SECOND_SIW": "10.7.2.3", "SECOND_SIW6": "fd07:2::3"}
    assert rxe.gids == (
        "0000:0000:0000:0000:0000:ffff:0a07:0103",
        "fd07:0001:0000:0000:0000:0000:0000:0003",
    )
    script = setup_script((rxe,))
    assert "link set $(card 52:54:00:07:01:03) name rxe-wire" in script
    assert "rdma link add rxe0 type rxe netdev rxe-wire" in script


def test_qemu_command_line_escapes_commas() -> None:
    cards = (qemu.Card("rxe-wire", "52:54:00:07:01:01", 9),)
    machine = qemu.Machine(Path("/k"), "/i", "/c,d", "tcg", 2, "1G", cwd="/a,b", cards=cards)
    line = " ".join(machine.argv_with_channels("/qemu", 7, 8))
    for part in (
        "path=/a,,b,security_model=none",
        "id=root,path=/,security_model=none,multidevs=remap,readonly=on",
        "file:/c,,d",
        "socket,id=lab,fd=7",
        "socket,id=monitor,fd=8",
        "stream,id=rxe-wire,addr.type=fd,addr.str=9",
    ):
        assert part in line
    assert "idle=poll" not in line
    assert "idle=poll" in " ".join(replace(machine, awake=True).argv("/qemu"))


def test_kvm_is_probed_once_for_each_boot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    probes: list[object] = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("os.access", lambda path, mode: True)
    monkeypatch.setattr(kvm, "_probe", lambda *args: probes.append(args))
    assert [kvm.works("qemu", None) for _ in range(3)] == [False] * 3  # type: ignore[arg-type]
    assert len(probes) == 1


@pytest.mark.parametrize(
    ("sent", "sentence", "log"),
    [
        (b"", "the lab has ended", None),
        (frames.pack(frames.FAILED, b"node1 is off"), "node1 is off", None),
        (frames.pack(frames.FAILED, b"it ended: panic\n/a/log"), "it ended: panic", "/a/log"),
    ],
)
def test_a_relay_raises_if_the_lab_ends_or_fails(
    sent: bytes, sentence: str, log: str | None
) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(sent)
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(LabError) as caught:
            Relay(CallerSocket(ours), "node1", JOB).run()
    assert (str(caught.value), caught.value.log) == (sentence, log)


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_frames_in_pieces_of_any_size_are_parsed(size: int) -> None:
    sent = [
        (frames.OUTPUT, 2, b"\1" + bytes(300)),
        (frames.STDIN_REQUEST, 70000, b""),
        (frames.EXIT, 0, b"\7"),
    ]
    wire = b"".join(frames.pack(kind, data, session) for kind, session, data in sent)
    reader = frames.FrameReader()
    pieces = [wire[i : i + size] for i in range(0, len(wire), size)]
    assert [frame for piece in pieces for frame in reader.feed(piece)] == sent


def test_a_job_is_the_same_after_encoding_and_decoding() -> None:
    sent = job.describe(["echo", "\udcff"], closed=[0, 1, 2])
    sent["env"] = {"NAME": "\udcfe"}
    assert marshal.loads(job.dump(sent)) == sent
    assert (sent["tty"], sent["merged"]) == ([], False)


def test_environment_in_the_lab_is_made_from_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    monkeypatch.setattr(os, "getgid", lambda: 100)
    own = {"PATH": "/bin", "DISPLAY": ":0", "MAKEFLAGS": "-j", "AIORDMA_LAB_SIW": "stale"}
    user = {"SUDO_UID": "1000", "SUDO_GID": "100"}
    assert job.environment(own) == {"PATH": "/bin", **user}


def test_command_line_options_and_exit_codes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[tuple[list[str], Options]] = []

    def fake_run(argv: list[str], options: Options) -> int:
        seen.append((argv, options))
        if argv[0] == "fail":
            raise LabError("a sentence", log="/a/log")
        return 7

    monkeypatch.setattr("aiordma.lab.run.run", fake_run)
    assert (
        main(["lab", "run", "--device=both", "--nodes=2", "--cpus=1", "--", "ls", "--", "-l"]) == 7
    )
    argv, options = seen[0]
    assert argv == ["ls", "--", "-l"]
    chosen = (options.device, options.nodes, options.cpus, options.memory)
    assert chosen == ("both", 2, 1, "2G")
    assert main(["lab", "run", "--awake", "fail"]) == 125
    assert [options.awake for _, options in seen] == [False, True]
    errors = "aiordma lab: a sentence\naiordma lab: the log is in /a/log\n"
    assert capsys.readouterr().err == errors


@pytest.mark.parametrize(
    "argv", [["--cpus", "0", "ls"], ["--nodes", "5", "ls"], ["--device", "mlx5", "ls"], []]
)
def test_wrong_command_line_exits_with_2(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["lab", "run", *argv])
    assert (caught.value.code, "error:" in capsys.readouterr().err) == (2, True)
