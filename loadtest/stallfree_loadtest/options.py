"""Command-line values that several commands share: numbers with limits, and help that names the defaults."""

from __future__ import annotations

import argparse
from collections.abc import Callable


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Adds the default to every option's help, except where there is none."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        has_default = action.default not in (None, False, [], argparse.SUPPRESS)
        return super()._get_help_string(action) if has_default else action.help


def positive(text: str) -> float:
    """A finite number above 0."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number above 0, and {text!r} is not")
    return value


def count(*, least: int) -> Callable[[str], int]:
    """A whole number, `least` or more."""

    def parse(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"must be {least} or more, and {text!r} is not")
        return value

    parse.__name__ = "whole number"  # argparse names it when the text is no number at all
    return parse


positive.__name__ = "number"
