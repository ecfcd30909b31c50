"""The error tree: what travels as an `ErrorInfo` comes back as the same error."""

from __future__ import annotations

import pytest

from stallfree_shared import errors
from stallfree_shared.errors import ErrorInfo, StallfreeError

ALL = [error for error in vars(errors).values() if isinstance(error, type) and issubclass(error, StallfreeError)]


def test_every_error_has_a_code_of_its_own() -> None:
    codes = [error.code for error in ALL]
    assert len(codes) == len(set(codes)) > 10


@pytest.mark.parametrize("error", ALL)
def test_an_error_survives_the_wire(error: type[StallfreeError]) -> None:
    sent = error("too much: 5 of 3", param="max_tokens", retry_after_seconds=2.5)
    received = StallfreeError.from_info(ErrorInfo.model_validate_json(sent.info.model_dump_json()))
    assert type(received) is error
    assert (received.message, received.param) == ("too much: 5 of 3", "max_tokens")
    assert received.retry_after_seconds == 2.5
    assert received.http_status == error.http_status


def test_an_unknown_code_becomes_a_serving_error() -> None:
    received = StallfreeError.from_info(ErrorInfo(message="?", type="server_error", code="of_a_newer_version"))
    assert type(received) is errors.ServingError


@pytest.mark.parametrize("error", ALL)
def test_only_a_users_mistake_is_a_4xx_other_than_429(error: type[StallfreeError]) -> None:
    is_users = issubclass(error, errors.InvalidRequestError)
    assert (400 <= error.http_status < 500 and error.http_status != 429) == is_users
    assert not (is_users and error.is_retryable)
