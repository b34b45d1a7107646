"""Log lines of Baton's processes, as text or as JSON.

BATON_LOG_LEVEL sets the level (WARNING), --log-format or BATON_LOG_FORMAT the form: `text`, or `json` with
one object a line:

    {"time": "2026-01-31T12:00:00.123Z", "level": "WARNING", "process": "router-0", "pid": 17,
     "logger": "baton.router.router", "message": "decode-0 is gone: ...", "worker": "0123..."}

Further keys are what the code attaches to a message, such as the ids of workers and requests.
"""

import argparse
import datetime
import json
import logging
import os
import sys
from typing import Final

from baton.config.environment import LOG_FORMATS, LogFormat, log_format, log_level

CONTROLS: Final = {code: repr(chr(code))[1:-1] for code in (*range(32), *range(127, 160))}
TEXT: Final = "%(levelname)s %(name)s %(message)s"
# The fields of every record; the code that logs has attached all others.
_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def add_format_option(parser: argparse.ArgumentParser) -> None:
    """Add --log-format, which names the `log_format` of this process and of those that it starts."""
    parser.add_argument("--log-format", choices=LOG_FORMATS, help="form of log lines (default: text)")


def set_up_logging(process: str = "", *, format: LogFormat | None = None, force: bool = False) -> None:
    """Send the root logger's lines to stderr. process: the name that each line begins with, such as decode-0.

    format: None for what BATON_LOG_FORMAT says.
    force: replace handlers that others, such as Ray, have installed. Raises ConfigError for a bad variable.
    """
    handler = logging.StreamHandler(sys.stderr)
    is_json = (format or log_format()) == "json"
    text = f"{process} | {TEXT}" if process else TEXT
    handler.setFormatter(JsonLines(process) if is_json else TextLines(text))
    logging.basicConfig(level=log_level(), handlers=[handler], force=force)


def say(text: str, process: str = "serve") -> None:
    """Write a message to the operator on stderr, at every log level."""
    if log_format() == "text":
        line = f"baton: {text}"
    else:
        record = {"name": f"baton.{process}", "levelname": "INFO", "levelno": logging.INFO, "msg": text}
        line = JsonLines(process).format(logging.makeLogRecord(record))
    print(line, file=sys.stderr, flush=True)


class TextLines(logging.Formatter):
    """Formats a record as text, its message on one line: other processes may have written parts of it."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name that logging calls
        """Return the line, with control characters of the message escaped."""
        record.message = record.message.translate(CONTROLS)
        return super().formatMessage(record)


class JsonLines(logging.Formatter):
    """Formats each record as one JSON object on one line."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """Return the JSON of a record, with the fields that were attached to it."""
        moment = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        fields: dict[str, object] = {
            "time": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname,
            "process": self._process,
            "pid": os.getpid(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        attached = {key: value for key, value in vars(record).items() if key not in _STANDARD}
        return json.dumps(attached | fields, default=str)
