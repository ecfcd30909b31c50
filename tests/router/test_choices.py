"""merge(): side by side, first error cancels the rest, a reader that leaves closes all."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

import pytest

from stallfree_router.choices import merge


class Source:
    """Gives numbers; remembers whether it was closed."""

    def __init__(self, *numbers: int, error: BaseException | None = None, is_endless: bool = False) -> None:
        self.numbers, self.error, self.is_endless = numbers, error, is_endless
        self.is_closed = False
        self.num_given = 0

    async def run(self) -> AsyncGenerator[int, None]:
        try:
            for number in self.numbers:
                self.num_given += 1
                yield number
            if self.error is not None:
                raise self.error
            if self.is_endless:
                await asyncio.Event().wait()
        finally:
            self.is_closed = True


async def test_everything_of_every_source_arrives_in_its_own_order() -> None:
    sources = [Source(1, 2, 3), Source(), Source(10, 20)]
    items = [item async for item in merge([source.run() for source in sources])]
    assert sorted(item for item in items if item) == [1, 2, 3, 10, 20]
    assert [item for item in items if item and item < 10] == [1, 2, 3]


async def test_the_first_error_cancels_the_others_and_is_raised_as_it_is() -> None:
    endless = Source(1, is_endless=True)
    failing = Source(2, error=LookupError("gone"))
    with pytest.raises(LookupError, match="gone"):
        async for _ in merge([endless.run(), failing.run()]):
            pass
    assert endless.is_closed


async def test_a48_a_source_that_is_cancelled_from_inside_is_an_error_and_no_silent_end() -> None:
    cancelled = Source(1, error=asyncio.CancelledError())
    with pytest.raises(RuntimeError, match="cancelled"):
        async for _ in merge([cancelled.run()]):
            pass


async def test_a_reader_that_leaves_closes_all_sources_before_it_is_gone() -> None:
    sources = [Source(1, is_endless=True), Source(2, is_endless=True)]
    async with contextlib.aclosing(merge([source.run() for source in sources])) as items:
        await anext(items)
        await anext(items)
    assert all(source.is_closed for source in sources)


async def test_a_reader_that_is_cancelled_closes_all_sources() -> None:
    source = Source(is_endless=True)
    started = asyncio.Event()

    async def read() -> None:
        async with contextlib.aclosing(merge([source.run()])) as items:
            started.set()
            await anext(items)

    reading = asyncio.create_task(read())
    await started.wait()
    await asyncio.sleep(0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading


async def test_a_slow_reader_holds_the_sources_back() -> None:
    source = Source(*range(1000))
    async with contextlib.aclosing(merge([source.run()])) as items:
        await anext(items)
        for _ in range(200):
            await asyncio.sleep(0)
        assert source.num_given < 30


async def test_silence_is_told_and_loses_nothing() -> None:
    gate = asyncio.Event()

    async def quiet() -> AsyncGenerator[int, None]:
        await gate.wait()
        yield 7

    items = merge([quiet()], silence_seconds=0.001)
    assert await anext(items) is None
    gate.set()
    assert [item async for item in items if item is not None] == [7]
