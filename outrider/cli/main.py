"""The command line: ``outrider generate | chat | serve | check | demo | bench | tune | pull | info``."""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import torch

import outrider
from outrider.core.errors import OutriderError

COMMANDS = ("generate", "chat", "serve", "check", "demo", "bench", "tune", "pull", "info")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; an error of the caller's is one line on standard error and exit code 2."""
    try:
        args = _parser().parse_args(argv)
        logging.basicConfig(level=logging.INFO if args.verbose else logging.WARNING, format="%(name)s: %(message)s")
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except OutriderError as error:
        print(f"outrider: {error}", file=sys.stderr)
        return 2
    except (MemoryError, torch.OutOfMemoryError) as error:
        print(f"outrider: out of memory: {error or 'the machine has no more to give'}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("outrider: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader went away; keep the interpreter from complaining at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, instead of all that could have been right."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"outrider: {message}; see {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="outrider", description="Lossless speculative decoding.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"outrider {outrider.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name in COMMANDS:
        module = importlib.import_module(f"outrider.cli.{name}")
        sub = commands.add_parser(name, help=module.HELP, description=module.HELP, allow_abbrev=False)
        module.add_arguments(sub)
        sub.add_argument("-v", "--verbose", action="store_true", help="say more, such as the memory plan")
        sub.set_defaults(run=module.run)
    return parser


if __name__ == "__main__":
    sys.exit(main())
