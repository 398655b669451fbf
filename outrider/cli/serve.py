"""``outrider serve``: an OpenAI-compatible server."""

from __future__ import annotations

import argparse
import importlib.util
import logging
import sys

from outrider.cli import flags
from outrider.cli.stats import model_line
from outrider.core.errors import SettingError
from outrider.core.settings import add_flags, given_flags
from outrider.models.load import DEFAULT_MODEL
from outrider.serve.settings import ServerSettings
from outrider.spec.registry import PLAIN, UNTRAINED

HELP = "serve a model over HTTP, as OpenAI's API does"
NEEDED = ("starlette", "pydantic", "uvicorn", "prometheus_client")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL, help=f"the model (default {DEFAULT_MODEL})")
    add_flags(parser.add_argument_group("server"), ServerSettings)
    flags.add_model_flags(parser, skip=("model",))
    flags.add_spec_flags(parser)


def run(args: argparse.Namespace) -> int:
    settings = ServerSettings(**given_flags(ServerSettings, args)).with_keys()
    for package in NEEDED:
        if importlib.util.find_spec(package) is None:
            raise SettingError(f"outrider serve needs the package {package}: pip install 'outrider[serve]'")
    from outrider.serve.logs import write_logs_as
    from outrider.serve.run import bind, serve, url_of
    from outrider.serve.service import Service

    if not settings.is_local and not settings.api_key:
        print(f"outrider: anybody who reaches {settings.host} can use the server: --api-key keeps it", file=sys.stderr)
    bound = bind(settings)
    with bound:
        write_logs_as(settings.log_format)
        print(f"loading {args.model} ...", file=sys.stderr, flush=True)
        llm = flags.load(args, hints=True, usual={"method": UNTRAINED, "speculation": "auto"})
        logging.getLogger("uvicorn").setLevel(logging.WARNING)
        logging.getLogger("outrider").setLevel(logging.INFO)  # from here on: requests, and changes of mind
        service = Service.of(llm.engine, settings)
        drafter, spec = next(iter(llm.engine.proposers)), llm.engine.spec
        length = (
            "as many draft tokens as pay"
            if spec.speculation == "auto"
            else f"{spec.num_speculative_tokens} draft tokens"
        )
        how = "plain decoding" if drafter == PLAIN or spec.speculation == "off" else f"drafter {drafter} with {length}"
        lines = f"{model_line(llm)}; {how}\n{service.name} is served at {url_of(bound)}/v1 (Ctrl-C ends it)"
        asked_to = serve(service, bound, on_start=lambda: print(lines, file=sys.stderr, flush=True))
    print("outrider: stopped" if asked_to else "outrider: the engine has stopped; the log says why", file=sys.stderr)
    return 0 if asked_to else 1
