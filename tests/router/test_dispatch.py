"""Dispatch against fake workers on real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import replace

import pytest
from starlette.responses import Response

from stallfree_router.attempt import MAX_EVENTS_BEHIND
from stallfree_router.breaker import FIRST_OPEN_SECONDS
from stallfree_router.messages import Generation, OutputTokens
from stallfree_router.workers import MAX_RETRY_AFTER_SECONDS
from stallfree_shared.errors import (
    ContextLengthExceededError,
    InvalidRequestError,
    OverloadedError,
    ServingError,
    SlowClientError,
    StallfreeError,
    StepFailedError,
    UnavailableError,
    WorkerLostError,
)
from stallfree_shared.wire import RequestId, TokenEvent, TokenLogprobs
from tests.router.fake_worker import FIRST_TOKEN_ID, MODEL, FakeWorker
from tests.router.routing import SETTINGS, collect, generation, routing
from tests.support.waiting import wait_until


def expected(num_tokens: int) -> list[int]:
    return [FIRST_TOKEN_ID + index for index in range(num_tokens)]


async def test_a_generation_streams_its_tokens_in_order_and_leaves_nothing() -> None:
    worker = FakeWorker()
    worker.stop_at = 4
    async with worker.serving() as url, routing(url) as router:
        await router.usable()
        outputs = [output async for output in router.dispatcher.generate(generation(max_tokens=9))]
        assert [token for output in outputs for token in output.token_ids] == expected(4)
        assert [output.index for output in outputs] == [0, 1, 2, 3]
        assert outputs[-1].finish_reason == "stop"
        assert outputs[-1].usage is not None
        assert outputs[-1].usage.completion_tokens == 4
        assert router.tokenizers == {worker.card.tokenizer_sha256: b"{}"}
        assert router.sample("attempts_total", reason="first") == 1
        assert router.sample("queue_seconds_count", model=MODEL, tenant="default") == 1
        assert router.sample("predicted_output_tokens_error_ratio_count", model=MODEL) == 1
        await router.idle()
        assert worker.running == {}
        assert worker.cancels == []


async def test_closing_the_stream_cancels_on_the_worker() -> None:
    worker = FakeWorker()
    worker.hold_at = 2
    async with worker.serving() as url, routing(url) as router:
        await router.usable()
        outputs = router.dispatcher.generate(generation(max_tokens=100))
        assert (await anext(outputs)).index == 0
        await outputs.aclose()
        await wait_until(lambda: worker.cancels == [(RequestId("r1"), 1)], what="the cancel")
        assert worker.running == {}
        await router.idle()


async def test_cancelling_a_task_that_waits_for_its_submit_still_cancels_on_the_worker() -> None:
    worker = FakeWorker()
    worker.hold_at = 0
    async with worker.serving() as url, routing(url) as router:
        await router.usable()
        task = asyncio.create_task(collect(router.dispatcher.generate(generation())))
        await wait_until(lambda: router.workers.views()[0].status.requests_waiting == 1 or bool(worker.submits))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await wait_until(lambda: len(worker.cancels) == 1 and not worker.running, what="the cancel")
        await router.idle()


async def test_a_cancel_never_overtakes_its_submit() -> None:
    worker = FakeWorker()
    worker.hold_at = 0
    worker.takes_submits.clear()
    async with worker.serving() as url, routing(url) as router:
        await router.usable()
        task = asyncio.create_task(collect(router.dispatcher.generate(generation("early"))))
        await wait_until(lambda: len(worker.submits) == 1)
        task.cancel()
        await asyncio.wait((task,))
        (view,) = router.workers.views()  # a status that is newer than any cancel on its way
        await wait_until(lambda: router.workers.views()[0].status.sequence > view.status.sequence + 1)
        assert worker.cancels == []
        worker.takes_submits.set()
        await wait_until(lambda: worker.cancels == [(RequestId("early"), 1)], what="the cancel")
        assert worker.running == {}
        await router.idle()


@pytest.mark.parametrize("num_tokens", [1, 50])
async def test_c02_a_worker_lost_after_output_is_an_error_and_no_token_comes_twice(num_tokens: int) -> None:
    first, second = FakeWorker(), FakeWorker()
    first.hold_at = second.hold_at = num_tokens
    async with first.serving() as url, second.serving() as other_url, routing(url, other_url) as router:
        await router.usable(2)
        received: list[int] = []
        task = asyncio.create_task(collect(router.dispatcher.generate(generation(max_tokens=100)), received))
        await wait_until(lambda: len(received) == num_tokens)
        (first if first.submits else second).cut_frames()
        with pytest.raises(WorkerLostError):
            await task
        assert received == expected(num_tokens)
        assert len(first.submits) + len(second.submits) == 1
        await router.idle()


async def test_c02_a_worker_lost_before_output_is_replaced_by_another() -> None:
    first, second = FakeWorker(), FakeWorker()
    first.hold_at = second.hold_at = 0
    async with first.serving() as url, second.serving() as other_url, routing(url, other_url) as router:
        await router.usable(2)
        task = asyncio.create_task(collect(router.dispatcher.generate(generation(max_tokens=5))))
        await wait_until(lambda: bool(first.running or second.running))
        lost, other = (first, second) if first.running else (second, first)
        other.hold_at = None
        lost.cut_frames()
        assert await task == expected(5)
        assert other.submits[0].attempt == 2
        assert router.sample("attempts_total", reason="worker_lost") == 1
        await router.idle()


async def test_c02_events_of_an_older_attempt_are_dropped() -> None:
    worker = FakeWorker()
    worker.hold_at = 1
    async with worker.serving() as url, routing(url) as router:
        await router.usable()
        outputs = router.dispatcher.generate(generation(max_tokens=2))
        assert (await anext(outputs)).index == 0
        worker.send(TokenEvent(request_id=RequestId("r1"), attempt=0, index=1, token_ids=(77,)))
        worker.send(TokenEvent(request_id=RequestId("r1"), attempt=1, index=0, token_ids=(FIRST_TOKEN_ID,)))
        worker.hold_at = None
        assert await collect(outputs) == [FIRST_TOKEN_ID + 1]


async def test_a_gap_in_the_tokens_is_an_error_never_a_shorter_answer() -> None:
    worker = FakeWorker()
    worker.hold_at = 1
    async with worker.serving() as url, routing(url) as router:
        await router.usable()
        outputs = router.dispatcher.generate(generation(max_tokens=9))
        assert (await anext(outputs)).index == 0
        worker.send(TokenEvent(request_id=RequestId("r1"), attempt=1, index=3, token_ids=(77,)))
        with pytest.raises(WorkerLostError, match="missing"):
            await anext(outputs)
        await router.idle()


async def test_a_failed_step_is_told_and_not_tried_again() -> None:
    worker = FakeWorker()
    worker.error_at = (0, StepFailedError("not finite").info)
    async with worker.serving() as url, routing(url) as router:
        await router.usable()
        with pytest.raises(StepFailedError, match="not finite"):
            await collect(router.dispatcher.generate(generation()))
        assert len(worker.submits) == 1
        await router.idle()


@pytest.mark.parametrize(
    "answer",
    [
        Response("upstream connect error", status_code=503, media_type="text/plain"),
        Response("<html>Bad gateway</html>", status_code=502, media_type="text/html"),
        Response(b"", status_code=500),
        Response('{"error": {"mess', status_code=500, media_type="application/json"),
        Response("<html>hello</html>", status_code=200, media_type="text/html"),
        Response("I am a teapot", status_code=418),
    ],
)
async def test_c15_an_answer_that_is_not_from_the_wire_becomes_a_clean_error(answer: Response) -> None:
    worker = FakeWorker()
    worker.answer_submit = lambda: answer
    async with (
        worker.serving() as url,
        routing(url, settings=SETTINGS.model_copy(update={"max_attempts": 1})) as router,
    ):
        await router.usable()
        with pytest.raises(WorkerLostError, match="worker"):
            await collect(router.dispatcher.generate(generation()))
        await router.idle()


async def test_c38_clients_mistakes_and_aborts_never_count_and_server_errors_do() -> None:
    worker = FakeWorker()
    refusal = ContextLengthExceededError("too long").info.model_dump_json()
    worker.answer_submit = lambda: Response(f'{{"error": {refusal}}}', status_code=400)
    async with (
        worker.serving() as url,
        routing(url, settings=SETTINGS.model_copy(update={"max_attempts": 1})) as router,
    ):
        await router.usable()
        for number in range(20):
            with pytest.raises(ContextLengthExceededError):
                await collect(router.dispatcher.generate(generation(f"long-{number}")))
        worker.answer_submit, worker.hold_at = lambda: None, 1
        for number in range(20):
            async with contextlib.aclosing(router.dispatcher.generate(generation(f"abort-{number}"))) as outputs:
                await anext(outputs)
        assert router.workers.usable(MODEL)
        worker.answer_submit = lambda: Response(b"", status_code=500)
        for number in range(3):
            with pytest.raises(ServingError):
                await collect(router.dispatcher.generate(generation(f"broken-{number}")))
        assert not router.workers.usable(MODEL)


async def test_a_worker_that_answers_500_is_left_for_another_one() -> None:
    broken, healthy = FakeWorker(), FakeWorker()
    broken.answer_submit = lambda: Response(b"", status_code=500)
    async with broken.serving() as url, healthy.serving() as other_url, routing(url, other_url) as router:
        await router.usable(2)
        for number in range(10):
            assert await collect(router.dispatcher.generate(generation(f"r{number}"))) == expected(5)
        await router.idle()


async def test_c38_a_full_worker_is_left_alone_and_when_all_are_full_the_client_is_told_when_to_come_back() -> None:
    worker = FakeWorker()
    worker.answer_submit = lambda: Response(b"{}", status_code=429, headers={"retry-after": "7"})
    async with worker.serving() as url, routing(url) as router:
        await router.usable()
        for number in range(2):
            with pytest.raises(OverloadedError) as refused:
                await collect(router.dispatcher.generate(generation(f"r{number}")))
            assert refused.value.retry_after_seconds == pytest.approx(7, abs=0.5)
        assert len(worker.submits) == 1
        await router.idle()


async def test_c45_without_a_worker_the_router_answers_503_in_time_and_takes_one_that_comes_later() -> None:
    worker = FakeWorker()
    worker.answer_model = lambda: Response(b"loading", status_code=503)
    settings = SETTINGS.model_copy(update={"no_worker_timeout_seconds": 0.2})
    urls = "http://127.0.0.1:1", "http://no host:x"
    async with worker.serving() as url, routing(url, *urls, settings=settings) as router:
        started_at = time.monotonic()
        with pytest.raises(UnavailableError) as refused:
            await collect(router.dispatcher.generate(generation()))
        assert refused.value.retry_after_seconds is not None
        assert time.monotonic() - started_at < 1
        worker.answer_model = lambda: None
        await router.usable()
        assert await collect(router.dispatcher.generate(generation())) == expected(5)


async def test_a_request_waits_for_a_worker_that_comes_in_time() -> None:
    worker = FakeWorker()
    worker.is_ready = False
    async with worker.serving() as url, routing(url) as router:
        await wait_until(lambda: MODEL in router.workers.models())
        task = asyncio.create_task(collect(router.dispatcher.generate(generation())))
        worker.is_ready = True
        assert await task == expected(5)


async def test_a_request_that_fits_no_worker_is_refused_at_once() -> None:
    worker = FakeWorker(max_model_len=10)
    async with worker.serving() as url, routing(url) as router:
        await router.usable()
        with pytest.raises(ContextLengthExceededError, match=r"10 tokens.* 8 .* 3, together 11"):
            await collect(router.dispatcher.generate(generation(num_prompt_tokens=8, max_tokens=3)))
        assert worker.submits == []


async def test_c07_a_burst_is_shared_though_statuses_are_stale() -> None:
    workers = FakeWorker(), FakeWorker()
    for worker in workers:
        worker.hold_at, worker.status_seconds = 0, 0.8
    async with workers[0].serving() as url, workers[1].serving() as other_url, routing(url, other_url) as router:
        await router.usable(2)
        tasks = [asyncio.create_task(collect(router.dispatcher.generate(generation(f"r{n}")))) for n in range(100)]
        await wait_until(lambda: sum(len(worker.submits) for worker in workers) == 100)
        shares = sorted(len(worker.submits) for worker in workers)
        assert shares[1] / shares[0] <= 1.5
        router.workers.check_integrity()
        for worker in workers:
            worker.hold_at = None
        assert await asyncio.gather(*tasks) == [expected(5)] * 100
        await router.idle()


async def test_c32_a_client_that_does_not_read_loses_its_own_request_only() -> None:
    worker = FakeWorker(step_seconds=0.0)
    async with worker.serving() as url, routing(url) as router:
        await router.usable()
        slow = router.dispatcher.generate(generation("slow", max_tokens=9000))
        await anext(slow)
        await wait_until(lambda: worker.cancels == [(RequestId("slow"), 1)], what="the cancel")
        assert await collect(router.dispatcher.generate(generation("other"))) == expected(5)
        received: list[int] = []
        with pytest.raises(SlowClientError):
            await collect(slow, received)
        assert len(received) <= MAX_EVENTS_BEHIND
        assert router.workers.usable(MODEL)
        await router.idle()


async def test_a_request_that_kills_two_workers_is_not_sent_to_a_third() -> None:
    workers = FakeWorker(), FakeWorker(), FakeWorker()
    for worker in workers:
        worker.error_at = (0, WorkerLostError("the engine died").info)
    async with contextlib.AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(worker.serving()) for worker in workers]
        router = await stack.enter_async_context(routing(*urls))
        await router.usable(3)
        with pytest.raises(WorkerLostError, match="the engine died"):
            await collect(router.dispatcher.generate(generation()))
        assert sorted(len(worker.submits) for worker in workers) == [0, 1, 1]
        await router.idle()


async def test_c39_an_engine_that_dies_under_many_streams_is_tried_again_soon() -> None:
    worker = FakeWorker()
    worker.hold_at, worker.error_at = 1, (1, WorkerLostError("the engine died").info)
    async with worker.serving() as url, routing(url) as router:
        await router.usable()
        received: list[list[int]] = [[] for _ in range(20)]
        streams = [
            asyncio.create_task(collect(router.dispatcher.generate(generation(f"r{n}")), received[n]))
            for n in range(20)
        ]
        await wait_until(lambda: all(received))
        worker.hold_at = None
        assert {type(error) for error in await asyncio.gather(*streams, return_exceptions=True)} == {WorkerLostError}
        assert not router.workers.usable(MODEL)
        worker.error_at = None
        async with asyncio.timeout(FIRST_OPEN_SECONDS + 0.5):
            assert await collect(router.dispatcher.generate(generation("after"))) == expected(5)
        await router.idle()


@pytest.mark.parametrize("retry_after", ["inf", "nan", "86400", "-1", "soon"])
async def test_c11_a_worker_that_asks_for_a_very_long_pause_is_looked_at_again(retry_after: str) -> None:
    worker = FakeWorker()
    worker.answer_submit = lambda: Response(b"{}", status_code=429, headers={"retry-after": retry_after})
    async with worker.serving() as url, routing(url) as router:
        await router.usable()
        with pytest.raises(OverloadedError) as refused:
            await collect(router.dispatcher.generate(generation()))
        assert refused.value.retry_after_seconds is not None
        assert 1 <= refused.value.retry_after_seconds <= MAX_RETRY_AFTER_SECONDS


async def test_what_is_no_token_id_never_reaches_the_client() -> None:
    worker = FakeWorker()
    worker.hold_at = 1
    async with worker.serving() as url, routing(url) as router:
        await router.usable()
        outputs = router.dispatcher.generate(generation(max_tokens=9))
        await anext(outputs)
        worker.send(TokenEvent(request_id=RequestId("r1"), attempt=1, index=1, token_ids=(-1,)))
        with pytest.raises(WorkerLostError, match="no token id"):
            await anext(outputs)
        await router.idle()


async def test_an_error_keeps_its_kind_on_the_way_from_the_worker() -> None:
    worker = FakeWorker()
    worker.error_at = (1, WorkerLostError("the engine died").info)
    async with worker.serving() as url, routing(url) as router:
        await router.usable()
        outputs = router.dispatcher.generate(generation())
        await anext(outputs)
        with pytest.raises(StallfreeError, match="the engine died") as failed:
            await anext(outputs)
        assert not isinstance(failed.value, InvalidRequestError)
        await router.idle()


def scored(name: str = "r1", *, max_tokens: int = 3) -> Generation:
    """A generation that asks for log-probabilities of its prompt and its output."""
    plain = generation(name, max_tokens=max_tokens, num_prompt_tokens=4)
    return replace(plain, sampling=plain.sampling.model_copy(update={"logprobs": 0, "prompt_logprobs": 0}))


def told(outputs: list[OutputTokens]) -> tuple[list[float], list[float]]:
    """The log-probabilities of the prompt and of the output."""
    prompt = [each.logprob for output in outputs for each in output.prompt_logprobs or ()]
    return prompt, [each.logprob for output in outputs for each in output.logprobs or ()]


async def test_log_probabilities_of_the_prompt_come_with_the_first_token() -> None:
    worker = FakeWorker()
    async with worker.serving() as url, routing(url) as router:
        await router.usable()
        outputs = [output async for output in router.dispatcher.generate(scored())]
        assert [output.index for output in outputs] == [0, 1, 2]
        assert [output.prompt_logprobs is None for output in outputs] == [False, True, True]
        assert told(outputs) == ([-2, -3, -4], [-1000, -1001, -1002])
        assert [None if output.usage is None else output.usage.cached_tokens for output in outputs] == [1, None, 1]
        await router.idle()


async def test_c02_a_worker_lost_amid_the_prompts_log_probabilities_is_replaced_and_they_are_told_once() -> None:
    first, second = FakeWorker(), FakeWorker()
    first.hold_at = second.hold_at = 0
    async with first.serving() as url, second.serving() as other_url, routing(url, other_url) as router:
        await router.usable(2)
        outputs: list[OutputTokens] = []

        async def read() -> None:
            outputs.extend([output async for output in router.dispatcher.generate(scored())])

        task = asyncio.create_task(read())
        await wait_until(
            lambda: any(each.has_told_prompt for each in (*first.running.values(), *second.running.values()))
        )
        lost, other = (first, second) if first.running else (second, first)
        other.hold_at = None
        lost.cut_frames()
        await task
        assert told(outputs) == ([-2, -3, -4], [-1000, -1001, -1002])
        assert len(other.submits) == 1
        await router.idle()


@pytest.mark.parametrize("logprobs", [None, (TokenLogprobs(logprob=-1.0),)], ids=["of the token", "of the prompt"])
async def test_missing_log_probabilities_are_a_lost_worker_and_never_a_shorter_answer(
    logprobs: tuple[TokenLogprobs, ...] | None,
) -> None:
    workers = FakeWorker(), FakeWorker()
    for worker in workers:
        worker.hold_at, worker.tells_prompt = 0, False
    async with workers[0].serving() as url, workers[1].serving() as other_url, routing(url, other_url) as router:
        await router.usable(2)
        task = asyncio.create_task(collect(router.dispatcher.generate(scored())))
        await wait_until(lambda: any(each.running for each in workers))
        worse, other = workers if workers[0].running else reversed(workers)
        other.hold_at, other.tells_prompt = None, True
        worse.send(TokenEvent(request_id=RequestId("r1"), attempt=1, index=0, token_ids=(5,), logprobs=logprobs))
        async with asyncio.timeout(5):
            assert await task == expected(3)
        await router.idle()


async def test_a_generation_takes_its_targets_its_priority_and_its_salt_to_the_worker() -> None:
    worker = FakeWorker()
    async with worker.serving() as url, routing(url) as router:
        await router.usable()
        asked = replace(generation(), tbt_target_seconds=0.5, ttft_target_seconds=9.0, priority=-3, cache_salt="s")
        await collect(router.dispatcher.generate(asked))
        (submit,) = worker.submits
        assert (submit.tbt_target_seconds, submit.ttft_target_seconds) == (0.5, 9.0)
        assert (submit.priority, submit.cache_salt) == (-3, "s")


async def test_answers_to_one_prompt_share_a_worker_and_leave_nothing_of_it() -> None:
    workers = FakeWorker(), FakeWorker(), FakeWorker()
    async with contextlib.AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(worker.serving()) for worker in workers]
        router = await stack.enter_async_context(routing(*urls))
        await router.usable(3)
        for call in range(5):
            siblings = [
                replace(generation(f"{call}-{n}", num_prompt_tokens=500), prompt_id=f"p{call}") for n in range(4)
            ]
            await asyncio.gather(*(collect(router.dispatcher.generate(sibling)) for sibling in siblings))
        placed = [{submit.request_id.split("-")[0] for submit in worker.submits} for worker in workers]
        assert sum(map(len, placed)) == 5
        await router.idle()
        assert router.dispatcher.num_shared_prompts == 0
