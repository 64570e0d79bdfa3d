"""The command `aiordma`: one module for each subcommand.

A subcommand's module has `add_parser(subparsers)`, which declares its arguments and sets the
default `handler`, a function from the parsed arguments to the exit code. The modules are imported
when the command runs, and they import the library inside their handlers: `aiordma lab` works
before the native module is built.
"""

import argparse
import importlib
from collections.abc import Sequence
from typing import Protocol

__all__ = ["main"]

# The subcommands in the order of `aiordma --help`; each is a module of this package.
SUBCOMMANDS = ("devices", "ping", "bench", "lab")


class Handler(Protocol):
    """What a subcommand does with its arguments; returns the exit code."""

    def __call__(self, args: argparse.Namespace) -> int: ...


def parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    top = argparse.ArgumentParser(prog="aiordma", description="asyncio-native RDMA networking")
    subparsers = top.add_subparsers(metavar="COMMAND", required=True)
    for name in SUBCOMMANDS:
        importlib.import_module(f".{name}", __package__).add_parser(subparsers)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    args = parser().parse_args(argv)
    handler: Handler = args.handler
    return handler(args)
