"""Run a command in the lab: start the virtual machine, relay, end the virtual machine."""

import contextlib
import functools
import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from . import initramfs, is_inside, job, kernel, kvm, packages, qemu
from .devices import DEVICES, Device, addresses
from .errors import LabError
from .files import MemoryFile
from .relay import ClockTooFast, GuestEnded, GuestFailed, Interrupted, Relay
from .steps import show

__all__ = ["Options", "choose_kernel", "run"]

_PR_SET_PDEATHSIG = 1
_BOOTS = 5
"""The number of boots until the guest's clock must be right."""


@dataclass(frozen=True)
class Options:
    """The user's choices.

    `boot_timeout` (in seconds) and `accelerator` are chosen by the lab if they are None.
    """

    device: str = "rxe"
    cpus: int = field(default_factory=lambda: min(os.cpu_count() or 1, 4))
    memory: str = "2G"
    boot_timeout: float | None = None
    accelerator: str | None = None

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices that the guest creates."""
        return DEVICES[self.device]


def run(argv: Sequence[str], options: Options) -> int:
    """Run `argv` in the lab. Return its exit code.

    Raises: LabError if the lab itself fails.
    """
    if is_inside():
        raise LabError(
            "this process runs in the lab already: run the command without `aiordma lab run`"
        )
    qemu.check_machine()
    closed = _open_closed_streams()
    program = qemu.find()
    the_kernel, devices = choose_kernel(options.devices)
    env = job.environment(os.environ, addresses(devices))
    the_job = job.describe(list(argv), env, closed)
    accelerator = options.accelerator or kvm.choose(program, the_kernel)
    image = initramfs.build(the_kernel, devices, the_job["cwd"], packages.busybox())
    timeout = options.boot_timeout or kvm.BOOT_TIMEOUT[accelerator]
    boots = 0
    while True:
        boots += 1
        with (
            MemoryFile("initramfs", image) as initrd,
            MemoryFile("console") as console,
            MemoryFile("qemu") as errors,
        ):
            machine = qemu.Machine(
                kernel=the_kernel.image,
                initramfs=initrd.path,
                console=console.path,
                accelerator=accelerator,
                cpus=options.cpus,
                memory=options.memory,
                cwd=the_job["cwd"],
            )
            ours, theirs = socket.socketpair()
            with ours:
                start = functools.partial(
                    _process, machine, program, theirs, errors, [initrd.fd, console.fd]
                )
                outcome = _supervise(start, Relay(ours, the_job), timeout)
            if isinstance(outcome, int):
                return outcome
            if not isinstance(outcome, ClockTooFast) or boots == _BOOTS:
                raise _failure(outcome, timeout, errors.text(), console.text())


def choose_kernel(wanted: tuple[Device, ...]) -> tuple[kernel.Kernel, tuple[Device, ...]]:
    """Return a kernel and the devices to create. If siw could not be built, "both" means rxe.

    Raises: LabError if no kernel has the driver.
    """
    try:
        return kernel.find([device.driver for device in wanted]), wanted
    except LabError:
        if len(wanted) == 1:
            raise
        found = kernel.find(["rxe"])
    show("lab: with rxe alone: siw could not be built for this kernel\n")
    return found, DEVICES["rxe"]


def _supervise(
    start: Callable[[], AbstractContextManager[None]], relay: Relay, timeout: float
) -> int | Exception:
    """Run the virtual machine. Return the command's exit code, or the error that ended the run."""
    with relay.signals():
        try:
            with start():
                relay.boot(timeout)
                return relay.run()
        except Interrupted as end:
            return end.code
        except (TimeoutError, ClockTooFast, GuestFailed, GuestEnded) as error:
            return error


@contextlib.contextmanager
def _process(
    machine: qemu.Machine,
    program: str,
    channel: socket.socket,
    errors: MemoryFile,
    files: Sequence[int],
) -> Iterator[None]:
    """Run QEMU during the block, then kill it: it holds no data that would be lost."""
    with channel:
        process = subprocess.Popen(
            machine.argv_with_channel(program, channel.fileno()),
            stdin=subprocess.DEVNULL,
            stdout=errors.fd,
            stderr=errors.fd,
            pass_fds=[channel.fileno(), *files],
            start_new_session=True,  # a terminal sends Ctrl-C to this process only
            preexec_fn=_kill_with_parent(),
        )
    try:
        yield
    finally:
        process.kill()
        process.wait()


def _kill_with_parent() -> Callable[[], object]:
    """Return a function that makes the kernel kill a child when its parent ends, even by SIGKILL.

    ctypes is imported here, after the closed streams are known: libffi can open a file, which would
    become a standard stream that is closed.
    """
    import ctypes

    return functools.partial(ctypes.CDLL(None).prctl, _PR_SET_PDEATHSIG, signal.SIGKILL)


def _open_closed_streams() -> list[int]:
    """Open /dev/null for closed standard streams. Return the streams that were closed.

    Otherwise a file that the lab opens could become a standard stream.
    """
    closed = job.closed_streams()
    for fd in closed:
        null = os.open(os.devnull, os.O_RDWR)
        if null != fd:
            os.dup2(null, fd)
            os.close(null)
    return closed


def _failure(error: Exception, timeout: float, qemu_output: str, console: str) -> LabError:
    """Return the error for a run without an exit code. Writes a log."""
    if isinstance(error, TimeoutError):
        sentence = f"the virtual machine did not boot within {timeout:g} s"
    elif isinstance(error, ClockTooFast):
        sentence = f"the virtual machine's clock was wrong at {_BOOTS} boots: is this machine busy?"
    elif isinstance(error, GuestFailed):
        sentence = str(error)
    else:
        sentence = f"the virtual machine ended{_reason(qemu_output, console)}"
    fd, name = tempfile.mkstemp(prefix="aiordma-lab-", suffix=".log")
    with open(fd, "w") as file:
        file.write(qemu_output + console)
    return LabError(sentence, log=name)


def _reason(qemu_output: str, console: str) -> str:
    for line in console.splitlines():
        if "Kernel panic" in line:
            return f": {line.split('] ')[-1]}"
    complaints = (line for line in qemu_output.splitlines() if line.startswith("qemu"))
    return f" unexpectedly: {next(complaints, 'QEMU printed no error')}"
