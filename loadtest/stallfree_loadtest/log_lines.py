"""Log lines of the services for people: JSON objects become one readable line each. Pure. Used by `process`."""

from __future__ import annotations

import json
from collections.abc import Sequence

_SHOWN_FIRST = ("level", "logger", "message")
_LEFT_OUT = frozenset((*_SHOWN_FIRST, "time", "service", "color_message", "exc_info"))


def readable(line: str) -> str:
    """`ERROR stallfree_worker.engine_process: engine lost (reason=…)`, with the traceback below. Any other line stays
    as it is."""
    fields = _fields(line)
    if fields is None:
        return line
    traceback = f"\n{fields['exc_info']}" if fields.get("exc_info") else ""
    return f"{_sentence(fields)}{traceback}"


def last_error(lines: Sequence[str]) -> str | None:
    """The last line that tells of an error, readable and without its traceback."""
    for line in reversed(lines):
        fields = _fields(line)
        if fields is not None and fields.get("level") in ("ERROR", "CRITICAL"):
            return _sentence(fields)
    return None


def _fields(line: str) -> dict[str, object] | None:
    """None for a line that is no log record."""
    try:
        fields = json.loads(line)
    except json.JSONDecodeError:
        return None
    return fields if isinstance(fields, dict) and "message" in fields else None


def _sentence(fields: dict[str, object]) -> str:
    level, logger, message = (str(fields.get(name, "")) for name in _SHOWN_FIRST)
    told = ", ".join(f"{name}={value}" for name, value in fields.items() if name not in _LEFT_OUT)
    return f"{level} {logger}: {message}{f' ({told})' if told else ''}"
