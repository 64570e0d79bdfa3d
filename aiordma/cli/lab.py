"""`aiordma lab`: a machine with a soft RDMA device, to run a command in."""

import argparse
import sys

from ..lab.errors import LabError

FAILED = 125  # as with env, timeout and docker: the tool failed, not the command

_DESCRIPTION = """\
Run a command in a virtual machine that has a soft RDMA device, over this machine's own file system.
"""
_EPILOG = """\
The exit code is the command's. 125: the lab itself failed (one sentence on standard error says
why); 126: the command cannot be executed; 127: there is no such command.
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare `lab run` and `lab setup`."""
    lab = subparsers.add_parser("lab", help=_DESCRIPTION.strip(), description=_DESCRIPTION)
    actions = lab.add_subparsers(metavar="ACTION", required=True)
    _add_run(actions)
    setup = actions.add_parser("setup", help="install what the lab needs, or name what is missing")
    setup.set_defaults(handler=_setup)


def _add_run(actions: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    run = actions.add_parser("run", help="run a command in the lab", epilog=_EPILOG)
    run.add_argument("--device", choices=("rxe", "siw", "both"), default="rxe")
    run.add_argument(
        "--cpus", type=_positive, metavar="N", help="default: this machine's, at most 4"
    )
    run.add_argument("--memory", metavar="M", help="for example 512M or 4G (default: 2G)")
    run.add_argument(
        "--boot-timeout",
        type=float,
        metavar="SECONDS",
        help="how long to wait for the command to start (default: 60 with KVM, 120 without)",
    )
    run.add_argument(
        "--accel",
        choices=("kvm", "tcg"),
        help="the processor: this machine's own, or emulated (default: KVM where it works)",
    )
    run.add_argument("command", nargs="+", metavar="COMMAND", help="what to run, after `--`")
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
    except KeyboardInterrupt:  # before the machine was there to take it
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
