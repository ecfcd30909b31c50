"""When requests arrive. A seed gives the same instants every time, and nothing waits here.

An instant is in seconds from the start of the load. Gaps are drawn as they are: clipping long ones, as some harnesses
do, raises the offered rate above the one that is asked for (at three mean gaps by 5 %). Used by `open_loop`.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Iterator
from pathlib import Path


def fixed(rate_per_second: float) -> Iterator[float]:
    """One arrival every `1 / rate` seconds, the first at 0."""
    return (number / rate_per_second for number in itertools.count())


def poisson(rate_per_second: float, *, seed: int) -> Iterator[float]:
    """Arrivals that know nothing of each other: exponential gaps."""
    draw = random.Random(seed)
    return itertools.accumulate(draw.expovariate(rate_per_second) for _ in itertools.count())


def gamma(rate_per_second: float, *, coefficient_of_variation: float, seed: int) -> Iterator[float]:
    """Gamma gaps: 1 is Poisson, above 1 comes in bursts, below 1 is more even."""
    draw = random.Random(seed)
    shape = 1 / coefficient_of_variation**2
    scale = 1 / (rate_per_second * shape)
    return itertools.accumulate(draw.gammavariate(shape, scale) for _ in itertools.count())


def trace(path: Path) -> list[float]:
    """The instants that a file tells, one number a line, in seconds and in order.

    Raises:
        OSError: the file cannot be read.
        ValueError: a line is no number, is not finite, or goes back in time; the message names the line.
    """
    instants: list[float] = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                instant = float(line)
            except ValueError:
                raise ValueError(f"{path}, line {number}: {line.strip()!r} is no number of seconds") from None
            last = instants[-1] if instants else 0.0
            if not math.isfinite(instant) or instant < last:
                raise ValueError(f"{path}, line {number}: {instant:g} s is not after {last:g} s")
            instants.append(instant)
    return instants


def limited(
    instants: Iterable[float], *, max_requests: int | None = None, max_seconds: float | None = None
) -> Iterator[float]:
    """Cuts a sequence of instants by number, by time, or both."""
    if max_seconds is not None:
        limit = max_seconds
        instants = itertools.takewhile(lambda instant: instant < limit, instants)
    return itertools.islice(instants, max_requests)
