"""Settings: every one a flag and a `STALLFREE_…` variable, validated once at the start.

A service's settings are small frozen groups, combined by inheritance; a class takes its own group only:

    class RouterSettings(ServerSettings, RedisSettings, ...): ...
    settings = load_settings(RouterSettings, program="stallfree-router")
    Breaker(settings)        # annotated with the group it needs

A flag wins over the environment, the environment over the default.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, TypeVar

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, CliApp, CliSettingsSource, SettingsConfigDict

from stallfree_shared.logging import LogFormat, LogLevel

ENV_PREFIX = "STALLFREE_"
REDIS_SCHEMES = ("redis://", "rediss://", "unix://")


class SettingsGroup(BaseSettings):
    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        frozen=True,
        extra="ignore",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_avoid_json=True,
        cli_hide_none_type=True,
        protected_namespaces=(),
    )


class ServerSettings(SettingsGroup):
    """Where a service listens and what it writes to its log."""

    host: str = Field("0.0.0.0", description="Address to listen on.")  # noqa: S104 - a pod listens on all its addresses
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    log_level: LogLevel = Field("info", description="Least severe log line that is written.")
    log_format: LogFormat = Field("json", description="One JSON object a line, or plain text.")


class DrainSettings(SettingsGroup):
    """How a service leaves after SIGTERM."""

    drain_delay_seconds: float = Field(
        0.0,
        ge=0,
        description="After SIGTERM, seconds in which new requests are still accepted while readiness is already off, "
        "so that load balancers notice.",
    )
    drain_timeout_seconds: float = Field(
        600.0, ge=0, description="After SIGTERM, most seconds that running requests are given to end."
    )


class RedisSettings(SettingsGroup):
    """Where request state is kept."""

    redis_url: str | None = Field(
        None,
        description="redis://host:port/db of a Redis-compatible server; without it no request state is kept.",
    )
    redis_timeout_seconds: float = Field(
        0.25, gt=0, description="Most seconds one call to Redis may take; then it counts as failed."
    )
    record_ttl_seconds: int = Field(3600, ge=1, description="Seconds that a request's record outlives its last change.")

    @field_validator("redis_url")
    @classmethod
    def _check_redis_url(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith(REDIS_SCHEMES):
            raise ValueError(f"a Redis URL begins with one of {', '.join(REDIS_SCHEMES)}")
        return value


SettingsT = TypeVar("SettingsT", bound=SettingsGroup)


def load_settings(group: type[SettingsT], *, program: str, arguments: Sequence[str] | None = None) -> SettingsT:
    """Reads flags and environment. A wrong value ends the process with status 2 and one line a setting, which names
    the flag, the variable, the rule that was broken and the value."""
    parser = argparse.ArgumentParser(prog=program, description=group.__doc__, allow_abbrev=False)
    flags: CliSettingsSource[argparse.ArgumentParser] = CliSettingsSource(
        group, root_parser=parser, add_argument_method=_add_flag
    )
    try:
        return CliApp.run(
            group, cli_args=list(sys.argv[1:] if arguments is None else arguments), cli_settings_source=flags
        )
    except ValidationError as error:
        for line in _explain(error):
            sys.stderr.write(f"{program}: {line}\n")
        raise SystemExit(2) from None


def _add_flag(parser: argparse.ArgumentParser, *names: str, **options: Any) -> None:
    """A flag whose value is named after itself, not after a Python type, and that tells no default of None."""
    if not str(options.get("metavar", "{")).startswith("{"):
        options["metavar"] = names[-1].rsplit("-", 1)[-1].upper()
    if "help" in options:
        options["help"] = options["help"].removesuffix(" (default: None)")
    argparse.ArgumentParser.add_argument(parser, *names, **options)


def _explain(error: ValidationError) -> list[str]:
    lines = []
    for problem in error.errors():
        name, *inside = map(str, problem["loc"] or ("settings",))
        flag, variable = f"--{name.replace('_', '-')}", f"{ENV_PREFIX}{name.upper()}"
        place = f"{'.'.join(inside)}: " if inside else ""
        got = "nothing" if problem["type"] == "missing" else repr(problem["input"])
        lines.append(f"{flag} ({variable}): {place}{problem['msg'].removeprefix('Value error, ')}; got {got}")
    return lines
