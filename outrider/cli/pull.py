"""``outrider pull``: fetch a named model into the user's cache."""

from __future__ import annotations

import argparse
import sys

from outrider.models.pull import CATALOGUE, pull

HELP = "fetch a model into the cache"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="the model's name: " + ", ".join(CATALOGUE))


def run(args: argparse.Namespace) -> int:
    path = pull(args.model, lambda line: print(line, file=sys.stderr))
    print(path)
    return 0
