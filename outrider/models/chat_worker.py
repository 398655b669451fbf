"""The process that renders a chat template: a template is a program from a stranger, and a process can be stopped.

``ChatTemplate`` runs this file. It says ``["ready", ""]`` first; then each line on stdin is a JSON list
``[seconds, source, variables]`` and each answer one JSON line ``[outcome, text]``, where the outcome is ``ok``,
``refused`` (the template called ``raise_exception``) or ``broken``. The system ends this process, with the signal
``OUT_OF_TIME``, when an answer takes more than ``seconds`` of computing. So that it starts fast, it must not import
anything of Outrider.
"""

from __future__ import annotations

import datetime
import functools
import json
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jinja2
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_OUTPUT_CHARS = 4 << 20
MAX_MEMORY_BYTES = 512 << 20
OUT_OF_TIME = int(getattr(signal, "SIGPROF", 0))  # 0: the system cannot tell
_MAX_MESSAGE_CHARS = 1000


class RefusalError(Exception):
    """The template called ``raise_exception``."""


class Generation(Extension):
    """``{% generation %}...{% endgeneration %}`` marks what training learns from; here it is just its content."""

    tags = {"generation"}  # noqa: RUF012 (jinja's own declaration)

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _refuse(message: object = "") -> None:
    raise RefusalError(str(message))


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it stands; jinja's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def environment() -> jinja2.Environment:
    """Jinja as transformers sets it up for chat templates."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    made.filters["tojson"] = _tojson
    made.globals |= {"raise_exception": _refuse, "strftime_now": _now}
    return made


def limit_memory() -> None:
    """Bounds this process' address space, where the system can."""
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    except (ImportError, OSError, ValueError):
        pass  # the time limit is what remains


def limit_computing(seconds: float) -> None:
    """Lets this process compute for so long from now on (0: without end), where the system can."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)


def answer(template: Callable[[], jinja2.Template], variables: Mapping[str, Any]) -> tuple[str, str]:
    """Compiles and renders; whatever the template does comes back as (outcome, text)."""
    try:
        parts: list[str] = []
        room = MAX_OUTPUT_CHARS
        for part in template().generate(variables):
            parts.append(part)
            room -= len(part)
            if room < 0:
                return "broken", f"it writes more than {MAX_OUTPUT_CHARS} characters"
        return "ok", "".join(parts)
    except RefusalError as e:
        return "refused", str(e)[:_MAX_MESSAGE_CHARS]
    except MemoryError:
        return "broken", f"it needs more than {MAX_MEMORY_BYTES >> 20} MiB of memory"
    except RecursionError:
        return "broken", "it is nested too deeply"
    except jinja2.TemplateSyntaxError as e:
        return "broken", f"line {e.lineno}: {e.message}"[:_MAX_MESSAGE_CHARS]
    except Exception as e:  # a template can raise anything
        return "broken", (str(e) or type(e).__name__)[:_MAX_MESSAGE_CHARS]


def main() -> None:
    limit_memory()
    if OUT_OF_TIME:
        signal.signal(OUT_OF_TIME, signal.SIG_DFL)  # a handler would wait for C code to return
    compiled = functools.lru_cache(maxsize=1)(environment().from_string)
    print(json.dumps(["ready", ""]), flush=True)
    for line in sys.stdin:
        seconds, source, variables = json.loads(line)
        limit_computing(seconds)
        text = json.dumps(answer(functools.partial(compiled, source), variables))
        limit_computing(0)
        print(text, flush=True)


if __name__ == "__main__":
    main()
