"""Arguments with which the examples fail. Each prints its error, and leaves no file."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("name", "arguments", "error"),
    [
        ("rping", "-c -a 10.7.1.1 -S 25", "25 is not between 26 and 65535"),
        ("rping", "-s -S 65536", "65536 is not between 26 and 65535"),
        ("rping", "-s -S many", "invalid ping_size value: 'many'"),
        ("rping", "-c -a 10.7.1.1 -C-1", "-1 is negative"),
        ("rping", "-s -c", "not allowed with"),
        ("rping", "-c", "the server's address: -a ADDRESS"),
        ("rping", "-s -p 65536", "rping: port 65536 is not between 0 and 65535"),
        ("rping", "-s -a 127.0.0.1", "RDMA has no loopback"),
        ("rping", "-c -a no.such.name.invalid", "no.such.name.invalid"),
        ("kv_cache", "serve --slots 0", "a table cannot have 0 slots"),
        ("kv_cache", "serve --slots 8388608", "a table cannot have 8388608 slots"),
        ("kv_cache", "serve --port 65536", "port 65536 is not between 0 and 65535"),
        ("kv_cache", "get no.such.name.invalid 1 key", "no.such.name.invalid"),
        ("kv_cache", "get 10.7.1.1 1", "required: key"),
        ("file_transfer", "serve no-such-file", "No such file or directory: 'no-such-file'"),
        ("file_transfer", "serve .", "Is a directory"),
        ("file_transfer", f"serve {__file__} --port 65536", "65536 is not between 0 and 65535"),
        ("file_transfer", "fetch 10.7.1.1 1 no-such-directory/target", "No such file or directory"),
        ("file_transfer", "fetch no.such.name.invalid 1 target", "no.such.name.invalid"),
        ("tensor_server", "serve no-such-file", "No such file or directory: 'no-such-file'"),
        ("tensor_server", "serve .", "Is a directory"),
        ("tensor_server", f"serve {__file__}", "the magic string is not correct"),
        ("tensor_server", "serve --megabytes 0", "array0 is empty"),
        ("tensor_server", "serve --megabytes -1", "negative dimensions"),
        ("tensor_server", "serve --megabytes 1 --port 65536", "65536 is not between 0 and 65535"),
        ("tensor_server", "fetch 10.7.1.1 1", "required: NAME"),
        ("tensor_server", "fetch 10.7.1.1 1 a b --output target", "takes a single array"),
        ("tensor_server", "fetch no.such.name.invalid 1 array", "no.such.name.invalid"),
        ("tensor_server", "list no.such.name.invalid 1", "no.such.name.invalid"),
    ],
)
def test_an_example_with_wrong_arguments_fails(
    name: str,
    arguments: str,
    error: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments.split()])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"examples.{name}").main()
    if ended.value.code == 2:
        assert error in capsys.readouterr().err
    else:
        assert str(ended.value.code).startswith(f"{name}: ")
        assert error in str(ended.value.code)
    assert list(tmp_path.iterdir()) == []
