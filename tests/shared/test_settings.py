"""Settings: a flag wins over the environment, and a wrong value ends the start with its name, rule and value."""

from __future__ import annotations

import subprocess
import sys

import pytest
from pydantic import Field, ValidationError

from stallfree_shared.settings import RedisSettings, SettingsGroup, load_settings


class _Group(SettingsGroup):
    max_things: int = Field(3, ge=1, description="Most things at once.")
    is_eager: bool = Field(False, description="Do not wait.")


def test_a_flag_wins_over_the_environment_and_that_over_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_settings(_Group, program="p", arguments=[]).max_things == 3
    monkeypatch.setenv("STALLFREE_MAX_THINGS", "5")
    assert load_settings(_Group, program="p", arguments=[]).max_things == 5
    assert load_settings(_Group, program="p", arguments=["--max-things", "7", "--is-eager"]).max_things == 7


@pytest.mark.parametrize("value", ["0", "many", "1.5", ""])
def test_a_wrong_value_ends_with_status_2_and_names_flag_variable_and_value(
    value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        load_settings(_Group, program="stallfree-thing", arguments=["--max-things", value])
    assert exit_info.value.code == 2
    line = capsys.readouterr().err
    assert line.startswith("stallfree-thing: --max-things (STALLFREE_MAX_THINGS): ")
    assert repr(value) in line


def test_an_unknown_flag_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        load_settings(_Group, program="p", arguments=["--max-thing", "1"])
    assert exit_info.value.code == 2
    assert "--max-thing" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["localhost:6379", "http://a:1", ""])
def test_a_wrong_redis_url_is_refused(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load_settings(RedisSettings, program="p", arguments=["--redis-url", url])
    assert "--redis-url (STALLFREE_REDIS_URL): a Redis URL begins with" in capsys.readouterr().err


def test_settings_cannot_be_changed() -> None:
    settings = load_settings(_Group, program="p", arguments=[])
    with pytest.raises(ValidationError):
        settings.max_things = 9  # type: ignore[misc]  # the type checker knows it too


@pytest.mark.parametrize("module", ["stallfree_router.main", "stallfree_worker.main"])
def test_help_tells_every_setting_of_a_service(module: str) -> None:
    result = subprocess.run([sys.executable, "-m", module, "--help"], check=True, capture_output=True, text=True)
    assert "--port PORT" in result.stdout
    assert "default: None" not in result.stdout
    assert "(default: " in result.stdout
