"""Command-line values that several commands share: numbers with limits, and help that names the defaults."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

T = TypeVar("T")


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


def non_negative(text: str) -> float:
    """A finite number from 0 up."""
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number from 0 up, and {text!r} is not")
    return value


def count(*, least: int, most: int | None = None) -> Callable[[str], int]:
    """A whole number, `least` or more, and `most` at the most."""

    def parse(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"must be {least} or more, and {text!r} is not")
        if most is not None and value > most:
            raise argparse.ArgumentTypeError(f"must be {most} or less, and {text!r} is not")
        return value

    parse.__name__ = "whole number"  # argparse names it when the text is no number at all
    return parse


def writable_file(text: str) -> Path:
    """A file that can be written; it is made, if it is not there, so that no long run ends without its results."""
    path = Path(text)
    try:
        path.open("a").close()
    except OSError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return path


def listed(parse: Callable[[str], T]) -> Callable[[str], tuple[T, ...]]:
    """Values with commas between them; an empty text is none."""

    def parse_all(text: str) -> tuple[T, ...]:
        return tuple(parse(part) for part in text.split(",") if part)

    parse_all.__name__ = f"list of {parse.__name__}s"
    return parse_all


def base_url(text: str) -> str:
    """The address of a server: scheme, host, maybe a port."""
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
        raise argparse.ArgumentTypeError(f"must be http://HOST:PORT or https://HOST:PORT, and {text!r} is not")
    return text


# What argparse says of a text that they cannot read at all: `invalid number value: 'x'`.
positive.__name__ = "number"
base_url.__name__ = "URL"


def add_prompt_options(parser: argparse.ArgumentParser) -> None:
    """What random prompts are drawn from."""
    add = parser.add_argument
    add("--vocab-low", type=count(least=0), default=1000, metavar="ID", help="lowest token id in prompts")
    add("--vocab-high", type=count(least=1), default=8000, metavar="ID", help="first token id that prompts do not use")
    add("--seed", type=int, default=0, metavar="N", help="the same seed gives the same prompts and arrivals")
