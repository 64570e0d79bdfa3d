"""The tools of `make matrix`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.matrix import debian, free_threaded, interpreters, system
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


def make_python(path: Path, status: int) -> Path:
    """Make an interpreter that can do nothing but answer if C modules can be built for it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\nexit {status}\n")
    path.chmod(0o755)
    return path


def test_interpreters_are_those_of_path_and_of_pyenv(tmp_path: Path) -> None:
    """pyenv puts a command into PATH that fails for versions that are not chosen."""
    environ = {"PATH": str(tmp_path / "bin"), "PYENV_ROOT": str(tmp_path / "pyenv")}
    versions = tmp_path / "pyenv/versions"
    make_python(tmp_path / "bin/python3.12", 127)
    usual = make_python(tmp_path / "bin/python3.11", 0)
    for release in ("3.12.9", "3.12.10", "3.11.7"):
        make_python(versions / release / f"bin/python{release[:4]}", 0)
    newest = versions / "3.12.10/bin/python3.12"
    make_python(versions / "3.12.11/bin/python3.12", 1)
    assert interpreters.find("3.11", environ) == usual
    assert interpreters.find("3.12", environ) == newest
    assert interpreters.find("3.13", environ) is None


OURS = "aiordma does not support the free-threaded build of CPython: use the usual build"
CFFI = "CFFI does not support the free-threaded build of CPython 3.13. Upgrade to 3.14 or newer."
PIP = "aiordma-0.1.0-cp311-abi3-linux_x86_64.whl is not a supported wheel on this platform."


@pytest.mark.parametrize(
    ("done", "result", "notes"),
    [
        (Done(0, ""), "import works", []),
        (Done(0, OURS), "import works", []),
        (Done(1, f'    "{OURS}"\nImportError: {OURS}\n'), "import refused by aiordma", [OURS]),
        (Done(1, f"  RuntimeError: {CFFI}\n{OURS}\n"), "import refused by cffi", [CFFI]),
        (Done(1, f"ERROR: {PIP}\n"), "import refused by pip", [PIP]),
        (Done(-11, "Segmentation fault"), "import failed (exit -11)", []),
    ],
)
def test_a_free_threaded_build_is_refused_with_a_sentence(
    done: Done, result: str, notes: list[str]
) -> None:
    row = Row("CPython 3.13t")
    free_threaded.store(row, "test", done, "import ")
    assert row.results == {"test": result}
    assert row.has_failed == ("failed" in result)
    assert row.notes == [f"{result}: {note}" for note in notes]
