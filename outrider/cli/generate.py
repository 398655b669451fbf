"""``outrider generate``: continue a prompt."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from outrider.cli import flags
from outrider.cli.stats import output_json, stats_lines
from outrider.core.errors import SettingError
from outrider.core.params import SpecParams
from outrider.engine.request import RequestOutput
from outrider.spec.registry import PREDICTING

HELP = "continue a prompt, or answer it with --chat"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_model_flags(parser)
    parser.add_argument("prompt", nargs="?", help="the prompt; read from standard input when it is left out")
    parser.add_argument("--chat", action="store_true", help="wrap the prompt in the model's chat template")
    parser.add_argument("--stats", action="store_true", help="print what speculation did")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of streaming text")
    parser.add_argument(
        "--prediction",
        metavar="TEXT|@FILE",
        help="the answer you expect, which is drafted from unless --drafter is given",
    )
    flags.add_spec_flags(parser)
    flags.add_sampling_flags(parser)


def run(args: argparse.Namespace) -> int:
    params = flags.sampling(args)
    if params.logprobs is not None and not args.json:
        raise SettingError("--logprobs needs --json, which shows them")
    if args.prompt is None and sys.stdin.isatty():
        raise SettingError("there is no prompt: give it as an argument or on standard input")
    prediction = _prediction(args.prediction)
    if prediction and args.speculative_config is None and not hasattr(args, "method"):
        args.method = PREDICTING
    llm = flags.load(args)
    text = args.prompt if args.prompt is not None else sys.stdin.read()
    prompt = llm.encode_chat([{"role": "user", "content": text}]) if args.chat else llm.encode(text)
    before = dict(llm.engine.metrics.seconds), llm.engine.metrics.steps
    stream = llm.stream(prompt, params, SpecParams(prediction=prediction))
    for delta in stream:
        if not args.json and delta.index == 0:
            print(delta.text, end="", flush=True)
    output = RequestOutput.of(stream.request)
    if args.json:
        print(json.dumps(output_json(output), ensure_ascii=False))
    else:
        print()
        for completion in output.completions[1:]:
            print(f"--- answer {completion.index + 1}\n{completion.text}")
    if args.stats:
        for line in stats_lines(output, llm.engine.metrics, *before):
            print(line, file=sys.stderr)
    return 0


def _prediction(given: str | None) -> str:
    """The predicted answer, which ``@FILE`` names a file of."""
    if given is None or not given.startswith("@"):
        return given or ""
    try:
        return Path(given[1:]).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise SettingError(f"--prediction is {given!r}; the file cannot be read: {error}") from None
