"""A command in the lab: same directory, environment, streams and exit code as on the host."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from aiordma.lab import initramfs

from .conftest import LAB_RUN, environment, lab_run

# This script prints its process settings as JSON on standard output.
PRINT_SETTINGS = """
import json, os, resource, socket, sys, time
print(json.dumps({
    "cwd": os.getcwd(),
    "env": dict(os.environ),
    "argv": sys.argv[1:],
    "stdin": sys.stdin.buffer.read().hex(),
    "nofile": resource.getrlimit(resource.RLIMIT_NOFILE),
    "hostname": socket.gethostname(),
    "time": time.time(),
    "umask": os.umask(0),
    "tty": [os.isatty(fd) for fd in (0, 1, 2)],
}))
open("inside.txt", "w").write("written in the lab")
open(os.path.join(sys.argv[1], "outside.txt"), "w").write("discarded")
open("/etc/aiordma-lab-test", "w").write("discarded")
print("a line on stderr", file=sys.stderr)
sys.exit(7)
"""


def test_settings_are_passed_on_and_only_the_working_directory_changes(tmp_path: Path) -> None:
    here = tmp_path / "a directory, with a comma and 'quotes'"
    here.mkdir()
    beside = tmp_path / "beside"
    beside.mkdir()
    variable = "with\nlines and \u00fcml\u00e4uts"
    env = environment(A_VARIABLE=variable, DISPLAY=":0", TMPDIR=str(beside))
    argv = [str(beside), "", "two words", "$HOME", "--", "'"]

    done = lab_run(
        *(sys.executable, "-c", PRINT_SETTINGS, *argv), cwd=here, stdin=bytes(range(256)), env=env
    )

    assert done.stderr == b"a line on stderr\n"
    assert done.returncode == 7
    seen = json.loads(done.stdout)
    assert seen["cwd"] == str(here)
    assert seen["argv"] == argv
    assert seen["stdin"] == bytes(range(256)).hex()
    assert seen["hostname"] == os.uname().nodename
    assert seen["tty"] == [False, False, False]
    assert seen["env"]["A_VARIABLE"] == env["A_VARIABLE"]
    assert seen["env"]["PATH"] == env["PATH"]
    assert "DISPLAY" not in seen["env"]
    assert seen["env"]["AIORDMA_LAB"] == "1"
    assert seen["env"]["AIORDMA_LAB_RXE"] == "10.7.1.1"
    assert "AIORDMA_LAB_SIW" not in seen["env"]
    assert (here / "inside.txt").read_text() == "written in the lab"
    assert [path.name for path in here.iterdir()] == ["inside.txt"]
    assert list(beside.iterdir()) == []  # no temporary file is left either
    assert not Path("/etc/aiordma-lab-test").exists()


def test_output_and_errors_are_complete_and_separate(tmp_path: Path) -> None:
    # 5 MB with every byte value on both streams at once, and a last line without a newline.
    script = """
import os, sys, threading
data = bytes(range(256)) * 20000
def write(fd, end):
    with os.fdopen(fd, "wb") as file:
        file.write(data + end)
threads = [threading.Thread(target=write, args=a) for a in ((1, b"out"), (2, b"err"))]
[t.start() for t in threads]; [t.join() for t in threads]
os.kill(os.getpid(), 15)
"""
    done = lab_run(sys.executable, "-c", script, cwd=tmp_path)
    data = bytes(range(256)) * 20000
    assert digest(done.stdout) == digest(data + b"out")
    assert digest(done.stderr) == digest(data + b"err")
    assert done.returncode == 128 + 15


def digest(data: bytes) -> tuple[int, str]:
    """Return length and hash of data, so that a failed assertion prints little."""
    return len(data), hashlib.sha256(data).hexdigest()


def test_large_input_and_one_file_for_both_outputs(tmp_path: Path) -> None:
    data = os.urandom(3_000_000)
    (tmp_path / "input").write_bytes(data)
    log = tmp_path / "log"
    log.write_text("before\n")
    script = "sha256sum; for i in 1 2 3; do echo out $i; echo err $i >&2; done; sleep 60 & exit 0"
    with (tmp_path / "input").open("rb") as stdin, log.open("ab") as output:
        code = subprocess.run(
            [*LAB_RUN, "--", "sh", "-c", script],
            stdin=stdin,
            stdout=output,
            stderr=output,
            cwd=tmp_path,
            env=environment(),
        ).returncode
    in_order = [f"{stream} {i}" for i in (1, 2, 3) for stream in ("out", "err")]
    expected = ["before", f"{hashlib.sha256(data).hexdigest()}  -", *in_order]
    assert log.read_text().splitlines() == expected
    assert code == 0


def test_closed_stdin_and_a_closed_output_pipe(tmp_path: Path) -> None:
    script = "test -e /proc/self/fd/0; echo stdin $? >seen; yes; echo yes $? >>seen"
    lab = " ".join([*LAB_RUN, "--", "bash", "-c", f"'{script}'"])
    piped = subprocess.run(
        ["bash", "-c", f"{lab} <&- | head -n 2"],
        capture_output=True,
        cwd=tmp_path,
        env=environment(),
    )
    assert piped.stdout == b"y\ny\n"
    assert (tmp_path / "seen").read_text() == "stdin 1\nyes 141\n"
    assert piped.stderr == b""


@pytest.mark.parametrize(
    ("command", "code", "reason"),
    [
        ("./no-such-command", 127, b"No such file or directory"),
        ("/etc/passwd", 126, b"Permission denied"),
    ],
)
def test_command_that_cannot_be_executed(
    tmp_path: Path, command: str, code: int, reason: bytes
) -> None:
    done = lab_run(command, cwd=tmp_path)
    assert done.returncode == code
    assert done.stderr == b"aiordma lab: " + command.encode() + b": " + reason + b"\n"
    assert done.stdout == b""


def test_busybox_cpio_unpacks_the_initramfs(tmp_path: Path) -> None:
    data = initramfs.archive({"bin/x": (0o755, b"abc"), "y": (0o644, b"")}, directories=("bin",))
    subprocess.run(["busybox", "cpio", "-i"], input=data, cwd=tmp_path, check=True)
    assert (tmp_path / "bin/x").read_bytes() == b"abc"
    assert (tmp_path / "bin/x").stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "y").read_bytes() == b""
