"""What a call may expect of the workers: its service tier, its targets, its priority, whose prompts it shares. PURE.

A call gets what its class has; where it names a value itself, it may ask for less than its class has, and for more only
as far as the settings allow: a priority, and a tight target just as well, puts a call before others. Called by
generation.py.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

from stallfree_router.settings import ApiSettings, RequestClass
from stallfree_shared.errors import InvalidRequestError
from stallfree_shared.openai_api import GenerationBody

DEFAULT_CLASS = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What holds for all generations of one call."""

    service_tier: str
    tbt_target_seconds: float | None
    """None: the worker's default."""
    ttft_target_seconds: float | None
    """None: the worker's default."""
    priority: int
    """Lower comes first."""


def resolve_terms(body: GenerationBody, settings: ApiSettings) -> Terms:
    """Raises:
    InvalidRequestError: there is no such class, or a value asks for more than the call may have.
    """
    name = DEFAULT_CLASS if body.service_tier in (None, "auto") else body.service_tier
    given = {DEFAULT_CLASS: RequestClass(), **settings.request_classes}.get(name)
    if given is None:
        names = ", ".join(("auto", *dict.fromkeys((DEFAULT_CLASS, *settings.request_classes))))
        raise InvalidRequestError(f"service_tier: there is no such tier here; there are {names}", param="service_tier")
    _check("priority", body.priority, given.priority, settings.min_priority)
    _check("tbt_target_seconds", body.tbt_target_seconds, given.tbt_target_seconds, settings.min_tbt_target_seconds)
    _check("ttft_target_seconds", body.ttft_target_seconds, given.ttft_target_seconds, settings.min_ttft_target_seconds)
    return Terms(
        service_tier=name,
        tbt_target_seconds=body.tbt_target_seconds or given.tbt_target_seconds,
        ttft_target_seconds=body.ttft_target_seconds or given.ttft_target_seconds,
        priority=given.priority if body.priority is None else body.priority,
    )


def _check(field: str, wanted: float | None, given: float | None, minimum: float) -> None:
    """Raises where a call asks for more than both its class and the setting give. Lower is more in all three."""
    least = minimum if given is None else min(given, minimum)
    if wanted is not None and wanted < least:
        raise InvalidRequestError(
            f"{field}: a call of this tier may name {least:g} or more, got {wanted:g}", param=field
        )


def cache_salt(tenant: str, salt: str | None) -> str:
    """Equal only for the same tenant with the same salt, so that nobody finds out by a faster answer what another
    tenant's prompts are, whatever either calls itself. 64 characters."""
    return hashlib.sha256(json.dumps([tenant, salt]).encode()).hexdigest()
