"""The worker as routers see it: a real process with a scripted model, real sockets, every route of the wire."""

from __future__ import annotations

import asyncio
import hashlib
import json
import socket
import struct
import time
from collections.abc import Iterator

import httpx
import pytest

from stallfree_shared.wire import MAX_DEFINITION_BYTES, ModelCard, RequestId, StructuredOutput, SubmitAccepted, Usage
from tests.support.scripted import EOS, FAIL_ROW, SLOW, scripted_card, scripted_logprobs
from tests.support.waiting import wait_until, wait_until_sync
from tests.support.wire_client import WireClient, WorkerProcess, connect, scripted_worker

A, B, C = 40, 41, 42
MANY = 100_000


@pytest.fixture(scope="module")
def worker() -> Iterator[WorkerProcess]:
    with scripted_worker("--token-budget=64", "--max-num-seqs=4") as worker:
        yield worker


def _is_idle(client: WireClient) -> bool:
    status = client.status
    return (
        status.requests_running == status.requests_waiting == status.prefill_tokens_left == 0
        and status.kv_free_tokens == status.kv_total_tokens > 0
    )


def _raw_stream(worker: WorkerProcess, connection_id: str) -> socket.socket:
    """A frame stream of which only the first bytes are read, through as small a buffer as there is."""
    host, port = worker.url.removeprefix("http://").split(":")
    stream = socket.socket()
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    stream.connect((host, int(port)))
    stream.sendall(f"GET /wire/frames?connection_id={connection_id} HTTP/1.1\r\nHost: worker\r\n\r\n".encode())
    assert stream.recv(100).startswith(b"HTTP/1.1 200")
    return stream


async def _wait_until_freed(
    worker: WorkerProcess, client: WireClient, *, since_step: float, timeout: float = 5
) -> None:
    """All blocks are back, at most two steps after `since_step`."""
    await wait_until(lambda: _is_idle(client), timeout, what="all blocks free")
    assert worker.metric("step_seconds_count") - since_step <= 2


async def test_request_streams_its_tokens_and_ends_with_usage(worker: WorkerProcess) -> None:
    async with connect(worker) as client:
        request = await client.submit([A, B, C])
        last = await client.end_of(request)
        assert client.tokens(request) == [A, B, C, EOS]
        assert [event.index for event in client.events(request)] == [0, 1, 2, 3]
        assert last.finish_reason == "stop"
        assert last.usage == Usage(prompt_tokens=3, completion_tokens=4)


async def test_usage_tells_how_much_of_the_prompt_the_prefix_cache_had(worker: WorkerProcess) -> None:
    async with connect(worker) as client:
        prompt = [C, B] * 50
        usages = [(await client.end_of(await client.submit(prompt))).usage for _ in range(2)]
        assert usages == [
            Usage(prompt_tokens=100, completion_tokens=101, cached_tokens=cached_tokens) for cached_tokens in (0, 96)
        ]


async def test_max_tokens_ends_a_request_with_length(worker: WorkerProcess) -> None:
    async with connect(worker) as client:
        request = await client.submit([A, B, C], max_tokens=2)
        assert (await client.end_of(request)).finish_reason == "length"
        assert client.tokens(request) == [A, B]


async def test_first_frame_is_the_status_and_more_follow_while_idle(worker: WorkerProcess) -> None:
    async with connect(worker) as client:
        assert client.frames[0].status is not None
        assert client.frames[0].status.is_ready
        await wait_until(lambda: len(client.frames) >= 4, 2, what="a status each half second")
        sequences = [frame.status.sequence for frame in client.frames if frame.status is not None]
        assert sequences == sorted(set(sequences))


async def test_status_with_a_higher_sequence_than_the_answer_includes_the_request(worker: WorkerProcess) -> None:
    async with connect(worker) as client:
        slow = await client.submit([SLOW] * 100)
        for number in range(6):  # some of these are answered in the midst of a slow step
            response = await client.post(client.request([A] * 500, request_id=f"later-{number}"))
            accepted = SubmitAccepted.model_validate_json(response.content)
            await wait_until(lambda: client.status.sequence > accepted.status_sequence, 5)  # noqa: B023 - awaited here
            first = next(f.status for f in client.frames if f.status and f.status.sequence > accepted.status_sequence)
            assert first.requests_running + first.requests_waiting == 2 + number
        for number in range(6):
            await client.cancel(RequestId(f"later-{number}"))
        await client.cancel(slow)
        await wait_until(lambda: _is_idle(client))


async def test_one_step_is_one_frame_for_all_requests_of_a_connection(worker: WorkerProcess) -> None:
    async with connect(worker) as client, connect(worker) as other:
        requests = [await client.submit([SLOW, *[A] * 20]) for _ in range(3)]
        mine = await other.submit([SLOW, *[B] * 20])
        for request in requests:
            await client.end_of(request)
        await other.end_of(mine)
        assert max(len(frame.events) for frame in client.frames) == 3
        assert {event.request_id for frame in other.frames for event in frame.events} == {mine}


async def test_model_card_and_tokenizer_are_served_with_their_hash(worker: WorkerProcess) -> None:
    card = ModelCard.model_validate_json(worker.get("/wire/model").content)
    assert card == scripted_card()
    tokenizer = worker.get("/wire/tokenizer")
    assert hashlib.sha256(tokenizer.content).hexdigest() == card.tokenizer_sha256
    etag = tokenizer.headers["etag"]
    assert etag == f'"{card.tokenizer_sha256}"'
    assert worker.get("/wire/tokenizer", headers={"If-None-Match": etag}).status_code == 304


def test_the_tokenizer_is_there_before_the_model_is() -> None:
    with scripted_worker(environment={"SCRIPTED_LOAD_SECONDS": "3600"}, wait=False) as worker:
        wait_until_sync(lambda: _is_told(worker, "/wire/tokenizer"), what="the tokenizer")
        assert not _is_told(worker, "/wire/model")
        content, head = worker.get("/wire/tokenizer").content, httpx.head(f"{worker.url}/wire/tokenizer")
        sha256 = scripted_card().tokenizer_sha256
        assert hashlib.sha256(content).hexdigest() == sha256
        assert (head.headers["etag"], head.content) == (f'"{sha256}"', b"")


def _is_told(worker: WorkerProcess, path: str) -> bool:
    try:
        return worker.get(path).is_success
    except httpx.ConnectError:
        return False


async def test_b14_cancel_in_mid_prefill_frees_all_within_two_steps_and_shows_no_token(worker: WorkerProcess) -> None:
    async with connect(worker) as client:
        request = await client.submit([SLOW] * 640)
        await wait_until(lambda: 0 < client.status.prefill_tokens_left < 600, what="mid-prefill")
        step = worker.metric("step_seconds_count")
        await client.cancel(request)
        await _wait_until_freed(worker, client, since_step=step)
        assert client.events(request) == []


async def test_a50_cancel_in_mid_decode_frees_all_within_two_steps(worker: WorkerProcess) -> None:
    async with connect(worker) as client:
        request = await client.submit([SLOW] * 50)
        await wait_until(lambda: len(client.tokens(request)) > 1, what="a few tokens")
        step = worker.metric("step_seconds_count")
        await client.cancel(request)
        await _wait_until_freed(worker, client, since_step=step)
        assert worker.metric("requests_running") == worker.metric("requests_waiting") == 0


async def test_cancel_while_queued_frees_it_and_leaves_the_others_alone(worker: WorkerProcess) -> None:
    async with connect(worker) as client:
        running = [await client.submit([SLOW] * 8) for _ in range(4)]
        await wait_until(lambda: client.status.requests_running == 4, what="all places taken")
        queued = await client.submit([A])
        await wait_until(lambda: client.status.requests_waiting == 1, what="one waits")
        await client.cancel(queued)
        for request in running:
            await client.end_of(request)
            assert client.tokens(request) == [SLOW] * 8 + [EOS]
        await wait_until(lambda: _is_idle(client))
        assert client.events(queued) == []


async def test_a50_closed_stream_frees_its_requests_within_two_steps_and_counts_them_aborted(
    worker: WorkerProcess,
) -> None:
    async with connect(worker) as watcher:
        aborted = worker.metric("requests_total", outcome="abort")
        async with connect(worker) as client:
            request = await client.submit([SLOW] * 200)
            await client.submit([SLOW] * 200)
            await wait_until(lambda: len(client.tokens(request)) > 0)
            step = worker.metric("step_seconds_count")
        await _wait_until_freed(worker, watcher, since_step=step)
        assert worker.metric("requests_total", outcome="abort") - aborted == 2


async def test_a50_streams_that_end_by_fin_or_rst_again_and_again_leave_nothing_behind(worker: WorkerProcess) -> None:
    aborted = worker.metric("requests_total", outcome="abort")
    async with connect(worker) as client:
        for number in range(40):
            name = f"leaver-{number}"
            with _raw_stream(worker, name) as stream:
                request = client.request([A] * 1000, request_id=name, max_tokens=4000)
                response = await client.post(request.model_copy(update={"connection_id": name}))
                assert response.status_code == 202
                if number % 2:
                    stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close by RST
        await wait_until(lambda: worker.metric("requests_total", outcome="abort") - aborted == 40, what="40 aborts")
        await wait_until(lambda: _is_idle(client))


async def test_a53_request_id_used_twice_at_once_is_refused_and_the_first_goes_on(worker: WorkerProcess) -> None:
    async with connect(worker) as client:
        request = await client.submit([SLOW, A, A], request_id="same")
        response = await client.post(client.request([B], request_id="same"))
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "request_id"
        await client.end_of(request)
        assert client.tokens(request) == [SLOW, A, A, EOS]


async def test_a53_two_attempts_of_one_request_do_not_mix_and_cancel_hits_its_own(worker: WorkerProcess) -> None:
    async with connect(worker) as client:
        request = await client.submit([SLOW, A, A, A], request_id="twin", attempt=1)
        await client.submit([SLOW, B, B, B], request_id="twin", attempt=2)
        await client.cancel(request, attempt=1)
        await client.end_of(request, attempt=2)
        assert client.tokens(request, attempt=2) == [SLOW, B, B, B, EOS]
        assert A not in client.tokens(request, attempt=2)


async def test_a53_request_id_is_free_again_right_after_its_cancel(worker: WorkerProcess) -> None:
    async with connect(worker) as client:
        for _ in range(20):
            request = await client.submit([A] * 1000, request_id="again", max_tokens=4000)
            await wait_until(lambda: len(client.tokens(RequestId("again"))) > 0)
            await client.cancel(request)
            client.forget()
            await client.submit([B, B], request_id="again")
            await client.end_of(request)
            tokens = client.tokens(request)  # what was on its way to us before the cancel comes first
            assert tokens[tokens.index(B) :] == [B, B, EOS]
            client.forget()


async def test_broken_row_is_an_error_event_that_is_not_retryable_and_the_worker_stays_ready(
    worker: WorkerProcess,
) -> None:
    async with connect(worker) as client:
        errors = worker.metric("requests_total", outcome="error")
        bad = await client.submit([A, FAIL_ROW])
        good = await client.submit([A, B])
        last = await client.end_of(bad)
        assert last.error is not None
        assert last.error.code == "step_failed"
        assert (last.index, last.token_ids) == (1, ())
        await client.end_of(good)
        assert client.tokens(good) == [A, B, EOS]
        assert worker.metric("requests_total", outcome="error") == errors + 1
        assert worker.is_ready()


async def test_engine_refusal_is_the_only_event_of_its_request(worker: WorkerProcess) -> None:
    async with connect(worker) as client:
        rejected = worker.metric("requests_total", outcome="rejected")
        request = await client.submit([A] * 10, max_tokens=MANY)
        error = (await client.end_of(request)).error
        assert error is not None
        assert error.code == "context_length_exceeded"
        assert len(client.events(request)) == 1
        assert worker.metric("requests_total", outcome="rejected") - rejected == 1


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"prompt_token_ids": []}, "prompt_token_ids"),
        ({"prompt_token_ids": [A, 277]}, "prompt_token_ids"),
        ({"prompt_token_ids": [-1]}, "prompt_token_ids"),
        ({"prompt_token_ids": "no list"}, "prompt_token_ids"),
        ({"prompt_token_ids": [1.5]}, "prompt_token_ids.0"),
        ({"attempt": 0}, "attempt"),
        ({"sampling": {"max_tokens": 0}}, "sampling.max_tokens"),
        ({"sampling": {"max_tokens": 1, "presence_penalty": 2.5}}, "sampling.presence_penalty"),
        ({"sampling": {"max_tokens": 1, "frequency_penalty": float("nan")}}, "sampling.frequency_penalty"),
        ({"sampling": {"max_tokens": 1, "repetition_penalty": 0.0}}, "sampling.repetition_penalty"),
        ({"sampling": {"max_tokens": 1, "logprobs": 21}}, "sampling.logprobs"),
        ({"sampling": {"max_tokens": 1, "prompt_logprobs": -1}}, "sampling.prompt_logprobs"),
        ({"sampling": {"max_tokens": 1, "min_tokens": -1}}, "sampling.min_tokens"),
        ({"sampling": {"max_tokens": 1, "min_tokens": 2}}, "min_tokens"),
        ({"sampling": {"max_tokens": 1, "logit_bias": {"277": 1.0}}}, "logit_bias"),
        ({"sampling": {"max_tokens": 1, "logit_bias": {"5": float("nan")}}}, "logit_bias"),
        ({"sampling": {"max_tokens": 1, "stop_token_ids": [-1]}}, "stop_token_ids"),
    ],
)
async def test_wrong_submit_is_a_400_of_our_shape_that_names_the_field(
    worker: WorkerProcess, change: dict[str, object], field: str
) -> None:
    async with connect(worker) as client:
        body = {**client.request([A]).model_dump(mode="json"), **change}
        response = await client.http.post("/wire/requests", content=json.dumps(body))
        assert response.status_code == 400
        error = response.json()["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert error["param"] == field


async def test_log_probabilities_arrive_for_each_token_and_for_the_prompt_chunk_by_chunk(worker: WorkerProcess) -> None:
    prompt = [A, B, C] * 50
    async with connect(worker) as client:
        submit = client.request(prompt, request_id="scored", max_tokens=4)
        sampling = submit.sampling.model_copy(update={"logprobs": 5, "prompt_logprobs": 2})
        response = await client.post(submit.model_copy(update={"sampling": sampling}))
        assert response.status_code == 202
        await client.end_of(submit.request_id)
        events = client.events(submit.request_id)
        assert [(event.index, len(event.token_ids)) for event in events] == [
            (0, 0),
            (0, 0),
            (0, 1),
            (1, 1),
            (2, 1),
            (3, 1),
        ]
        told = [one for event in events for one in event.logprobs or ()]
        assert told == [scripted_logprobs(token_id, 5) for token_id in (A, B, C, A)]
        of_prompt = [one for event in events for one in event.prompt_logprobs or ()]
        assert of_prompt == [scripted_logprobs(token_id, 2) for token_id in prompt[1:]]
        assert [len(event.prompt_logprobs or ()) for event in events[:3]] == [64, 64, 21]
        assert events[-1].usage == Usage(prompt_tokens=150, completion_tokens=4)
        plain = await client.submit([A, B])
        await client.end_of(plain)
        assert all(event.logprobs is event.prompt_logprobs is None for event in client.events(plain))


async def test_b14_a_request_that_leaves_while_its_prompt_is_scored_leaves_nothing(worker: WorkerProcess) -> None:
    async with connect(worker) as client:
        submit = client.request([SLOW] * 640, request_id="scored-and-gone")
        sampling = submit.sampling.model_copy(update={"prompt_logprobs": 1})
        await client.post(submit.model_copy(update={"sampling": sampling}))
        await wait_until(lambda: len(client.events(submit.request_id)) > 1, what="a scored chunk")
        step = worker.metric("step_seconds_count")
        await client.cancel(submit.request_id)
        await _wait_until_freed(worker, client, since_step=step)
        assert client.tokens(submit.request_id) == []


async def test_the_largest_definition_of_a_structured_output_is_let_in(worker: WorkerProcess) -> None:
    output = StructuredOutput(kind="regex", definition="\x01" * MAX_DEFINITION_BYTES)  # in JSON six bytes each
    async with connect(worker) as client:
        submit = client.request([A, B], request_id="structured")
        sampling = submit.sampling.model_copy(update={"structured_output": output})
        assert (await client.post(submit.model_copy(update={"sampling": sampling}))).status_code == 202
        await client.end_of(submit.request_id)
        assert client.tokens(submit.request_id) == [A, B, EOS]


async def test_a_field_of_a_newer_router_is_skipped(worker: WorkerProcess) -> None:
    async with connect(worker) as client:
        body = {**client.request([A]).model_dump(mode="json"), "of_a_newer_version": 1}
        assert (await client.http.post("/wire/requests", content=json.dumps(body))).status_code == 202


async def test_other_wrong_calls_are_answered_in_our_shape(worker: WorkerProcess) -> None:
    async with connect(worker) as client:
        unknown = client.request([A]).model_copy(update={"connection_id": "nobody"})
        responses = [
            (await client.post(unknown), 503, "unavailable"),
            (await client.http.post("/wire/requests", content=b"{"), 400, "invalid_request"),
            (await client.http.post("/wire/requests", content=b" " * 2_000_000), 413, "payload_too_large"),
            (await client.http.get("/wire/frames"), 400, "invalid_request"),
            (await client.http.get(f"/wire/frames?connection_id={client.connection_id}"), 400, "invalid_request"),
            (await client.http.delete("/wire/requests/x?attempt=no"), 400, "invalid_request"),
            (await client.http.get("/nowhere"), 404, "route_not_found"),
            (await client.http.put("/wire/requests"), 405, "method_not_allowed"),
        ]
        for response, status, code in responses:
            assert (response.status_code, response.json()["error"]["code"]) == (status, code)


async def test_router_that_leaves_in_the_midst_of_a_body_is_no_failure_of_the_worker(worker: WorkerProcess) -> None:
    host, port = worker.url.removeprefix("http://").split(":")
    rejected = worker.metric("requests_total", outcome="rejected")
    with socket.create_connection((host, int(port))) as router:
        router.sendall(b'POST /wire/requests HTTP/1.1\r\nHost: worker\r\nContent-Length: 1000\r\n\r\n{"request_id":')
    await wait_until(lambda: worker.metric("requests_total", outcome="rejected") == rejected + 1)
    assert "request handler failed" not in worker.log


async def test_b01_cache_smaller_than_the_context_lowers_the_card_and_warns_once() -> None:
    with scripted_worker("--kv-cache-memory=1MiB", "--max-model-len=4096") as small:
        assert ModelCard.model_validate_json(small.get("/wire/model").content).max_model_len == 1024
        assert small.log.count("the KV cache holds less than the model's context") == 1


async def test_cancel_of_an_unknown_request_is_fine(worker: WorkerProcess) -> None:
    async with connect(worker) as client:
        await client.cancel(RequestId("never/seen"))


async def test_d01_every_request_has_one_outcome_and_every_token_but_the_first_one_tbt_sample() -> None:
    """100 mixed requests, 25 of them cancelled, then the idle invariant on the status and on /metrics."""
    with scripted_worker("--token-budget=64", "--kv-cache-memory=1MiB") as worker:
        async with connect(worker) as client:
            requests = [await client.submit([A] * (1 + n), request_id=f"r{n}", max_tokens=60) for n in range(100)]
            for request in requests[::4]:
                await client.cancel(request)
            kept = [request for n, request in enumerate(requests) if n % 4]
            await asyncio.gather(*(client.end_of(request) for request in kept))
            await wait_until(lambda: _is_idle(client))

            received = sum(
                worker.metric("requests_total", outcome=o) for o in ("stop", "length", "abort", "error", "rejected")
            )
            assert received == 100
            assert worker.metric("requests_total", outcome="abort") == 25 - sum(
                bool(client.events(request)) and client.events(request)[-1].is_last for request in requests[::4]
            )
            first_tokens = sum(bool(client.tokens(request)) for request in kept)
            assert first_tokens == 75
            generated = worker.metric("generated_tokens_total")
            assert generated >= sum(len(client.tokens(request)) for request in kept)
            with_a_token = generated - worker.metric("time_between_tokens_seconds_count")
            assert 75 <= with_a_token <= 100
            assert worker.metric("requests_running") == worker.metric("requests_waiting") == 0
            assert worker.metric("kv_cache_usage_ratio") == worker.metric("predicted_load_seconds") == 0


async def test_d01_tbt_samples_are_tokens_minus_one_per_request_and_prompts_count_once() -> None:
    with scripted_worker() as worker:
        async with connect(worker) as client:
            lengths = [1, 2, 5, 30]
            requests = [await client.submit([A] * length) for length in lengths]
            for request in requests:
                await client.end_of(request)
        assert worker.metric("time_between_tokens_seconds_count") == sum(lengths)
        assert worker.metric("time_to_first_token_seconds_count") == len(lengths)
        assert worker.metric("prompt_tokens_total") == sum(lengths)
        assert worker.metric("generated_tokens_total") == sum(length + 1 for length in lengths)
        assert worker.metric("step_tokens_sum", kind="prefill") == sum(lengths)


async def test_c11_gauges_refresh_when_all_clients_of_a_busy_worker_leave_at_once(worker: WorkerProcess) -> None:
    async with connect(worker) as client:
        for _ in range(4):
            await client.submit([SLOW] * 4000, max_tokens=2000)
        await wait_until(lambda: worker.metric("kv_cache_usage_ratio") > 0.05, what="a used cache")
    await wait_until(lambda: worker.metric("kv_cache_usage_ratio") == worker.metric("requests_running") == 0, 2)


async def test_router_that_does_not_read_is_cut_and_its_requests_are_freed() -> None:
    with scripted_worker("--max-frames-behind=8") as worker:
        async with connect(worker) as client:
            with _raw_stream(worker, "slow"):
                for number in range(60):
                    request = client.request([A] * 200, request_id=f"{number:->250}")
                    await client.post(request.model_copy(update={"connection_id": "slow"}))
                await wait_until(lambda: worker.metric("requests_total", outcome="abort") > 0, what="the cut")
                await wait_until(lambda: _is_idle(client))
                assert "its router is too slow" in worker.log
            request_id = await client.submit([A, B])
            await client.end_of(request_id)
            assert client.tokens(request_id) == [A, B, EOS]


async def test_answers_do_not_wait_for_delayed_acknowledgements(worker: WorkerProcess) -> None:
    """With Nagle's algorithm on, every answer on a connection that is kept takes 40 ms and more."""
    async with connect(worker) as client:
        seconds = []
        for _ in range(20):
            started_at = time.monotonic()
            await client.http.get("/livez")
            await client.post(client.request([-1]))
            seconds.append(time.monotonic() - started_at)
        assert min(seconds) < 0.03
