"""`aiordma lab run`: command lines, the device script, the relay, its frames and jobs."""

import marshal
import os
import socket
from pathlib import Path

import pytest

from aiordma.cli import main
from aiordma.lab import frames, is_inside, job, kvm, qemu
from aiordma.lab.devices import DEVICES, addresses, setup_script
from aiordma.lab.errors import LabError
from aiordma.lab.relay import GuestEnded, GuestFailed, Relay
from aiordma.lab.run import Options, run

JOB = job.describe(["true"], {}, closed=[])


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


def test_qemu_command_line_escapes_commas() -> None:
    machine = qemu.Machine(Path("/k"), "/i", "/c,d", "tcg", cpus=2, memory="1G", cwd="/a,b")
    line = " ".join(machine.argv_with_channel("/qemu", 7))
    for part in (
        "path=/a,,b,security_model=none",
        "id=root,path=/,security_model=none,multidevs=remap,readonly=on",
        "file:/c,,d",
        "fd=7",
    ):
        assert part in line


def test_kvm_is_probed_once_for_each_boot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    probes: list[object] = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("os.access", lambda path, mode: True)
    monkeypatch.setattr(kvm, "_probe", lambda *args: probes.append(args))
    assert [kvm.works("qemu", None) for _ in range(3)] == [False] * 3  # type: ignore[arg-type]
    assert len(probes) == 1


@pytest.mark.parametrize(
    ("frame", "error"),
    [(b"", GuestEnded), (b"\x15\0\0\0\x02no", GuestFailed), (None, TimeoutError)],
)
def test_boot_raises_if_the_guest_ends_or_fails_or_is_late(
    frame: bytes | None, error: type[Exception]
) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        if frame is not None:
            theirs.sendall(frame)
            theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(error):
            Relay(ours, JOB).boot(timeout=0.01 if frame is None else 5)


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_frames_in_pieces_of_any_size_are_parsed(size: int) -> None:
    sent = [(frames.OUTPUT, b"\1" + bytes(300)), (frames.STDIN_REQUEST, b""), (frames.EXIT, b"\7")]
    wire = b"".join(frames.pack(kind, data) for kind, data in sent)
    reader = frames.FrameReader()
    pieces = [wire[i : i + size] for i in range(0, len(wire), size)]
    assert [frame for piece in pieces for frame in reader.feed(piece)] == sent


def test_a_job_is_the_same_after_encoding_and_decoding() -> None:
    sent = job.describe(["echo", "\udcff"], {"NAME": "\udcfe"}, closed=[0, 1, 2])
    assert marshal.loads(job.dump(sent)) == sent
    assert (sent["tty"], sent["merged"]) == ([], False)


def test_environment_in_the_lab_is_made_from_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    monkeypatch.setattr(os, "getgid", lambda: 100)
    own = {"PATH": "/bin", "DISPLAY": ":0", "MAKEFLAGS": "-j", "AIORDMA_LAB_SIW": "stale"}
    of_lab = {"AIORDMA_LAB_RXE": "10.7.1.1"}
    user = {"SUDO_UID": "1000", "SUDO_GID": "100"}
    assert job.environment(own, of_lab) == {"PATH": "/bin", "AIORDMA_LAB": "1", **user, **of_lab}


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
    assert main(["lab", "run", "--device", "both", "--cpus", "1", "--", "ls", "--", "-l"]) == 7
    argv, options = seen[0]
    assert argv == ["ls", "--", "-l"]
    assert (options.device, options.cpus, options.memory) == ("both", 1, "2G")
    assert main(["lab", "run", "fail"]) == 125
    errors = "aiordma lab: a sentence\naiordma lab: the log is in /a/log\n"
    assert capsys.readouterr().err == errors


@pytest.mark.parametrize("argv", [["--cpus", "0", "ls"], ["--device", "mlx5", "ls"], []])
def test_wrong_command_line_exits_with_2(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["lab", "run", *argv])
    assert (caught.value.code, "error:" in capsys.readouterr().err) == (2, True)
