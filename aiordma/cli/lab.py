"""`aiordma lab`: run a command in a virtual machine that has a soft RDMA device."""

import argparse
import sys

from ..lab.errors import LabError

FAILED = 125  # as for env(1) and timeout(1): the lab failed, not the command

_DESCRIPTION = """\
Run a command in a virtual machine that has a soft RDMA device and this machine's file system.
"""
_EPILOG = """\
The exit code is that of the command. 125: the lab itself failed, and a sentence on standard error
gives the reason. 126: the command cannot be executed. 127: the command does not exist.
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare `lab run` and `lab setup`."""
    lab = subparsers.add_parser("lab", help=_DESCRIPTION.strip(), description=_DESCRIPTION)
    actions = lab.add_subparsers(metavar="ACTION", required=True)
    _add_run(actions)
    setup = actions.add_parser(
        "setup", help="install the software that the lab needs, or list what is missing"
    )
    setup.set_defaults(handler=_setup)


def _add_run(actions: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    run = actions.add_parser("run", help="run a command in the lab", epilog=_EPILOG)
    run.add_argument("--device", choices=("rxe", "siw", "both"), default="rxe")
    run.add_argument(
        "--cpus",
        type=_positive,
        metavar="N",
        help="default: as many as this machine has, at most 4",
    )
    run.add_argument("--memory", metavar="M", help="for example 512M or 4G (default: 2G)")
    run.add_argument(
        "--boot-timeout",
        type=float,
        metavar="SECONDS",
        help="limit for starting the command (default: 60 with KVM, 120 without)",
    )
    run.add_argument(
        "--accel",
        choices=("kvm", "tcg"),
        help="use the processor of this machine, or emulate one (default: kvm if it works)",
    )
    run.add_argument("command", nargs="+", metavar="COMMAND", help="the command to run, after `--`")
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
    except KeyboardInterrupt:  # before the lab could pass Ctrl-C on to the command
        return 130


def _setup(args: argparse.Namespace) -> int:
    from ..lab.setup import setup

    try:
        setup()
    except LabError as error:
        return _report(error)
    except KeyboardInterrupt:
        return 130
    return 0


def _report(error: LabError) -> int:
    print(f"aiordma lab: {error}", file=sys.stderr)
    if error.log is not None:
        print(f"aiordma lab: the whole log is in {error.log}", file=sys.stderr)
    return FAILED
