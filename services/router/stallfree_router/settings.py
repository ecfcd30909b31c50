"""The router's settings, in groups; a class takes its own group only."""

from __future__ import annotations

import json
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import BaseModel, ByteSize, ConfigDict, Field, SecretStr, field_validator
from pydantic_settings import NoDecode

from stallfree_shared.settings import DrainSettings, RedisSettings, ServerSettings, SettingsGroup

DNS_SCHEME = "dns+http"
WORKER_URL_SCHEMES = ("http", "https", DNS_SCHEME)


class DiscoverySettings(SettingsGroup):
    """Who the workers are."""

    worker_urls: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        description="Base URLs of the workers, separated by commas. http://10.0.0.7:8000 is one worker; "
        "dns+http://workers.models.svc:8000 is every address that the name resolves to, looked up again and again.",
    )
    discovery_seconds: float = Field(2.0, gt=0, description="Seconds between two look-ups of dns+http:// names.")

    @field_validator("worker_urls", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        if isinstance(value, str):
            return tuple(part.strip().rstrip("/") for part in value.split(",") if part.strip())
        return value

    @field_validator("worker_urls")
    @classmethod
    def _check(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for url in value:
            parts = urlsplit(url)
            if parts.scheme not in WORKER_URL_SCHEMES or not parts.hostname:
                raise ValueError(
                    f"a worker URL is SCHEME://HOST:PORT with a scheme of {WORKER_URL_SCHEMES}, not {url!r}"
                )
            if parts.scheme == DNS_SCHEME and parts.port is None:
                raise ValueError(f"a dns+http:// URL needs a port, and {url!r} has none")
        return value


class RequestClass(BaseModel):
    """What a call of one service tier is given where it names nothing itself."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tbt_target_seconds: float | None = Field(None, gt=0, allow_inf_nan=False)
    """None: the worker's own default."""
    ttft_target_seconds: float | None = Field(None, gt=0, allow_inf_nan=False)
    """None: the worker's own default."""
    priority: int = Field(0, ge=-100, le=100)
    """Lower comes first."""


class ApiSettings(SettingsGroup):
    """What clients may ask for."""

    api_key: SecretStr | None = Field(
        None,
        description="Key that clients must send as a bearer token on every /v1 route; without it all may call.",
    )
    max_body_bytes: ByteSize = Field(
        ByteSize(16 * 1024 * 1024),
        ge=1024,
        description="Largest request body; larger ones are refused (413).",
    )
    max_choices: int = Field(64, ge=1, description="Most answers one call may ask for: number of prompts times n.")
    request_classes: Annotated[dict[str, RequestClass], NoDecode] = Field(
        {
            "flex": RequestClass(tbt_target_seconds=1.0, ttft_target_seconds=60.0, priority=10),
            "priority": RequestClass(priority=-10),
        },
        description="What clients may name as service_tier, as a JSON object: name to tbt_target_seconds, "
        "ttft_target_seconds and priority (lower comes first). Every client may name every class, so leave out what "
        "nobody may have. The class default, where there is one, is that of calls that name none.",
    )
    min_priority: int = Field(
        0,
        ge=-100,
        le=100,
        description="Best priority that a call may name itself (lower comes first), beyond what its class has.",
    )
    min_tbt_target_seconds: float = Field(
        0.02,
        gt=0,
        description="Tightest TBT target that a call may name itself, beyond what its class has: one that no step can "
        "meet would slow every prompt on its worker.",
    )
    min_ttft_target_seconds: float = Field(
        0.5,
        gt=0,
        description="Tightest TTFT target that a call may name itself, beyond what its class has: a tighter one comes "
        "earlier in the queue.",
    )
    keepalive_seconds: float = Field(
        10.0,
        gt=0,
        description="Seconds without a token after which a stream gets a comment, so that proxies keep it.",
    )

    @field_validator("request_classes", mode="before")
    @classmethod
    def _read_json(cls, value: Any) -> Any:
        # The settings library would do it too, but ends the start with a traceback where the text is no JSON.
        if not isinstance(value, str):
            return value
        try:
            return json.loads(value)
        except ValueError as error:
            raise ValueError(f"this is not JSON: {error}") from None

    @field_validator("request_classes")
    @classmethod
    def _check_names(cls, value: dict[str, RequestClass]) -> dict[str, RequestClass]:
        if "auto" in value:
            raise ValueError("no class can be called auto: it stands for the class default")
        return value


class AdmissionSettings(SettingsGroup):
    """What is refused at the door."""

    max_in_flight_requests: int = Field(
        1024, ge=1, description="Most requests this router serves at once; more are refused (429)."
    )


class DispatchSettings(SettingsGroup):
    """How a request finds a worker, and when a worker counts as lost."""

    connect_timeout_seconds: float = Field(2.0, gt=0, description="Most seconds to connect to a worker.")
    submit_timeout_seconds: float = Field(5.0, gt=0, description="Most seconds for a worker to accept a request.")
    silence_timeout_seconds: float = Field(
        3.0, gt=0, description="Seconds without a frame after which a worker counts as lost."
    )
    max_attempts: int = Field(3, ge=1, description="Most workers that one request is tried on before its first token.")
    no_worker_timeout_seconds: float = Field(
        5.0, ge=0, description="Most seconds that a request waits for any usable worker; then 503."
    )


class RouterSettings(
    DrainSettings, ServerSettings, RedisSettings, DispatchSettings, AdmissionSettings, ApiSettings, DiscoverySettings
):
    """Serves the OpenAI API and sends each request to the worker where it fits best by predicted token load."""
