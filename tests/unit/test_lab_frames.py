"""The bytes between the lab and its guest."""

import marshal
import os

import pytest

from aiordma.lab import frames, job


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_frames_survive_any_cutting(size: int) -> None:
    sent = [(frames.OUTPUT, b"\1" + bytes(300)), (frames.WANT, b""), (frames.EXIT, b"\7")]
    wire = b"".join(frames.pack(kind, data) for kind, data in sent)
    reader = frames.FrameReader()
    pieces = [wire[i : i + size] for i in range(0, len(wire), size)]
    assert [frame for piece in pieces for frame in reader.feed(piece)] == sent


def test_a_job_survives_the_wire() -> None:
    sent = job.describe(["echo", "\udcff"], {"NAME": "\udcfe"}, closed=[0, 1, 2])
    assert marshal.loads(job.dump(sent)) == sent
    assert sent["tty"] == []
    assert not sent["merged"]


def test_the_environment_is_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    monkeypatch.setattr(os, "getgid", lambda: 100)
    own = {"PATH": "/bin", "DISPLAY": ":0", "MAKEFLAGS": "-j", "AIORDMA_LAB_SIW": "stale"}
    addresses = {"AIORDMA_LAB_RXE": "10.7.1.1"}
    assert job.environment(own, addresses) == {
        "PATH": "/bin",
        "SUDO_UID": "1000",
        "SUDO_GID": "100",
        "AIORDMA_LAB": "1",
        "AIORDMA_LAB_RXE": "10.7.1.1",
    }
