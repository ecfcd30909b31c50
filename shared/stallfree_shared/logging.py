"""Structured logs on standard error: a constant message with fields, one JSON object a line.

    _logger.info("request finished", extra={"request_id": request_id, "outcome": "stop"})

Prompts and outputs are never logged.
"""

from __future__ import annotations

import logging
import sys
from typing import Literal

from pythonjsonlogger.json import JsonFormatter

LogFormat = Literal["json", "text"]
LogLevel = Literal["debug", "info", "warning", "error"]


def configure_logging(*, service: str, level: LogLevel, log_format: LogFormat) -> None:
    """Sends every logger of this process, uvicorn's included, through one handler."""
    handler = logging.StreamHandler(sys.stderr)
    if log_format == "json":
        handler.setFormatter(
            JsonFormatter(
                "%(asctime)s %(levelname)s %(name)s %(message)s",
                rename_fields={"asctime": "time", "levelname": "level", "name": "logger"},
                static_fields={"service": service},
            )
        )
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name in ("uvicorn.access", "httpx", "httpcore"):
        logging.getLogger(name).setLevel("WARNING")
