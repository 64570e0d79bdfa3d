"""`aiordma lab`: run a command in virtual machines with soft RDMA devices, and control them."""

import argparse
import sys
from collections.abc import Callable

from ..lab import is_inside
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
    _add_exec(actions)
    _add_controls(actions)
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
        "--nodes",
        type=_number_of_nodes,
        metavar="N",
        help="number of machines (default: 1). The devices of several are connected by a wire, and "
        "the command runs on node1",
    )
    run.add_argument(
        "--cpus",
        type=_positive,
        metavar="N",
        help="number of processors of a machine (default: as this machine, at most 4)",
    )
    run.add_argument(
        "--memory",
        metavar="M",
        help="size of a machine's memory, for example 512M or 4G (default: 2G)",
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
        "--awake",
        action="store_true",
        help="never halt the processors of the machines, for measurements: one that was halted is "
        "slower for a while",
    )
    run.add_argument(
        "command", nargs="+", metavar="COMMAND", help="the command and its arguments, after `--`"
    )
    run.set_defaults(handler=_run)


def _add_exec(actions: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = actions.add_parser(
        "exec", help="run a command on a node of a running lab", epilog=_EPILOG
    )
    _add_lab(parser)
    parser.add_argument("node", metavar="NODE", help="a name that `aiordma lab nodes` prints")
    parser.add_argument(
        "command", nargs="+", metavar="COMMAND", help="the command and its arguments, after `--`"
    )
    parser.set_defaults(handler=_exec)


def _add_lab(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--lab", metavar="ID", help="the lab, if several run on this machine and this is not a node"
    )


def _add_controls(actions: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the parsers of the commands that change a running lab."""
    nodes = actions.add_parser("nodes", help="print the nodes of a running lab")
    _add_lab(nodes)
    nodes.set_defaults(handler=_nodes)
    power = _add_control(actions, "power", "cut the power of a node, or boot it again")
    power.add_argument("state", choices=("on", "off"))
    cable = _add_control(actions, "cable", "pull the cables of a node, or plug them in again")
    cable.add_argument("state", choices=("plug", "pull"))
    cable.add_argument("--device", choices=("rxe", "siw", "all"), default="all")
    block = _add_control(actions, "block", "drop all frames of a node to another, one way")
    block.add_argument("target", metavar="TARGET", help="the node that gets no frames any more")
    unblock = _add_control(actions, "unblock", "forward frames of a node to another again")
    unblock.add_argument("target", metavar="TARGET", help="the node that gets frames again")
    netem = _add_control(actions, "netem", "lose, delay or change packets that a node sends")
    netem.add_argument("--device", choices=("rxe", "siw", "all"), default="all")
    netem.add_argument(
        "words",
        nargs="*",
        metavar="WORD",
        help="as in tc-netem(8), such as `loss 5%% delay 20ms`; without words: none of it any more",
    )
    clock = _add_control(actions, "clock", "let the clock of a node jump")
    clock.add_argument("seconds", type=float, help="seconds to jump forward; negative: back")


def _add_control(
    actions: "argparse._SubParsersAction[argparse.ArgumentParser]", name: str, text: str
) -> argparse.ArgumentParser:
    parser = actions.add_parser(name, help=text)
    _add_lab(parser)
    parser.add_argument("node", metavar="NODE", help="a name that `aiordma lab nodes` prints")
    parser.set_defaults(handler=_control, action=name)
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def _number_of_nodes(text: str) -> int:
    from ..lab.run import MAX_NODES

    if not 1 <= int(text) <= MAX_NODES:
        raise argparse.ArgumentTypeError(f"{text} is not between 1 and {MAX_NODES}")
    return int(text)


def _run(args: argparse.Namespace) -> int:
    from ..lab.run import Options, run

    chosen = {
        "device": args.device,
        "nodes": args.nodes,
        "cpus": args.cpus,
        "memory": args.memory,
        "boot_timeout": args.boot_timeout,
        "accelerator": args.accel,
        "awake": args.awake,
    }
    options = Options(**{name: value for name, value in chosen.items() if value is not None})
    return _reported(lambda: run(args.command, options))


def _exec(args: argparse.Namespace) -> int:
    from ..lab.control import execute

    return _reported(lambda: execute(args.node, args.command, args.lab))


def _nodes(args: argparse.Namespace) -> int:
    from ..lab.control import labs
    from ..lab.nodes import nodes

    def print_nodes() -> int:
        for lab in [args.lab] if args.lab or is_inside() else labs():
            for node in nodes(lab):
                print(*filter(None, (lab, node.name, node.state, *node.addresses.values())))
        return 0

    return _reported(print_nodes)


def _control(args: argparse.Namespace) -> int:
    from ..lab.nodes import Node

    node = Node(args.node, lab=args.lab)

    def perform() -> int:
        if args.action == "power":
            node.power_on() if args.state == "on" else node.power_off()
        elif args.action == "cable":
            change = node.plug_cable if args.state == "plug" else node.pull_cable
            change(args.device)
        elif args.action == "block":
            node.block(args.target)
        elif args.action == "unblock":
            node.unblock(args.target)
        elif args.action == "netem":
            node.netem(*args.words, device=args.device)
        else:
            node.jump_clock(args.seconds)
        return 0

    return _reported(perform)


def _setup(args: argparse.Namespace) -> int:
    from ..lab.devices import DEVICES
    from ..lab.setup import setup

    def prepare() -> int:
        setup(tuple(device.driver for device in DEVICES[args.device]))
        return 0

    return _reported(prepare)


def _reported(call: Callable[[], int]) -> int:
    """Call and return the exit code. Print an error of the lab."""
    try:
        return call()
    except LabError as error:
        return _report(error)
    except KeyboardInterrupt:  # before the command was started
        return 130


def _report(error: LabError) -> int:
    print(f"aiordma lab: {error}", file=sys.stderr)
    if error.log is not None:
        print(f"aiordma lab: the log is in {error.log}", file=sys.stderr)
    return FAILED
