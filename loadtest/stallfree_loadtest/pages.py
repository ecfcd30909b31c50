"""What services tell over HTTP besides completions: the model's name, metrics, the last steps. Used by the demo and
the experiments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
from prometheus_client.parser import text_string_to_metric_families

from stallfree_shared.metrics import WORKER_PREFIX

T = TypeVar("T")
_TIMEOUT_SECONDS = 30.0
STEPS_PATH = "/debug/steps?limit=256"


class PageError(Exception):
    """A page could not be read; the message names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    name: str
    max_model_len: int
    """Most tokens of prompt and output together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStep:
    """One step, as the worker tells it."""

    step_id: int
    seconds: float
    predicted_seconds: float
    decode_tokens: int
    prefill_tokens: int


async def get(url: str) -> httpx.Response:
    """Raises PageError."""
    try:
        async with httpx.AsyncClient(trust_env=False, timeout=_TIMEOUT_SECONDS) as client:
            return (await client.get(url)).raise_for_status()
    except httpx.HTTPError as error:
        raise PageError(f"GET {url}: {error}") from error


async def served_model(router_url: str) -> ServedModel:
    """The first model that a router serves. Raises PageError."""
    return await _first_model(
        router_url, lambda model: ServedModel(name=str(model["id"]), max_model_len=int(model["max_model_len"]))
    )


async def model_name(url: str) -> str:
    """The first model of any server that speaks OpenAI's API. Raises PageError."""
    return await _first_model(url, lambda model: str(model["id"]))


async def _first_model(url: str, read: Callable[[dict[str, Any]], T]) -> T:
    page = await get(f"{url}/v1/models")
    try:
        return read(page.json()["data"][0])
    except (ValueError, LookupError, TypeError) as error:
        raise PageError(f"GET {url}/v1/models: no model in {page.text[:200]!r}") from error


async def worker_totals(worker_url: str) -> dict[str, float]:
    """A worker's series by their names without its prefix, summed over labels. Raises PageError."""
    totals: dict[str, float] = {}
    for family in text_string_to_metric_families((await get(f"{worker_url}/metrics")).text):
        for sample in family.samples:
            name = sample.name.removeprefix(f"{WORKER_PREFIX}_")
            totals[name] = totals.get(name, 0.0) + sample.value
    return totals


async def worker_steps(worker_url: str) -> tuple[WorkerStep, ...]:
    """The last 256 steps of a worker, oldest first. Raises PageError."""
    steps = (await get(f"{worker_url}{STEPS_PATH}")).json()["steps"]
    found = (
        WorkerStep(
            step_id=int(step["step_id"]),
            seconds=float(step["seconds"]),
            predicted_seconds=float(step["predicted_seconds"]),
            decode_tokens=int(step["decode_tokens"]),
            prefill_tokens=int(step["prefill_tokens"]),
        )
        for step in steps
    )
    return tuple(sorted(found, key=lambda step: step.step_id))
