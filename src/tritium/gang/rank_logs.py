"""Python's `logging` on ranks: the driver's levels, the rank in each record, JSON by setting (driver, rank)."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

VARIABLE = "TRITIUM_LOGGING"
_MOST_LOGGERS = 200


def described(form: str) -> dict[str, str]:
    """Return the variable of the ranks' environment that says how they log.

    form : "text" or "json".

    Levels are those of this process. So is the format, where its `logging` has a handler: that of the first one with a
    plain `logging.Formatter`, or else the one of `logging.basicConfig`.
    """
    loggers = logging.root.manager.loggerDict.items()
    levels = {name: one.level for name, one in loggers if isinstance(one, logging.Logger) and one.level}
    formatters = (handler.formatter for handler in logging.root.handlers)
    plain = next((one for one in formatters if type(one) is logging.Formatter), None)
    default = logging.BASIC_FORMAT if logging.root.handlers else None
    facts = {
        "level": logging.root.level,
        "levels": dict(list(levels.items())[:_MOST_LOGGERS]),
        "format": default if plain is None else plain._fmt,
        "times": None if plain is None else plain.datefmt,
        "json": form == "json",
    }
    return {VARIABLE: json.dumps(facts)}


def set_up(rank: int, run: str) -> None:
    """Take the driver's levels, and give every record of this process `rank` and `run`.

    Lines go to stderr as long as the user's function adds no handler: `logging.basicConfig` there has the last word.
    """
    text = os.environ.pop(VARIABLE, None)
    if text is None:
        return
    facts: dict[str, Any] = json.loads(text)
    make = logging.getLogRecordFactory()

    def numbered(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make(*args, **kwargs)
        record.rank, record.run = rank, run
        return record

    logging.setLogRecordFactory(numbered)
    logging.root.setLevel(facts["level"])
    for name, level in facts["levels"].items():
        logging.getLogger(name).setLevel(level)
    if facts["json"] or facts["format"] is not None:
        logging.lastResort = _Stderr()
        form = JsonLines() if facts["json"] else logging.Formatter(facts["format"], facts["times"])
        logging.lastResort.setFormatter(form)


class _Stderr(logging.StreamHandler):  # type: ignore[type-arg] # Python 3.10 has it without arguments.
    """Writes to the stderr of the moment, which the function may replace."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> Any:
        return sys.stderr


class JsonLines(logging.Formatter):
    """A record as a line of JSON: time (UTC), level, logger, rank, run, message, what `extra=` gave, exception."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        facts: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "rank": getattr(record, "rank", None),
            "run": getattr(record, "run", None),
            "message": record.getMessage(),
            **_extra(vars(record)),
        }
        if record.exc_info:
            facts["exception"] = self.formatException(record.exc_info)
        return json.dumps(facts, ensure_ascii=False, default=str)


_KNOWN = {*vars(logging.makeLogRecord({})), "message", "asctime", "rank", "run"}


def _extra(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in facts.items() if name not in _KNOWN}
