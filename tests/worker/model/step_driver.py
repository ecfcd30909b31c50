"""The least that drives a runner: chunks by a token budget, blocks from a shuffled list. No engine is involved."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from stallfree_shared.wire import RequestId, SamplingParams
from stallfree_worker.engine.step import Chunk, Runner, StepPlan

GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
WHOLE = 1_000_000
"""A token budget that no prompt exceeds."""


@dataclass(slots=True, kw_only=True)
class _Request:
    request_id: RequestId
    tokens: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)

    @property
    def num_outputs(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens


class StepDriver:
    """Runs prompts to their ends: running decodes first, then prefill chunks, in the order of the prompts."""

    def __init__(self, runner: Runner, *, token_budget: int = WHOLE, seed: int = 7) -> None:
        self._runner = runner
        self._token_budget = token_budget
        self._free_blocks = list(range(runner.num_blocks))
        random.Random(seed).shuffle(self._free_blocks)
        self._step_id = 0

    def generate(
        self, prompts: Sequence[Sequence[int]], *, num_tokens: int, sampling: Sequence[SamplingParams] | None = None
    ) -> list[list[int]]:
        """The `num_tokens` output tokens of each prompt."""
        params = sampling or [GREEDY] * len(prompts)
        requests = [
            _Request(
                request_id=RequestId(f"r{index}"),
                tokens=list(prompt),
                num_prompt_tokens=len(prompt),
                sampling=param,
            )
            for index, (prompt, param) in enumerate(zip(prompts, params, strict=True))
        ]
        while running := [request for request in requests if request.num_outputs < num_tokens]:
            self._step(running)
            self._free_ended(requests, num_tokens)
        return [request.tokens[request.num_prompt_tokens :] for request in requests]

    def _step(self, running: list[_Request]) -> None:
        left = self._token_budget
        chunks = []
        by_work = sorted(running, key=lambda request: len(request.tokens) - request.num_computed > 1)
        for request in by_work:
            count = min(len(request.tokens) - request.num_computed, left)
            if count > 0:
                chunks.append(self._chunk(request, count))
                left -= count
        plan = StepPlan(step_id=self._step_id, chunks=tuple(chunks), num_decode_tokens=0, num_prefill_tokens=0)
        result = self._runner.execute(plan)
        assert result.step_id == self._step_id
        assert not result.failure_by_request
        self._step_id += 1
        for request in running:
            if request.request_id in result.token_id_by_request:
                request.tokens.append(result.token_id_by_request[request.request_id])

    def _chunk(self, request: _Request, count: int) -> Chunk:
        start, end = request.num_computed, request.num_computed + count
        while len(request.blocks) * self._runner.block_size < end:
            request.blocks.append(self._free_blocks.pop())
        request.num_computed = end
        return Chunk(
            request_id=request.request_id,
            token_ids=tuple(request.tokens[start:end]),
            num_computed_tokens=start,
            block_table=tuple(request.blocks),
            sampling=request.sampling,
            output_index=request.num_outputs if end == len(request.tokens) else None,
        )

    def _free_ended(self, requests: list[_Request], num_tokens: int) -> None:
        for request in requests:
            if request.num_outputs >= num_tokens:
                self._free_blocks.extend(request.blocks)
                request.blocks.clear()
