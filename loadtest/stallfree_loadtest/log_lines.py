"""Log lines of the services for people: JSON objects become one readable line each. Pure. Used by `process`."""

from __future__ import annotations

import json

_SHOWN_FIRST = ("level", "logger", "message")
_LEFT_OUT = frozenset((*_SHOWN_FIRST, "time", "service", "color_message", "exc_info"))


def readable(line: str) -> str:
    """`ERROR stallfree_worker.engine_process: engine lost (reason=…)`, with the traceback below. Any other line stays
    as it is."""
    try:
        fields = json.loads(line)
    except json.JSONDecodeError:
        return line
    if not isinstance(fields, dict) or "message" not in fields:
        return line
    level, logger, message = (str(fields.get(name, "")) for name in _SHOWN_FIRST)
    told = ", ".join(f"{name}={value}" for name, value in fields.items() if name not in _LEFT_OUT)
    traceback = f"\n{fields['exc_info']}" if fields.get("exc_info") else ""
    return f"{level} {logger}: {message}{f' ({told})' if told else ''}{traceback}"
