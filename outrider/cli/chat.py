"""``outrider chat``: a conversation at the terminal, with accepted draft tokens in colour if wanted."""

from __future__ import annotations

import argparse
import sys
from itertools import groupby

from outrider.cli import flags
from outrider.cli.stats import stats_lines
from outrider.core.errors import OutriderError
from outrider.core.params import SamplingParams
from outrider.engine.llm import LLM
from outrider.engine.request import Delta, RequestOutput

HELP = "talk to a model"
GREEN, PLAIN = "\033[32m", "\033[0m"
COMMANDS = "/reset starts anew, /exit (or Ctrl-D) leaves, Ctrl-C stops an answer"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_model_flags(parser)
    parser.add_argument("--system", metavar="TEXT", help="a system message to begin with")
    parser.add_argument("--color", action="store_true", help="show accepted draft tokens in green")
    parser.add_argument("--stats", action="store_true", help="print what speculation did after each answer")
    flags.add_spec_flags(parser)
    flags.add_sampling_flags(parser, skip=("n", "logprobs"))


def run(args: argparse.Namespace) -> int:
    params = flags.sampling(args)
    llm = flags.load(args)
    opening = [{"role": "system", "content": args.system}] if args.system else []
    messages = list(opening)
    print(COMMANDS, file=sys.stderr)
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except (EOFError, KeyboardInterrupt):
            print(file=sys.stderr)
            return 0
        if line == "/exit":
            return 0
        if line == "/reset":
            messages = list(opening)
        elif line.startswith("/"):
            print(COMMANDS, file=sys.stderr)
        elif line:
            messages.append({"role": "user", "content": line})
            try:
                messages.append({"role": "assistant", "content": _answer(llm, messages, params, args)})
            except OutriderError as error:  # the conversation outgrew the context, say
                messages.pop()
                print(f"outrider: {error}; /reset starts a new conversation", file=sys.stderr)


def _answer(llm: LLM, messages: list[dict[str, str]], params: SamplingParams, args: argparse.Namespace) -> str:
    """Streams one answer and returns its text; Ctrl-C keeps what there is of it."""
    before = dict(llm.engine.metrics.seconds), llm.engine.metrics.steps
    stream = llm.stream_chat(messages, params)
    try:
        for delta in stream:
            print(shown(delta, args.color), end="", flush=True)
    except KeyboardInterrupt:
        stream.close()
    print()
    output = RequestOutput.of(stream.request)
    if args.stats:
        for line in stats_lines(output, llm.engine.metrics, *before):
            print(line, file=sys.stderr)
    return output.text


def shown(delta: Delta, color: bool) -> str:
    """A delta's text, accepted draft tokens in green."""
    if not color:
        return delta.text
    parts = [(drafted, "".join(s.text for s in run)) for drafted, run in groupby(delta.segments, lambda s: s.drafted)]
    return "".join(f"{GREEN}{text}{PLAIN}" if drafted else text for drafted, text in parts)
