"""An open-loop load: requests are sent when they are due, whatever has come of those before. Used by `main`.

A closed loop (so many users, each waiting for its answer) slows down with the server and hides the very stalls that
it should find.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from stallfree_loadtest.client import CompletionRequest, CompletionStream, Server
from stallfree_loadtest.measures import RequestTrace
from stallfree_loadtest.prompts import Vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLength:
    """One kind of prompt in a mix."""

    num_tokens: int
    weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What the requests ask for: seeded random token ids, a fresh draw each time, so that lengths are exact and no
    cached prefix helps."""

    prompts: tuple[PromptLength, ...]
    output_tokens: int
    vocabulary: Vocabulary = field(default_factory=Vocabulary)
    seed: int = 0

    def requests(self) -> Iterator[CompletionRequest]:
        """Endless; the same seed gives the same requests."""
        draw = random.Random(self.seed)
        weights = [prompt.weight for prompt in self.prompts]
        number = 0
        while True:
            number += 1
            length = draw.choices(self.prompts, weights)[0].num_tokens
            yield CompletionRequest(
                request_id=f"request-{number}",
                prompt=self.vocabulary.draw(draw, length),
                max_tokens=self.output_tokens,
            )


async def run_open_loop(
    servers: Sequence[Server],
    *,
    arrivals: Iterator[float],
    requests: Iterator[CompletionRequest],
    on_end: Callable[[RequestTrace], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> list[RequestTrace]:
    """Sends one request an arrival, to the servers in turn, and waits for all. Failed ones are in the result too."""
    streams: list[CompletionStream] = []
    began_at = clock()

    async def send(stream: CompletionStream) -> None:
        trace = await stream.run()
        if on_end is not None:
            on_end(trace)

    async with asyncio.TaskGroup() as group:
        for number, (instant, request) in enumerate(zip(arrivals, requests, strict=False)):
            due_at = began_at + instant
            if (left := due_at - clock()) > 0:
                await asyncio.sleep(left)
            stream = CompletionStream(servers[number % len(servers)], request, clock=clock, due_at=due_at)
            streams.append(stream)
            group.create_task(send(stream))
    return [stream.trace() for stream in streams]
