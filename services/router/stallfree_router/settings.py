"""The router's settings, in groups; a class takes its own group only."""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import ByteSize, Field, SecretStr, field_validator
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
    keepalive_seconds: float = Field(
        10.0,
        gt=0,
        description="Seconds without a token after which a stream gets a comment, so that proxies keep it.",
    )


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
