"""What is wrong is said at the start, by the name of a flag and a variable that exist."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from stallfree_router.settings import ApiSettings, DiscoverySettings
from stallfree_shared.settings import load_settings


def test_worker_urls_are_split_at_commas_and_trimmed() -> None:
    settings = DiscoverySettings.model_validate({"worker_urls": " http://a:1/, dns+http://workers.ns.svc:8000 ,"})
    assert settings.worker_urls == ("http://a:1", "dns+http://workers.ns.svc:8000")


@pytest.mark.parametrize("url", ["a:1", "ftp://a:1", "http://", "dns+http://workers", "dns+https://workers:1"])
def test_a_wrong_worker_url_is_refused_by_name(url: str) -> None:
    with pytest.raises(ValidationError, match="URL"):
        DiscoverySettings.model_validate({"worker_urls": url})


@pytest.mark.parametrize("source", ["flag", "variable"])
@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("nonsense", "this is not JSON"),
        ("", "this is not JSON"),
        ("[1]", "valid dictionary"),
        ('{"x": 5}', "x: Input should be"),
        ('{"flex": {"priority": 500}}', "flex.priority: Input should be less than or equal to 100; got 500"),
        ('{"flex": {"prio": 1}}', "flex.prio: Extra inputs are not permitted"),
        ('{"auto": {}}', "no class can be called auto"),
    ],
)
def test_wrong_request_classes_end_the_start_with_the_name_of_the_setting(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], source: str, text: str, problem: str
) -> None:
    if source == "variable":
        monkeypatch.setenv("STALLFREE_REQUEST_CLASSES", text)
    with pytest.raises(SystemExit) as end:
        load_settings(ApiSettings, program="p", arguments=["--request-classes", text] if source == "flag" else [])
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("p: --request-classes (STALLFREE_REQUEST_CLASSES): ")
    assert problem in line


def test_request_classes_are_json_in_the_flag_and_in_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    text = '{"gold": {"tbt_target_seconds": 0.05, "priority": -5}}'
    by_flag = load_settings(ApiSettings, program="p", arguments=["--request-classes", text])
    monkeypatch.setenv("STALLFREE_REQUEST_CLASSES", text)
    by_variable = load_settings(ApiSettings, program="p", arguments=[])
    assert by_flag.request_classes == by_variable.request_classes
    assert by_flag.request_classes["gold"].priority == -5
