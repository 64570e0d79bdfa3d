"""The frames and the job that host and guest exchange."""

import marshal
import os

import pytest

from aiordma.lab import frames, job


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
    assert sent["tty"] == []
    assert not sent["merged"]


def test_environment_in_the_lab_is_made_from_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
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
