"""The command `aiordma`, with one module for each subcommand.

The module of a subcommand has `add_parser(subparsers)`, which declares its arguments and sets the
default `handler`: a function that takes the parsed arguments and returns the exit code. The command
imports these modules when it runs. They import the code of the subcommand inside the handler, so
that a subcommand does not import the code of the others.
"""

import argparse
import importlib
from collections.abc import Sequence
from typing import Protocol

from aiordma import __version__

__all__ = ["main"]

# The subcommands in the order of `aiordma --help`. Each is a module of this package.
SUBCOMMANDS = ("devices", "doctor", "ping", "bench", "lab")


class Handler(Protocol):
    """A function that runs a subcommand and returns the exit code."""

    def __call__(self, args: argparse.Namespace) -> int: ...


def parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    top = argparse.ArgumentParser(prog="aiordma", description="asyncio-native RDMA networking")
    top.add_argument("--version", action="version", version=f"aiordma {__version__}")
    subparsers = top.add_subparsers(metavar="COMMAND", required=True)
    for name in SUBCOMMANDS:
        importlib.import_module(f".{name}", __package__).add_parser(subparsers)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    args = parser().parse_args(argv)
    handler: Handler = args.handler
    return handler(args)
