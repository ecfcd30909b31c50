"""openai_api.py: strict types, ranges, and the shapes of answers."""

from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from stallfree_shared.openai_api import (
    ChatChunkChoice,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatDelta,
    CompletionRequest,
    GenerationBody,
)


def completion(**fields: object) -> CompletionRequest:
    return CompletionRequest.model_validate({"model": "m", "prompt": "x", **fields})


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0}, {"temperature": 2}, {"temperature": 1e-12}, {"temperature": 0.7},
        {"top_p": 1}, {"top_p": 1e-9},
        {"top_k": -1}, {"top_k": 0}, {"top_k": 1}, {"top_k": 10**9},
        {"min_p": 0}, {"min_p": 1},
        {"seed": 0}, {"seed": -(2**63)}, {"seed": 2**63 - 1},
        {"max_tokens": 1}, {"max_tokens": 10**12},
        {"stop": "x"}, {"stop": []}, {"stop": ["\0"]}, {"stop": ["x"] * 16}, {"stop": "x" * 1000},
        {"min_tokens": 0}, {"min_tokens": 10**12},
        {"presence_penalty": -2}, {"presence_penalty": 2}, {"frequency_penalty": -2}, {"frequency_penalty": 0.5},
        {"repetition_penalty": 1e-9}, {"repetition_penalty": 100},
        {"logit_bias": {}}, {"logit_bias": {"0": -100}}, {"logit_bias": {"7": 100.0, "8": 0.5}},
        {"logprobs": 0}, {"logprobs": 20}, {"prompt_logprobs": 0}, {"prompt_logprobs": 20}, {"echo": True},
        {"priority": -100}, {"priority": 100}, {"tbt_target_seconds": 1}, {"ttft_target_seconds": 3600},
        {"cache_salt": "x"}, {"service_tier": "flex"},
    ],
)  # fmt: skip
def test_a43_values_within_the_table_are_accepted(fields: dict[str, object]) -> None:
    assert completion(**fields).model_fields_set >= fields.keys()


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": -0.1}, {"temperature": 2.1}, {"temperature": 1e308}, {"temperature": "hot"},
        {"temperature": float("nan")}, {"temperature": float("inf")}, {"temperature": True},
        {"top_p": 0}, {"top_p": -1}, {"top_p": 1.1},
        {"top_k": -2}, {"top_k": 1.5}, {"top_k": "1"},
        {"min_p": -1}, {"min_p": 2},
        {"seed": 2**63}, {"seed": -(2**63) - 1}, {"seed": 1.5}, {"seed": True},
        {"max_tokens": -1}, {"max_tokens": "5"}, {"max_tokens": 5.0}, {"max_tokens": True},
        {"n": 0}, {"n": "2"}, {"stream": "true"}, {"stream": 1}, {"ignore_eos": "false"},
        {"stop": ""}, {"stop": ["", "END"]}, {"stop": ["a", 1]}, {"stop": [["a"]]}, {"stop": 5},
        {"stop": ["x"] * 17}, {"stop": "x" * 1001},
        {"stop_token_ids": ["1"]}, {"stop_token_ids": [1] * 257},
        {"min_tokens": -1}, {"min_tokens": 1.0}, {"min_tokens": True},
        {"presence_penalty": 2.1}, {"presence_penalty": "1"}, {"frequency_penalty": -2.1},
        {"frequency_penalty": float("nan")}, {"repetition_penalty": 0}, {"repetition_penalty": -1},
        {"repetition_penalty": 101},
        {"logprobs": -1}, {"logprobs": 21}, {"logprobs": True}, {"logprobs": "1"},
        {"prompt_logprobs": -1}, {"prompt_logprobs": 21}, {"prompt_logprobs": False}, {"echo": "true"}, {"echo": 1},
        {"priority": -101}, {"priority": 101}, {"priority": 0.5},
        {"tbt_target_seconds": 0}, {"tbt_target_seconds": 3601}, {"ttft_target_seconds": float("inf")},
        {"cache_salt": ""}, {"cache_salt": "x" * 1001}, {"cache_salt": 5},
        {"service_tier": "x" * 65}, {"service_tier": 5},
        {"response_format": {"type": "xml"}}, {"response_format": {}}, {"response_format": "json_object"},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": "{}"}}},
        {"structured_outputs": []}, {"structured_outputs": {"choice": "a"}}, {"structured_outputs": {"json": 5}},
        {"guided_json": 5}, {"guided_regex": []}, {"guided_choice": "a"}, {"guided_choice": [1]},
        {"guided_grammar": {}},
    ],
)  # fmt: skip
def test_a43_values_outside_the_table_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValidationError) as error:
        completion(**fields)
    assert str(error.value.errors()[0]["loc"][0]) in fields


@pytest.mark.parametrize(
    ("bias", "named"),
    [
        ({"-1": 5}, "token ids"), ({"abc": 1}, "token ids"), ({"05": 1}, "token ids"), ({" 5": 1}, "token ids"),
        ({"5.0": 1}, "token ids"), ({"\u0665": 1}, "token ids"), ({"9" * 5000: 1}, "token ids"),
        ({"5": 101}, "from -100 to 100, got 101"), ({"5": -100.5}, "got -100.5"), ({"5": float("nan")}, "got nan"),
        ({"5": 10**400}, "got 1000"), ({"5": "x"}, "from -100 to 100"), ({"5": True}, "from -100 to 100"),
        ({"5": None}, "from -100 to 100"), ([5], "must be an object"), (5, "must be an object"),
        ({str(number): 1 for number in range(1025)}, "at most 1024 token ids, got 1025"),
    ],
)  # fmt: skip
def test_a29_a_bad_logit_bias_is_refused_with_its_reason(bias: object, named: str) -> None:
    with pytest.raises(ValidationError) as error:
        completion(logit_bias=bias)
    (problem,) = error.value.errors()
    assert problem["loc"] == ("logit_bias",)
    assert named in problem["msg"]
    assert len(problem["msg"]) < 200


def test_a29_a_logit_bias_is_read_by_token_id() -> None:
    assert completion(logit_bias={"5": 1, "191222": -100}).logit_bias == {5: 1.0, 191222: -100.0}


@pytest.mark.parametrize(
    ("fields", "num_output", "num_prompt"),
    [
        ({}, None, None), ({"logprobs": 0}, 0, None), ({"logprobs": 3, "echo": True}, 3, 3),
        ({"echo": True}, None, None),
        ({"prompt_logprobs": 2}, None, 2), ({"logprobs": 1, "echo": True, "prompt_logprobs": 2}, 1, 2),
    ],
)  # fmt: skip
def test_an_echo_with_logprobs_wants_those_of_the_prompt(
    fields: dict[str, object], num_output: int | None, num_prompt: int | None
) -> None:
    body = completion(**fields)
    assert (body.wanted_logprobs, body.wanted_prompt_logprobs) == (num_output, num_prompt)


@pytest.mark.parametrize("prompt", [[1.5], [True], ["a", 1], [[1], "a"], [[1, "a"]], [[[1]]], [], {}, 5, None])
def test_a31_prompts_of_wrong_or_mixed_types_are_refused(prompt: object) -> None:
    with pytest.raises(ValidationError):
        completion(prompt=prompt)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("a", ("a",)), (["a", "b"], ("a", "b")), ([1, 2], ((1, 2),)), ([[1, 2], [3]], ((1, 2), (3,))), ([""], ("",))],
)
def test_a31_a_prompt_is_text_or_ids_or_a_list_of_either(prompt: object, expected: tuple[object, ...]) -> None:
    assert completion(prompt=prompt).prompt == expected


def test_equal_stop_strings_are_one() -> None:
    assert completion(stop=["a", "b", "a"]).stop == ("a", "b")


def chat_body(**fields: object) -> ChatCompletionRequest:
    return ChatCompletionRequest.model_validate(
        {"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}
    )


@pytest.mark.parametrize(
    ("fields", "expected"),
    [({}, None), ({"logprobs": False, "top_logprobs": 0}, None), ({"logprobs": True}, 0),
     ({"logprobs": True, "top_logprobs": 20}, 20)],
)  # fmt: skip
def test_chats_ask_for_logprobs_by_a_boolean(fields: dict[str, object], expected: int | None) -> None:
    assert chat_body(**fields).wanted_logprobs == expected


@pytest.mark.parametrize(
    "fields",
    [{"logprobs": 1}, {"logprobs": 0}, {"top_logprobs": 1}, {"top_logprobs": 1, "logprobs": False},
     {"top_logprobs": 21, "logprobs": True}, {"top_logprobs": -1, "logprobs": True}, {"max_tokens": 0}],
)  # fmt: skip
def test_other_ways_to_ask_a_chat_for_logprobs_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValidationError) as error:
        chat_body(**fields)
    assert error.value.errors()[0]["loc"][0] in fields


def chat(content: object, role: str = "user", **fields: object) -> ChatCompletionRequest:
    message = {"role": role, "content": content, **fields}
    return ChatCompletionRequest.model_validate({"model": "m", "messages": [message]})


@pytest.mark.parametrize("role", ["user", "system", "assistant", "developer"])
def test_a38_text_parts_are_joined_by_a_newline(role: str) -> None:
    parts = [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]
    assert chat(parts, role).messages == chat("A\nB", role).messages


@pytest.mark.parametrize(
    "content",
    [None, 5, {}, [1], [{}], [{"type": "text"}], [{"type": "text", "text": None}], [{"text": "A"}], [{"type": 3}],
     [{"type": "image_url", "image_url": {"url": "http://x"}}]],
)  # fmt: skip
def test_a38_content_that_is_no_text_is_refused(content: object) -> None:
    with pytest.raises(ValidationError) as error:
        chat(content)
    assert error.value.errors()[0]["loc"] == ("messages", 0, "content")


@pytest.mark.parametrize("role", ["robot", "tool", "function", "", 5])
def test_a39_unknown_roles_are_refused(role: str) -> None:
    with pytest.raises(ValidationError):
        chat("x", role)


def test_a45_max_completion_tokens_wins_over_max_tokens() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 50}
    assert ChatCompletionRequest.model_validate({**body, "max_completion_tokens": 5}).wanted_max_tokens == 5
    assert ChatCompletionRequest.model_validate({**body, "max_completion_tokens": None}).wanted_max_tokens == 50
    with pytest.raises(ValidationError):
        ChatCompletionRequest.model_validate({**body, "max_completion_tokens": 0})


def test_a47_fields_that_are_not_known_are_ignored() -> None:
    assert completion(temprature=0, user="x") == completion()


def test_a_body_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        completion().__setattr__("n", 5)


def test_a_chunk_shows_a_null_finish_reason_and_leaves_out_what_it_has_not() -> None:
    choice = ChatChunkChoice(index=0, delta=ChatDelta(content="x"), finish_reason=None)
    chunk = ChatCompletionChunk(id="i", created=1, model="m", choices=[choice])
    assert json.loads(chunk.model_dump_json()) == {
        "id": "i",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "m",
        "choices": [{"index": 0, "delta": {"content": "x"}, "logprobs": None, "finish_reason": None}],
    }


def test_usage_is_asked_for_by_stream_options() -> None:
    body: GenerationBody = completion(stream_options={"include_usage": True})
    assert body.include_usage
    assert not completion(stream_options={"include_usage": None}).include_usage
