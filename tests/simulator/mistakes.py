"""Put known mistakes into a copy of aiordma, and count how many of them the campaign finds.

    python -m simulator.mistakes [SEEDS]

The mistakes are those that the project has had, or that a reviewer fears. Each is one replacement
in one file. For each, the campaign runs SEEDS seeds (default 300), and stops at the first failure.
"""

# ruff: noqa: E501  the lines of the library are quoted

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
SEEDS = 300


class Mistake(NamedTuple):
    """A mistake: in `file`, `right` is replaced by `wrong`."""

    title: str
    file: str
    right: str
    wrong: str


MISTAKES = [
    Mistake(
        "a completion event is lost: the queue is not polled after it was armed",
        "aiordma/_native/fast_path/completion_events.c",
        "\tqueue->is_armed = 1;\n\treturn take_and_wake(self, queue, 1) < 0 ? -1 : 0;\n",
        "\tqueue->is_armed = 1;\n\treturn 0;\n",
    ),
    Mistake(
        "memory is released when its request was posted, not when it has completed",
        "aiordma/_native/fast_path/send_message.c",
        "\tadd_in_flight(core, (PyObject *)buffer);\n",
        "\tadd_in_flight(core, Py_NewRef((PyObject *)buffer));\n\trelease_buffer(buffer);\n",
    ),
    Mistake(
        "a credit is counted twice",
        "aiordma/_native/fast_path/requests_in_flight.c",
        "\t\tcore->credits += count;\n",
        "\t\tcore->credits += count + (count > 1);\n",
    ),
    Mistake(
        "a wake-up is lost: a task that was granted a credit and cancelled keeps it",
        "aiordma/loop/waiting.py",
        "            elif future in self._granted:\n                self.release()\n",
        "",
    ),
    Mistake(
        "a queue pair is destroyed after the memory of its requests was released",
        "aiordma/cm/handle.py",
        "        calls.destroy()\n",
        "        for callback, _ in self._destroyed_callbacks:\n            callback()\n"
        "        calls.destroy()\n",
    ),
    Mistake(
        "a cancelled operation releases its memory at once",
        "aiordma/qp/operation.py",
        "            self.abandoned(operation)\n",
        "            if isinstance(operation, Operation):\n"
        "                operation.release()\n"
        "            self.abandoned(operation)\n",
    ),
    Mistake(
        "a task that has waited for a transfer in C does not look if it has failed",
        "aiordma/_native/fast_path/attempt.c",
        "\tif (transfer->succeeded)\n",
        "\tif (1)\n",
    ),
    Mistake(
        "a received message is overwritten: its slot is posted again before it is copied",
        "aiordma/_native/fast_path/receive_queue.c",
        "\tself->count++;\n",
        "\tself->count++;\n\trepost_slot(self, arrived->slot);\n",
    ),
    Mistake(
        "an event is not acknowledged",
        "aiordma/_native/cm_events.c",
        "\t\trdma_ack_cm_event(event);\n\t}\n\treturn count;\n",
        "\t\tif (event->event != RDMA_CM_EVENT_DISCONNECTED)\n"
        "\t\t\trdma_ack_cm_event(event);\n\t}\n\treturn count;\n",
    ),
    Mistake(
        "the end of a connection does not wake the tasks that wait for a credit",
        "aiordma/qp/send_queue.py",
        "        self._credits.release(NUMBER_MASK)\n\n\ndef write_nothing",
        "        return\n\n\ndef write_nothing",
    ),
    Mistake(
        "no request of a burst is signaled, so a full queue waits for ever",
        "aiordma/_native/fast_path/send_queue_core.h",
        "\t*is_signaled = needs_completion || core->unsignaled + 1 >= core->signal_interval;\n",
        "\t*is_signaled = needs_completion;\n",
    ),
    Mistake(
        "a stream does not announce a buffer that was read",
        "aiordma/_native/fast_path/stream_inbound.c",
        "\treturn self->unannounced >= self->half || self->messages_received >= self->next_update;\n",
        "\treturn self->messages_received >= self->next_update;\n",
    ),
    Mistake(
        "an accepted connection ends if the peer's confirmation comes after its disconnect",
        "aiordma/cm/states.py",
        "    _S.ACCEPTING: {\n        _E.ESTABLISHED: _S.CONNECTED,\n        _E.REJECTED: _S.FAILED,\n",
        "    _S.ACCEPTING: {\n        _E.ESTABLISHED: _S.FAILED,\n        _E.REJECTED: _S.FAILED,\n",
    ),
    Mistake(
        "a cancelled connect() leaves its id behind",
        "aiordma/cm/base_id.py",
        "    if not isinstance(error, Exception):\n        cm.abort()\n",
        "    if not isinstance(error, Exception):\n",
    ),
    Mistake(
        "an abort does not wake the tasks that wait for a stream",
        "aiordma/qp/endpoint.py",
        "        self.data_path.wake()  # no completion will wake the waiting tasks\n",
        "",
    ),
    Mistake(
        "a queue pair's completions are dropped before it is destroyed",
        "aiordma/qp/endpoint.py",
        "        self.data_path.wake()  # no completion will wake the waiting tasks\n",
        "        self.data_path.wake()\n        self.data_path.release()\n",
    ),
    Mistake(
        "a message stream does not return a credit",
        "aiordma/_native/fast_path/eager_path.c",
        "\tfree_granted(credits);\n",
        "\tcredits->granted--;\n",
    ),
    Mistake(
        "the memory of a large message is released before the peer has read it",
        "aiordma/message_streams/outbox.py",
        "        if not isinstance(outgoing, AnnouncedOutgoing):\n            self._finish(outgoing)\n",
        "        self._finish(outgoing)\n",
    ),
    Mistake(
        "a small message overtakes one that waits",
        "aiordma/message_streams/exchange.py",
        "is_open and not eager.has_queued and not self.protocol.has_finished\n",
        "is_open and not self.protocol.has_finished\n",
    ),
    Mistake(
        "a message is read twice: the peer was told before that it is read",
        "aiordma/message_streams/message_receiver.py",
        "                self._unfinished = arrival.number\n            raise\n",
        "                self._unfinished = arrival.number\n            raise\n"
        "        self._landings.pop(arrival.number)\n",
    ),
]


def copy_with(mistake: Mistake, folder: Path) -> None:
    """Copy the library and the simulator into `folder`, make the mistake, and build if needed."""
    for name in ("aiordma", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / name)
    shutil.copytree(ROOT / "build" / "simulator", folder / "build" / "simulator")
    path = folder / mistake.file
    text = path.read_text()
    if text.count(mistake.right) != 1:
        raise SystemExit(f"{mistake.file} has changed: adapt the mistake {mistake.title!r}")
    path.write_text(text.replace(mistake.right, mistake.wrong))
    if path.suffix == ".c":
        command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace", "--force"]
        subprocess.run(command, cwd=folder, check=True, capture_output=True)


def find(mistake: Mistake, seeds: int) -> str | None:
    """Return the first failing seed, and what has failed. None: no seed has failed."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        copy_with(mistake, folder)
        path = os.pathsep.join([str(folder / "tests"), str(folder)])
        done = subprocess.run(
            [sys.executable, "-m", "simulator.campaign", "0", str(seeds), "--stop"],
            env={**os.environ, "PYTHONPATH": path},
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
    if not done.returncode:
        return None
    failure = re.search(r"^(.*)\n(seed \d+) has failed", done.stdout, re.M)
    return f"{failure[2]}: {failure[1][:150]}" if failure else done.stdout + done.stderr


def main() -> None:
    seeds = int(sys.argv[1]) if len(sys.argv) > 1 else SEEDS
    found = 0
    for mistake in MISTAKES:
        result = find(mistake, seeds)
        found += result is not None
        print(f"{'found' if result else 'MISSED'}: {mistake.title}: {result}", flush=True)
    print(f"{found} of {len(MISTAKES)} mistakes found within {seeds} seeds")


if __name__ == "__main__":
    main()
