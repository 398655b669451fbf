"""Chat templates: a list of messages to the text that the model was trained on."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from outrider.core.errors import ModelFileError, SettingError
from outrider.models import chat_worker
from outrider.models.chat_worker import MAX_OUTPUT_CHARS, OUT_OF_TIME
from outrider.models.tokenizer import NAMED_TOKENS, read_tokenizer_config
from outrider.models.values import one_line

MAX_SOURCE_BYTES = 256 << 10
MAX_SECONDS = 2.0  # of computing: a busy machine must not make a good template fail
MAX_WALL_SECONDS = 10.0
_START_SECONDS = 30.0
_START = "import sys; sys.path[:] = sys.argv[2:]; import runpy; runpy.run_path(sys.argv[1], run_name='__main__')"
"""Starts the worker with the import path of this process. As a plain script it would also get the script's folder,
where modules may be called like those of the standard library."""


class ChatTemplate:
    """A model's Jinja template, rendered in a process of its own.

    A template comes with the model file and can loop, recurse or allocate without end, partly inside C code that no
    exception reaches. So a second process renders it, with little memory, and is ended when it computes for longer
    than ``MAX_SECONDS`` (where the system can tell), or takes ``MAX_WALL_SECONDS``. It starts on first use, stays for
    the next call and ends with this object. Safe to call from any thread; calls take turns.
    """

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        """``tokens`` are the named tokens that the template may use: ``bos_token``, ``eos_token``, ...

        Raises ModelFileError for a template over ``MAX_SOURCE_BYTES``; what else is wrong shows on rendering.
        """
        size = len(source.encode(errors="replace"))
        if size > MAX_SOURCE_BYTES:
            raise ModelFileError(f"the chat template has {size} bytes; allowed are {MAX_SOURCE_BYTES}")
        self.source = source
        self.tokens = dict(tokens)
        self._lock = threading.Lock()
        self._worker: _Worker | None = None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The prompt text for ``messages`` (each with a ``role`` and a ``content``, both text).

        Raises SettingError for messages that are malformed or that the template refuses, ModelFileError for a template
        that is broken or goes over a limit.
        """
        check_messages(messages)
        variables = {
            **self.tokens,
            "messages": [dict(message) for message in messages],
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            request = json.dumps([MAX_SECONDS, self.source, variables])
        except (TypeError, ValueError, RecursionError) as e:
            raise SettingError(f"messages and tools must be JSON values, but: {one_line(e)}") from None
        with self._lock:
            if self._worker is None or not self._worker.alive:
                self._worker = _Worker()
            reply = self._worker.ask(request, MAX_WALL_SECONDS)
            limit = self._worker.exceeded
        if reply is None:
            what = f"took longer than {limit:g} s" if limit else "ended the process that renders it"
            raise ModelFileError(f"the chat template {what}; it cannot be used")
        outcome, text = reply
        if outcome == "ok":
            return text
        if outcome == "refused":
            raise SettingError(f"the model's chat template refuses the messages: {one_line(text)}")
        raise ModelFileError(f"the chat template fails: {one_line(text)}")


class _Worker:
    """A running ``chat_worker``; it ends with this object or when this process does."""

    def __init__(self) -> None:
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-c", _START, chat_worker.__file__, *filter(None, sys.path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                encoding="ascii",
                start_new_session=True,  # Ctrl-C is the parent's matter
            )
        except OSError as e:
            raise ModelFileError(f"the process that renders chat templates does not start: {one_line(e)}") from None
        self._stop = weakref.finalize(self, _end, self._process)
        self._expired: float | None = None
        if self.ask("", _START_SECONDS) is None:
            raise ModelFileError("the process that renders chat templates does not start: is jinja2 installed?")

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, request: str, seconds: float) -> tuple[str, str] | None:
        """The answer to one request, or None when the process has ended instead. An empty request only waits."""
        watchdog = threading.Timer(seconds, self._expire, [seconds])
        watchdog.daemon = True
        watchdog.start()
        try:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            if request:
                self._process.stdin.write(request + "\n")
                self._process.stdin.flush()
            outcome, text = json.loads(self._process.stdout.readline())
            return outcome, text
        except (OSError, ValueError):  # a closed pipe or an answer cut short
            self._stop()
            return None
        except BaseException:  # Ctrl-C: an unread answer must not reach the next caller
            self._stop()
            raise
        finally:
            watchdog.cancel()
            watchdog.join()  # after this the process is not killed any more, and alive is true to the fact

    @property
    def exceeded(self) -> float | None:
        """The limit, in seconds, that the process was ended for; None when it was not."""
        out_of_time = OUT_OF_TIME and self._process.poll() == -OUT_OF_TIME
        return MAX_SECONDS if out_of_time else self._expired

    def _expire(self, seconds: float) -> None:
        self._expired = seconds
        self._process.kill()


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def check_messages(messages: object) -> None:
    """Raises SettingError, naming the message, unless ``messages`` is a list of {role, content} texts."""
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence):
        raise SettingError(f"messages is of type {type(messages).__name__}; allowed is a list of messages")
    if not messages:
        raise SettingError("messages is an empty list; allowed is a list with at least one message")
    room = MAX_OUTPUT_CHARS
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise SettingError(f"messages[{i}] is of type {type(message).__name__}; allowed is an object")
        for key in ("role", "content"):
            if key not in message:
                raise SettingError(f"messages[{i}] has no '{key}'; a message needs a role and a content")
            if not isinstance(message[key], str):
                kind = type(message[key]).__name__
                raise SettingError(f"messages[{i}].{key} is of type {kind}; allowed is a text")
            room -= len(message[key])
    if room < 0:
        raise SettingError(f"messages have {MAX_OUTPUT_CHARS - room} characters; allowed are {MAX_OUTPUT_CHARS}")


def chat_template_from_folder(folder: Path) -> ChatTemplate | None:
    """The chat template of a Hugging Face folder; None when it has none. Raises ModelFileError."""
    names = read_tokenizer_config(folder)
    tokens = {name: names[name] for name in NAMED_TOKENS if isinstance(names.get(name), str)}
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return ChatTemplate(file.read_text(encoding="utf-8"), tokens)
        except UnicodeDecodeError:
            raise ModelFileError(f"{file} is not UTF-8 text") from None
    found = names.get("chat_template")
    return None if found is None else ChatTemplate(_default(found, folder / "tokenizer_config.json"), tokens)


def chat_template_from_metadata(metadata: Mapping[str, Any]) -> ChatTemplate | None:
    """The chat template in a GGUF file's metadata; None when it has none. Raises ModelFileError."""
    source = metadata.get("tokenizer.chat_template")
    if source is None:
        return None
    ids = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    vocabulary = metadata.get("tokenizer.ggml.tokens", [])
    tokens = {}
    for name, key in ids.items():
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(token_id, int) and 0 <= token_id < len(vocabulary):
            tokens[f"{name}_token"] = vocabulary[token_id]
    return ChatTemplate(_default(source, "tokenizer.chat_template"), tokens)


def _default(found: object, where: object) -> str:
    """The template itself, or the one called ``default`` of a list of named ones."""
    if isinstance(found, str):
        return found
    named = {}
    if isinstance(found, list) and all(isinstance(entry, dict) for entry in found):
        named = {str(entry.get("name")): entry.get("template") for entry in found}
    template = named.get("default")
    if not isinstance(template, str):
        has = f"the templates {', '.join(named)}" if named else f"a {type(found).__name__}"
        raise ModelFileError(f"{where} has {has} as chat template; expected is a text or a list with one named default")
    return template
