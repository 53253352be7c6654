"""Format log lines: text for people, JSON for programs."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime

from dtckpt.errors import printable


class LineFormatter(logging.Formatter):
    """One line of text. Names come from clients, so characters that end a line or steer a terminal are escaped."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  the base class's
        record.message = printable(record.message)
        return super().formatMessage(record)


class JsonFormatter(logging.Formatter):
    """One JSON object: time, level, message, and the record's ``facts``."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "facts", {}),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry)


FORMATTERS = {"text": LineFormatter, "json": JsonFormatter}


def start_logging(kind: str) -> None:
    """Send all of the process's log lines to standard error, in one of the `FORMATTERS`."""
    handler = logging.StreamHandler()
    handler.setFormatter(FORMATTERS[kind]())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
