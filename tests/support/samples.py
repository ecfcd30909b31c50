"""What /metrics says, as numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping

import httpx
from prometheus_client.parser import text_string_to_metric_families


class Samples:
    """One scrape. Names are those on the page: counters end in `_total`, histograms in `_bucket`, `_sum`, `_count`."""

    def __init__(self, page: str) -> None:
        self._samples = [
            (sample.name, dict(sample.labels), float(sample.value))
            for family in text_string_to_metric_families(page)
            for sample in family.samples
        ]

    def total(self, name: str, **labels: str) -> float:
        """The sum over all series of a name that have these labels; 0 without any."""
        return math.fsum(value for found, has, value in self._samples if found == name and _matches(has, labels))

    def names(self) -> set[str]:
        return {name for name, _, _ in self._samples}

    def buckets(self, name: str, **labels: str) -> list[tuple[float, float]]:
        """(upper bound, cumulative count) of a histogram, all its series added up, in ascending order."""
        counts: dict[float, float] = {}
        for found, has, value in self._samples:
            if found == f"{name}_bucket" and _matches(has, labels):
                bound = float(has["le"])
                counts[bound] = counts.get(bound, 0.0) + value
        return sorted(counts.items())

    def quantile_bounds(self, name: str, ratio: float, **labels: str) -> tuple[float, float]:
        """The bucket in which a histogram's quantile lies: more than the first and up to the second."""
        low_bound = 0.0
        buckets = self.buckets(name, **labels)
        for bound, count in buckets:
            if count >= ratio * buckets[-1][1] > 0:
                return low_bound, bound
            low_bound = bound
        raise AssertionError(f"{name} has no sample")


async def scrape(url: str) -> Samples:
    """The samples of one service."""
    async with httpx.AsyncClient(trust_env=False) as client:
        answer = await client.get(f"{url}/metrics")
        answer.raise_for_status()
        return Samples(answer.text)


def _matches(has: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    return all(has.get(name) == value for name, value in wanted.items())
