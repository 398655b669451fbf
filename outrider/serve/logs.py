"""How logs are written: for people, or one JSON object a line."""

from __future__ import annotations

import json
import logging
import time
from typing import Any


class TextFormatter(logging.Formatter):
    """Time, logger and message; the level where it is a warning or worse."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        line = super().formatMessage(record)
        return line if record.levelno < logging.WARNING else f"{record.levelname} {line}"


class JsonFormatter(logging.Formatter):
    """``time`` (UTC), ``level``, ``logger``, ``event`` and, for an event, its values; else ``message``."""

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        out: dict[str, Any] = {
            "time": f"{moment}.{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": getattr(record, "event", "log"),
        }
        values = getattr(record, "values", None)
        out |= {"message": record.getMessage()} if values is None else values
        if record.exc_info:
            out["exception"] = self.formatException(record.exc_info)
        return json.dumps(out, ensure_ascii=False, default=str)


def write_logs_as(form: str) -> None:
    """From here on, what this process logs is written as ``text`` or ``json``."""
    formatter = JsonFormatter() if form == "json" else TextFormatter()
    for handler in logging.getLogger().handlers:
        handler.setFormatter(formatter)
