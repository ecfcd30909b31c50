"""How the engine's owners say that their own state is wrong. That is our bug, never a user's mistake."""

from __future__ import annotations


class IntegrityError(RuntimeError):
    """An owner found its state in contradiction with itself, or was called against its contract."""


def require(condition: bool, message: str) -> None:
    """Raises IntegrityError unless `condition` holds."""
    if not condition:
        raise IntegrityError(message)
