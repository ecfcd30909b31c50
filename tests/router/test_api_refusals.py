"""What the API refuses: always a status, always OpenAI's shape, never more words than needed."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import httpx
import pytest

from stallfree_shared.errors import UnavailableError
from tests.support.router_under_test import GENERATION_PATHS, RouterUnderTest, router_under_test

Fields = dict[str, object]

COMPLETION: Fields = {"model": "scripted", "prompt": "hello"}
CHAT: Fields = {"model": "scripted", "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture
async def router() -> AsyncIterator[RouterUnderTest]:
    async with router_under_test(api_key=None, max_body_bytes=200_000, max_choices=8) as router:
        yield router


def error_of(response: httpx.Response, status: int) -> dict[str, str | None]:
    """The error object of a refusal, whose form is checked."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert len(response.content) < 10_000
    (name,) = body = response.json()
    assert name == "error"
    error: dict[str, str | None] = body["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert "Traceback" not in response.text
    return error


@pytest.mark.parametrize("path", GENERATION_PATHS)
@pytest.mark.parametrize("max_tokens", ["absent", None, 10])
async def test_a04_a_prompt_beyond_the_context_is_refused_with_both_numbers(
    client: httpx.AsyncClient, path: str, max_tokens: object
) -> None:
    fields = {**COMPLETION, "prompt": "x" * 2100} if path == "/v1/completions" else chat("x" * 2100)
    if max_tokens != "absent":
        fields["max_tokens"] = max_tokens
    error = error_of(await client.post(path, json=fields), 400)
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == ("prompt" if path == "/v1/completions" else "messages")
    assert "2048" in str(error["message"])
    assert "2100" in str(error["message"])
    assert "-" not in str(error["message"])


@pytest.mark.parametrize(("num_prompt", "max_tokens", "expected"), [(2047, 1, 1), (2000, 48, 48)])
async def test_a05_what_just_fits_is_served(
    client: httpx.AsyncClient, num_prompt: int, max_tokens: int, expected: int
) -> None:
    response = await client.post(
        "/v1/completions", json={**COMPLETION, "prompt": "x" * num_prompt, "max_tokens": max_tokens}
    )
    assert response.status_code == 200
    assert response.json()["choices"][0]["finish_reason"] == "length"
    assert response.json()["usage"]["completion_tokens"] == expected


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "numbers"), [(2048, 1, "2048"), (2000, 49, "2049"), (2048, None, "2048")]
)
async def test_a05_one_token_more_is_refused_with_the_right_numbers(
    client: httpx.AsyncClient, num_prompt: int, max_tokens: int | None, numbers: str
) -> None:
    fields = {**COMPLETION, "prompt": "x" * num_prompt, "max_tokens": max_tokens}
    error = error_of(await client.post("/v1/completions", json=fields), 400)
    assert error["code"] == "context_length_exceeded"
    assert numbers in str(error["message"])
    assert str(num_prompt) in str(error["message"])


async def test_c23_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(client: httpx.AsyncClient) -> None:
    error = error_of(await client.post("/v1/completions", json={**COMPLETION, "prompt": "x" * 150_000}), 400)
    assert error["code"] == "context_length_exceeded"
    assert "at least" in str(error["message"])


@pytest.mark.parametrize("stop", ["", [""], ["", "END"]])
async def test_a12_empty_stop_strings_are_refused(client: httpx.AsyncClient, stop: object) -> None:
    assert error_of(await client.post("/v1/completions", json={**COMPLETION, "stop": stop}), 400)["param"] == "stop"


@pytest.mark.parametrize("stop", [[], None, ["\u0000"]])
async def test_a12_no_stop_string_is_no_stop(client: httpx.AsyncClient, stop: object) -> None:
    response = await client.post("/v1/completions", json={**COMPLETION, "stop": stop})
    assert response.json()["choices"][0]["text"] == "hello"


@pytest.mark.parametrize("stream", [False, True])
async def test_a18_half_a_surrogate_pair_is_refused(client: httpx.AsyncClient, *, stream: bool) -> None:
    text = json.dumps(chat("hi SURROGATE") | {"stream": stream})
    error = error_of(await client.post("/v1/chat/completions", content=text.replace("SURROGATE", "\\ud800")), 400)
    assert "Unicode" not in str(error["message"])
    whole = await client.post("/v1/chat/completions", content=text.replace("SURROGATE", "\\ud83d\\udd25"))
    assert whole.status_code == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 100_000}, "n"),
        ({"n": 9}, "n"),
        ({"prompt": ["x"] * 9}, "prompt"),
        ({"prompt": ["x"] * 3, "n": 3}, "n"),
        ({"best_of": 10**9}, "best_of"),
        ({"logprobs": 10**6}, "logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 266}, "prompt_logprobs"),
        ({"prompt_logprobs": 20, "prompt": "x" * 500, "n": 8}, "prompt_logprobs"),
        ({"logprobs": 20, "echo": True, "prompt": ["x" * 500] * 8}, "logprobs"),
        ({"logit_bias": {str(number): 1 for number in range(1025)}}, "logit_bias"),
        ({"max_tokens": 10**12}, "prompt"),
    ],
)
async def test_a24_huge_demands_are_refused_by_name(client: httpx.AsyncClient, fields: Fields, param: str) -> None:
    assert error_of(await client.post("/v1/completions", json=COMPLETION | fields), 400)["param"] == param


@pytest.mark.parametrize("prompt", [[-1], [10**6], [10**18], [1.5], [True], [[1], "a"]])
async def test_a31_bad_token_ids_are_refused(client: httpx.AsyncClient, prompt: object) -> None:
    assert (
        error_of(await client.post("/v1/completions", json={**COMPLETION, "prompt": prompt}), 400)["param"] == "prompt"
    )


@pytest.mark.parametrize("prompt", ["", [""], [], [[]], ["a", ""], [[1], []]])
async def test_a32_an_empty_prompt_is_refused_and_the_next_call_works(
    client: httpx.AsyncClient, router: RouterUnderTest, prompt: object
) -> None:
    assert (
        error_of(await client.post("/v1/completions", json={**COMPLETION, "prompt": prompt}), 400)["param"] == "prompt"
    )
    assert router.generator.generations == []
    assert (await client.post("/v1/completions", json=COMPLETION)).status_code == 200


@pytest.mark.parametrize("messages", [[], [{"role": "user", "content": ""}]])
async def test_a32_an_empty_chat_is_refused(client: httpx.AsyncClient, messages: object) -> None:
    response = await client.post("/v1/chat/completions", json={**CHAT, "messages": messages})
    assert error_of(response, 400)["param"] == "messages"


async def test_a35_an_error_is_not_larger_than_it_must_be(client: httpx.AsyncClient) -> None:
    messages: list[Fields] = [{"role": 5, "content": "secret"} for _ in range(3000)]
    messages[0]["content"] = "s" * 100_000
    error = error_of(await client.post("/v1/chat/completions", json={"model": "scripted", "messages": messages}), 400)
    assert error["param"] == "messages.0.role"
    assert "secret" not in str(error["message"])
    assert "sss" not in str(error["message"])


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/v1/chat/completions", {"model": "scripted"}, 400),
        ("POST", "/v1/chat/completions", {**CHAT, "messages": "hi"}, 400),
        ("POST", "/v1/chat/completions", {**CHAT, "messages": ["hi"]}, 400),
        ("POST", "/v1/chat/completions", {**CHAT, "temperature": "hot"}, 400),
        ("POST", "/v1/completions", {"prompt": "x"}, 400),
        ("POST", "/v1/completions", {"model": None, "prompt": "x"}, 400),
        ("POST", "/v1/completions", {"model": 5, "prompt": "x"}, 400),
        ("POST", "/v1/completions", [], 400),
        ("POST", "/v1/chat/completion", CHAT, 404),
        ("POST", "/v1/completions/", COMPLETION, 404),
        ("GET", "/", None, 404),
        ("GET", "/v1/completions", None, 405),
        ("PUT", "/v1/models", None, 405),
        ("BREW", "/livez", None, 405),
    ],
)
async def test_a36_every_refusal_has_openais_shape(
    client: httpx.AsyncClient, method: str, path: str, body: object, status: int
) -> None:
    response = await client.request(method, path, json=body)
    error_of(response, status)
    assert (status == 405) == ("allow" in response.headers)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[" * 100_000, b'{"model":NaN}', b'"x"', b"\x1f\x8b\x08"])
async def test_a36_what_is_no_json_object_is_refused(client: httpx.AsyncClient, content: bytes) -> None:
    error_of(await client.post("/v1/completions", content=content), 400)


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"tools": [{"type": "function"}], "tool_choice": "auto"},
        {"tool_choice": "required"},
        {"functions": [{"name": "f"}]},
        {"echo": True},
        {"stream": True, "prompt_logprobs": 0},
        {"modalities": ["text", "audio"]},
        {"audio": {"voice": "alloy"}},
        {"chat_template": "{% for a in range(999) %}{% endfor %}"},
        {"chat_template_kwargs": {"chat_template": "x"}},
        {"continue_final_message": True},
    ],
)
async def test_a37_a40_what_would_change_the_answer_is_refused_by_name(
    client: httpx.AsyncClient, fields: Fields
) -> None:
    error = error_of(await client.post("/v1/chat/completions", json=CHAT | fields), 400)
    assert error["code"] == "unsupported_parameter"
    assert error["param"] in fields


@pytest.mark.parametrize("fields", [{"top_logprobs": 1}, {"suffix": "x"}, {"best_of": 2}])
async def test_a37_so_are_those_of_completions(client: httpx.AsyncClient, fields: Fields) -> None:
    error = error_of(await client.post("/v1/completions", json=COMPLETION | fields), 400)
    assert (error["code"], error["param"]) == ("unsupported_parameter", next(iter(fields)))


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_whitespace_pattern": " *"},
        {"logits_processors": ["x"]},
        {"return_tokens_as_token_ids": True},
        {"structured_outputs": {"structural_tag": "{}", "regex": "a"}},
        {"structured_outputs": {"json": {}, "whitespace_pattern": " *"}},
        {"structured_outputs": {"json": {}, "disable_any_whitespace": True}},
        {"structured_outputs": {"json": {}, "disable_additional_properties": True}},
    ],
)
async def test_a37_what_vllm_knows_and_this_server_would_not_do_is_refused_by_name(
    client: httpx.AsyncClient, fields: Fields
) -> None:
    error = error_of(await client.post("/v1/completions", json=COMPLETION | fields), 400)
    assert error["code"] == "unsupported_parameter"
    assert str(error["param"]).split(".")[0] in fields


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"guided_json": 5}, "guided_json"), ({"structured_outputs": {"json": [1]}}, "structured_outputs.json")],
)
async def test_a43_a_field_of_two_types_is_named_once(client: httpx.AsyncClient, fields: Fields, param: str) -> None:
    error = error_of(await client.post("/v1/completions", json=COMPLETION | fields), 400)
    assert error["param"] == param
    assert str(error["message"]).startswith(f"{param}: must be a JSON schema")


@pytest.mark.parametrize("part", [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "input_audio"}])
async def test_a38_an_image_is_not_supported(client: httpx.AsyncClient, part: Fields) -> None:
    error = error_of(await client.post("/v1/chat/completions", json=chat([part])), 400)
    assert (error["code"], error["param"]) == ("unsupported_parameter", "messages.0.content")


async def test_a39_without_a_chat_template_chat_is_refused_and_completions_work(
    client: httpx.AsyncClient, router: RouterUnderTest
) -> None:
    router.models.card_by_model["scripted"] = router.card.model_copy(update={"chat_template": None})
    assert error_of(await client.post("/v1/chat/completions", json=CHAT), 400)["param"] == "messages"
    assert (await client.post("/v1/completions", json=COMPLETION)).status_code == 200


async def test_a41_a_body_beyond_the_limit_is_a_413(client: httpx.AsyncClient, router: RouterUnderTest) -> None:
    error_of(await client.post("/v1/completions", json={**COMPLETION, "prompt": "x" * 300_000}), 413)

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(30):
            yield b" " * 10_000

    error_of(await client.post("/v1/completions", content=chunks()), 413)
    assert router.outcomes() == {"rejected": 2}


async def test_a41_a_compressed_body_is_refused(client: httpx.AsyncClient) -> None:
    headers = {"Content-Encoding": "gzip"}
    error_of(await client.post("/v1/completions", content=b"\x1f\x8b", headers=headers), 415)


@pytest.mark.parametrize(
    "fields",
    [
        {"temprature": 0},
        {"user": "x", "metadata": {}, "store": True, "service_tier": "auto", "parallel_tool_calls": True},
        {"top_k": 5, "min_p": 0.1, "ignore_eos": False, "stop_token_ids": []},
        {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "logprobs": False, "logit_bias": {}},
        {"tools": [{"type": "function"}], "tool_choice": "none"},
        {"presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "n": 1, "best_of": 1},
    ],
)
async def test_a47_harmless_and_unknown_fields_are_accepted(client: httpx.AsyncClient, fields: Fields) -> None:
    assert (await client.post("/v1/chat/completions", json=CHAT | fields)).status_code == 200


@pytest.mark.parametrize("fields", [{"stream": "true"}, {"n": "2"}, {"max_tokens": "5"}, {"max_tokens": 5.0}])
async def test_a47_types_are_not_coerced(client: httpx.AsyncClient, fields: Fields) -> None:
    assert error_of(await client.post("/v1/chat/completions", json=CHAT | fields), 400)["param"] in fields


async def test_a43_a_refusal_names_field_limit_and_value(client: httpx.AsyncClient) -> None:
    error = error_of(await client.post("/v1/completions", json={**COMPLETION, "temperature": 2.5}), 400)
    assert error["param"] == "temperature"
    assert error["message"] == "temperature: Input should be less than or equal to 2, got 2.5"


@pytest.mark.parametrize("model", ["nope", "SCRIPTED", " scripted ", "", "a/b", "x" * 100_000])
async def test_c36_an_unknown_model_is_a_404_from_the_router_itself(
    client: httpx.AsyncClient, router: RouterUnderTest, model: str
) -> None:
    error = error_of(await client.post("/v1/completions", json={**COMPLETION, "model": model}), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert router.generator.generations == []
    assert router.value("stallfree_router_requests_total", model="other", outcome="rejected") == 1


async def test_without_any_worker_a_call_is_a_503_to_be_tried_again(
    client: httpx.AsyncClient, router: RouterUnderTest
) -> None:
    router.models.card_by_model.clear()
    response = await client.post("/v1/completions", json=COMPLETION)
    assert error_of(response, 503)["code"] == "unavailable"
    assert response.headers["retry-after"] == "1"


async def test_a_stream_that_no_worker_takes_has_a_proper_status(
    client: httpx.AsyncClient, router: RouterUnderTest
) -> None:
    router.models.is_usable = False
    router.generator.error = UnavailableError("no worker can serve the model", retry_after_seconds=5)
    response = await client.post("/v1/chat/completions", json=CHAT | {"stream": True})
    error_of(response, 503)
    assert response.headers["retry-after"] == "5"


async def test_beyond_the_limit_of_calls_a_call_is_a_429(client: httpx.AsyncClient) -> None:
    async with router_under_test(max_in_flight_requests=1) as router, router.served() as port:
        router.generator.hold()
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as other:
            async with other.stream("POST", "/v1/completions", json=COMPLETION | {"stream": True}) as running:
                assert running.status_code == 200
                response = await other.post("/v1/completions", json=COMPLETION)
                assert error_of(response, 429)["type"] == "rate_limit_error"
                assert response.headers["retry-after"] == "1"
            assert router.outcomes()["rejected"] == 1


async def test_d06_labels_do_not_grow_with_what_clients_write(
    client: httpx.AsyncClient, router: RouterUnderTest
) -> None:
    await client.post("/v1/completions", json=COMPLETION | {"model": "first"})
    await client.get("/v1/first")
    before = len(str((await client.get("/metrics")).text).splitlines())
    for number in range(50):
        headers = {"X-Request-Id": f"id-{number}"}
        await client.post("/v1/completions", json=COMPLETION | {"model": f"m{number}"}, headers=headers)
        await client.request(f"BREW{number}", f"/v1/{number}", headers=headers)
    assert len(str((await client.get("/metrics")).text).splitlines()) == before


async def test_keys_are_needed_on_every_v1_path_and_on_no_other() -> None:
    async with router_under_test(api_key="sesame") as router, router.client() as client:
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "sesame"},
            {"Authorization": "Bearer é"},
        ):
            encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
            for method, path in (("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/v1/nothing")):
                response = await client.request(method, path, headers=encoded)
                assert error_of(response, 401)["code"] == "invalid_api_key"
                assert response.headers["www-authenticate"] == "Bearer"
        good = {"Authorization": "Bearer sesame"}
        assert (await client.post("/v1/completions", json=COMPLETION, headers=good)).status_code == 200
        assert (await client.get("/livez")).status_code == 200
        assert router.outcomes() == {"rejected": 4, "stop": 1}


async def test_while_draining_is_over_new_calls_are_a_503() -> None:
    async with router_under_test() as router, router.client() as client:
        await router.drain.run(router.settings.model_copy(update={"drain_delay_seconds": 0}))
        assert error_of(await client.post("/v1/completions", json=COMPLETION), 503)["code"] == "draining"
        assert error_of(await client.get("/readyz"), 503)["code"] == "draining"
        assert (await client.get("/livez")).status_code == 200


def chat(content: object) -> Fields:
    return {"model": "scripted", "messages": [{"role": "user", "content": content}]}
