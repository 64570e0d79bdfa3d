"""`aiordma lab`: run a command in a virtual machine with a soft RDMA device."""

import argparse
import sys

from ..lab.errors import LabError

FAILED = 125  # as with env, timeout and docker: the tool failed, not the command

_DESCRIPTION = """\
Run a command in a virtual machine that has a soft RDMA device and the files of this machine.
"""
_EPILOG = """\
The exit code is the command's. 125: the lab itself failed, and standard error has the reason;
126: the command cannot be executed; 127: the command does not exist.
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the parsers of `lab run` and `lab setup`."""
    lab = subparsers.add_parser("lab", help=_DESCRIPTION.strip(), description=_DESCRIPTION)
    actions = lab.add_subparsers(metavar="ACTION", required=True)
    _add_run(actions)
    setup = actions.add_parser(
        "setup", help="install the programs and the kernel that the lab needs"
    )
    _add_device(setup, "both", "siw is built, which needs a compiler")
    setup.set_defaults(handler=_setup)


def _add_device(parser: argparse.ArgumentParser, default: str, remark: str = "") -> None:
    parser.add_argument(
        "--device",
        choices=("rxe", "siw", "both"),
        default=default,
        help=f"rxe: soft RoCE; siw: soft iWARP{remark and f'; {remark}'} (default: {default})",
    )


def _add_run(actions: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    run = actions.add_parser("run", help="run a command in the lab", epilog=_EPILOG)
    _add_device(run, "rxe")
    run.add_argument(
        "--cpus",
        type=_positive,
        metavar="N",
        help="number of processors (default: as this machine, at most 4)",
    )
    run.add_argument(
        "--memory", metavar="M", help="size of its memory, for example 512M or 4G (default: 2G)"
    )
    run.add_argument(
        "--boot-timeout",
        type=float,
        metavar="SECONDS",
        help="limit for booting and starting the command (default: 60 with KVM, 120 without)",
    )
    run.add_argument(
        "--accel",
        choices=("kvm", "tcg"),
        help="kvm: this machine's processor; tcg: an emulated one (default: KVM if it works)",
    )
    run.add_argument(
        "command", nargs="+", metavar="COMMAND", help="the command and its arguments, after `--`"
    )
    run.set_defaults(handler=_run)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def _run(args: argparse.Namespace) -> int:
    from ..lab.run import Options, run

    chosen = {
        "device": args.device,
        "cpus": args.cpus,
        "memory": args.memory,
        "boot_timeout": args.boot_timeout,
        "accelerator": args.accel,
    }
    options = Options(**{name: value for name, value in chosen.items() if value is not None})
    try:
        return run(args.command, options)
    except LabError as error:
        return _report(error)
    except KeyboardInterrupt:  # before the virtual machine was started
        return 130


def _setup(args: argparse.Namespace) -> int:
    from ..lab.devices import DEVICES
    from ..lab.setup import setup

    try:
        setup(tuple(device.driver for device in DEVICES[args.device]))
    except LabError as error:
        return _report(error)
    except KeyboardInterrupt:
        return 130
    return 0


def _report(error: LabError) -> int:
    print(f"aiordma lab: {error}", file=sys.stderr)
    if error.log is not None:
        print(f"aiordma lab: the log is in {error.log}", file=sys.stderr)
    return FAILED
