"""Log lines of the controller: text on a terminal, else one JSON object a line."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, TextIO

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def fields(record: logging.LogRecord) -> dict[str, Any]:
    """Return what was given as ``extra`` with the record: run, model, rank, plan_id, ..."""
    return {k: v for k, v in vars(record).items() if k not in _STANDARD}


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (UTC), level, logger, message, then the record's fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        line: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class TextFormatter(logging.Formatter):
    """The same for people; values of fields are quoted, so a hostile run id cannot forge a line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        extra = "".join(f" {k}={v!r}" for k, v in fields(record).items())
        line = f"{_time(record)} {record.levelname:<7} {record.getMessage()}{extra}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def configure(kind: str = "auto", level: str = "info", stream: TextIO | None = None) -> None:
    """Send every log line of the process to ``stream`` (stderr).

    Args:
        kind: ``json``, ``text`` or ``auto``.
        level: Least level that is logged.
        stream: Where to.
    """
    stream = sys.stderr if stream is None else stream
    if kind == "auto":
        kind = "text" if stream.isatty() else "json"
    handler = logging.StreamHandler(stream)
    handler.setFormatter(TextFormatter() if kind == "text" else JsonFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


def _time(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
