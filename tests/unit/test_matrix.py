"""The tools of `make matrix`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.matrix import debian, system
from benchmarks.matrix.log import Done, checked, logged
from benchmarks.matrix.table import Row, print_table


@pytest.mark.parametrize("compiler", ["gcc", "cc", None])
def test_a_script_ends_if_there_is_a_compiler(tmp_path: Path, compiler: str | None) -> None:
    if compiler is not None:
        (tmp_path / compiler).write_text("")
        (tmp_path / compiler).chmod(0o755)
    command = ["/bin/sh", "-ec", f"{debian.NO_COMPILER}echo none"]
    done = subprocess.run(command, env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    expected = (0, "none\n") if compiler is None else (1, f"{tmp_path / compiler}\n")
    assert (done.returncode, done.stdout) == expected


def test_output_is_in_the_log_while_the_command_runs(tmp_path: Path) -> None:
    log = tmp_path / "log"
    logged(["echo", "earlier"], log)
    script = f"echo early; cp {log} {log}2; cat {log}2; echo wrong >&2; exit 3"
    done = logged(["sh", "-c", script], log, title="test")
    assert done == Done(3, "early\n$ echo earlier\nearlier\n$ test\nearly\nwrong\n")
    with pytest.raises(RuntimeError, match=r"^exit 3: wrong$"):
        checked(done)


def test_a_test_that_raises_fails_its_row_only(capsys: pytest.CaptureFixture[str]) -> None:
    def raises(row: Row) -> None:
        subprocess.run([sys.executable, "-c", "exit(7)"], check=True)

    broken, fine = Row("Debian 1"), Row("Debian 2", {"Python": "3.11.2"})
    broken.attempt(raises)
    for test, done in (
        ("wheel", Done(0, "right")),
        ("demo", Done(1, "right")),
        ("test", Done(0, "")),
    ):
        broken.timed(test, lambda done=done: done, "right")  # type: ignore[misc]
    fine.attempt(lambda row: row.timed("test", lambda: Done(0, "right"), "right", "unit tests "))
    assert (broken.has_failed, fine.has_failed) == (True, False)
    capsys.readouterr()
    print_table([broken, fine])
    _, first, second, note = capsys.readouterr().out.splitlines()
    parts = re.split(" {2,}", first)
    assert parts[:2] == ["Debian 1", "passed, 0.0 min"]
    assert parts[2:] == ["failed (exit 1), 0.0 min", "failed (exit 0), 0.0 min"]
    assert re.split(" {2,}", second) == ["Debian 2", "3.11.2", "unit tests passed, 0.0 min"]
    assert note.startswith("Debian 1: CalledProcessError: Command ")
    assert note.endswith("returned non-zero exit status 7.")


def test_variables_of_proxies_and_of_pip_are_passed_on() -> None:
    kept = {
        "http_proxy": "http://proxy:1",
        "HTTPS_PROXY": "http://proxy:1",
        "no_proxy": "localhost",
        "PIP_INDEX_URL": "https://mirror/simple",
        "PIP_DEFAULT_TIMEOUT": "180",
    }
    files = {"PIP_FIND_LINKS": "/wheels", "PIP_EXTRA_INDEX_URL": "file:///index", "PIP_LOG": "~/a"}
    others = {"HOME": "/home/a", "PYTHONPATH": "/a"}
    assert system.passed_on({**kept, **files, **others}) == kept
    assert system.passed_on({"PIP_CERT": "/etc/a.crt"}) == {"PIP_CERT": system.CA_FILE}


def test_an_old_base_is_made_anew(tmp_path: Path) -> None:
    assert not system.is_current(tmp_path / "missing")
    assert system.is_current(tmp_path)
    yesterday = tmp_path.stat().st_mtime - system.MAX_AGE
    os.utime(tmp_path, (yesterday, yesterday))
    assert not system.is_current(tmp_path)
