"""`aiordma lab run`: its command line, QEMU's command line, the device script and the relay."""

import socket
from pathlib import Path

import pytest

from aiordma.cli import main
from aiordma.lab import is_inside, kvm, qemu
from aiordma.lab.devices import DEVICES, addresses, setup_script
from aiordma.lab.errors import LabError
from aiordma.lab.job import describe
from aiordma.lab.relay import GuestEnded, GuestFailed, Relay
from aiordma.lab.run import Options, run


def test_is_inside_reads_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIORDMA_LAB", "1")
    assert is_inside()
    monkeypatch.delenv("AIORDMA_LAB")
    assert not is_inside()


def test_run_inside_the_lab_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIORDMA_LAB", "1")
    with pytest.raises(LabError, match=r"^this process runs in the lab already"):
        run(["true"], Options())


def test_devices_have_variables_and_setup_lines() -> None:
    assert addresses(DEVICES["siw"]) == {
        "AIORDMA_LAB_SIW": "10.7.2.1",
        "AIORDMA_LAB_SIW6": "fd07:2::1",
    }
    script = setup_script(DEVICES["both"])
    assert "rdma link add rxe0 type rxe netdev rxe-veth" in script
    assert "rdma link add siw0 type siw netdev siw-veth" in script


def test_qemu_command_line_escapes_commas() -> None:
    machine = qemu.Machine(Path("/k"), "/i", "/c,d", "tcg", cpus=2, memory="1G", cwd="/a,b")
    line = " ".join(machine.argv_with_channel("/qemu", 7))
    assert "path=/a,,b,security_model=none" in line
    assert "id=root,path=/,security_model=none,multidevs=remap,readonly=on" in line
    assert "file:/c,,d" in line
    assert "fd=7" in line


def test_kvm_is_probed_once_for_each_boot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    probes: list[object] = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("os.access", lambda path, mode: True)
    monkeypatch.setattr(kvm, "_probe", lambda *args: probes.append(args))
    assert [kvm.works("qemu", None) for _ in range(3)] == [False] * 3  # type: ignore[arg-type]
    assert len(probes) == 1


@pytest.mark.parametrize("frame", [b"", b"\x15\0\0\0\x02no"])
def test_boot_raises_if_the_guest_ends_or_fails(frame: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        relay = Relay(ours, describe(["true"], {}, closed=[]))
        theirs.sendall(frame)
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(GuestFailed if frame else GuestEnded):
            relay.boot(timeout=5)


def test_boot_raises_after_the_timeout() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(TimeoutError):
        Relay(ours, describe(["true"], {}, closed=[])).boot(timeout=0.01)


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
    code = main(["lab", "run", "--device", "both", "--cpus", "1", "--", "ls", "--", "-l"])
    assert code == 7
    argv, options = seen[0]
    assert argv == ["ls", "--", "-l"]
    assert (options.device, options.cpus, options.memory) == ("both", 1, "2G")
    assert main(["lab", "run", "fail"]) == 125
    assert capsys.readouterr().err == (
        "aiordma lab: a sentence\naiordma lab: the log is in /a/log\n"
    )


@pytest.mark.parametrize("argv", [["--cpus", "0", "ls"], ["--device", "mlx5", "ls"], []])
def test_wrong_command_line_exits_with_2(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["lab", "run", *argv])
    assert caught.value.code == 2
    assert "error:" in capsys.readouterr().err
