"""What a call may ask for, and what it is given where it asks for nothing."""

from __future__ import annotations

import itertools

import pytest

from stallfree_router.request_classes import Terms, cache_salt, resolve_terms
from stallfree_router.settings import RouterSettings
from stallfree_shared.errors import InvalidRequestError
from stallfree_shared.openai_api import CompletionRequest


def terms(settings: dict[str, object] | None = None, *, asked: dict[str, object] | None = None) -> Terms:
    body = CompletionRequest.model_validate({"model": "m", "prompt": "x", **(asked or {})})
    return resolve_terms(body, RouterSettings.model_validate(settings or {}))


@pytest.mark.parametrize("fields", [{}, {"service_tier": "auto"}, {"service_tier": "default"}])
def test_a_call_that_names_no_tier_is_of_the_default_class(fields: dict[str, object]) -> None:
    expected = Terms(service_tier="default", tbt_target_seconds=None, ttft_target_seconds=None, priority=0)
    assert terms(asked=fields) == expected


def test_built_in_tiers_are_flex_and_priority() -> None:
    flex, priority = terms(asked={"service_tier": "flex"}), terms(asked={"service_tier": "priority"})
    assert (flex.service_tier, priority.service_tier) == ("flex", "priority")
    assert priority.priority < terms().priority < flex.priority


def test_a_class_gives_its_values_where_the_call_says_nothing() -> None:
    classes = {"gold": {"tbt_target_seconds": 0.05, "ttft_target_seconds": 1, "priority": -5}}
    gold = terms({"request_classes": classes}, asked={"service_tier": "gold"})
    assert gold == Terms(service_tier="gold", tbt_target_seconds=0.05, ttft_target_seconds=1.0, priority=-5)
    own = terms({"request_classes": classes}, asked={"service_tier": "gold", "priority": -2, "tbt_target_seconds": 2})
    assert (own.tbt_target_seconds, own.ttft_target_seconds, own.priority) == (2.0, 1.0, -2)


def test_the_default_class_can_be_set() -> None:
    settings: dict[str, object] = {"request_classes": {"default": {"tbt_target_seconds": 0.1, "priority": 3}}}
    assert (terms(settings).tbt_target_seconds, terms(settings).priority) == (0.1, 3)


@pytest.mark.parametrize("tier", ["scale", "Flex", "", "gold"])
def test_a_tier_that_is_not_there_is_refused_with_those_that_are(tier: str) -> None:
    with pytest.raises(InvalidRequestError, match="auto, default, flex, priority") as error:
        terms(asked={"service_tier": tier})
    assert error.value.param == "service_tier"


def test_a_tier_that_was_left_out_is_nobodys() -> None:
    with pytest.raises(InvalidRequestError, match=r"auto, default$"):
        terms({"request_classes": {}}, asked={"service_tier": "priority"})


@pytest.mark.parametrize(
    ("settings", "fields", "least"),
    [
        ({}, {"priority": -1}, "0"),
        ({}, {"priority": -1, "service_tier": "flex"}, "0"),
        ({}, {"priority": -11, "service_tier": "priority"}, "-10"),
        ({"min_priority": -20}, {"priority": -21, "service_tier": "priority"}, "-20"),
        ({}, {"tbt_target_seconds": 0.019}, "0.02"),
        ({"min_tbt_target_seconds": 0.1}, {"tbt_target_seconds": 0.05}, "0.1"),
        ({}, {"ttft_target_seconds": 0.1, "service_tier": "flex"}, "0.5"),
    ],
)
def test_a_call_may_not_ask_for_more_than_its_class_and_the_settings_give(
    settings: dict[str, object], fields: dict[str, object], least: str
) -> None:
    with pytest.raises(InvalidRequestError, match=rf"may name {least} or more, got") as error:
        terms(settings, asked=fields)
    assert error.value.param in fields


@pytest.mark.parametrize(
    ("settings", "fields"),
    [
        ({}, {"priority": 0}), ({}, {"priority": 100}), ({}, {"priority": 5, "service_tier": "flex"}),
        ({}, {"priority": -10, "service_tier": "priority"}), ({"min_priority": -100}, {"priority": -100}),
        ({}, {"tbt_target_seconds": 0.02}), ({}, {"ttft_target_seconds": 0.5}),
        ({"request_classes": {"default": {"tbt_target_seconds": 0.01}}}, {"tbt_target_seconds": 0.01}),
    ],
)  # fmt: skip
def test_a_call_may_ask_for_what_its_class_or_the_settings_give_and_for_less(
    settings: dict[str, object], fields: dict[str, object]
) -> None:
    found = terms(settings, asked=fields)
    assert all(getattr(found, name) == value for name, value in fields.items())


@pytest.mark.parametrize("classes", [{"auto": {}}, {"x": {"priority": 101}}, {"x": {"tbt": 1}}, {"x": 5}])
def test_wrong_classes_end_the_start(classes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="request_classes"):
        RouterSettings.model_validate({"request_classes": classes})


def test_b22_a_salt_is_equal_only_for_the_same_tenant_with_the_same_salt() -> None:
    pairs = list(itertools.product(["X", "Y", "", 'X", "Y', "XY"], [None, "X", "Y", "", 'Y", "X', "null"]))
    salts = {cache_salt(tenant, salt) for tenant, salt in pairs}
    assert len(salts) == len(pairs)
    assert {len(salt) for salt in salts} == {64}
    assert cache_salt("X", "Y") == cache_salt("X", "Y")
