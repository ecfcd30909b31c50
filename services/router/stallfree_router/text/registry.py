"""The tokenizers of the models that workers serve. Owns them and the threads that use them.

A tokenizer is known by the hash of its file, so workers of one model share one. Everything slow runs in a few threads
of this registry's own, never on the event loop. One thing those threads cannot hide: the library holds the
interpreter's lock while it loads a file (about a second for 260,000 tokens), once a tokenizer and router.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from stallfree_router.text.tokenizer import Tokenizer
from stallfree_shared.errors import UnavailableError
from stallfree_shared.wire import ModelCard

_logger = logging.getLogger(__name__)

_P = ParamSpec("_P")
_T = TypeVar("_T")


class TokenizerRegistry:
    def __init__(self, *, max_tokenizers: int = 16, num_threads: int = 4) -> None:
        self._max_tokenizers = max_tokenizers
        self._tokenizer_by_sha256: OrderedDict[str, Tokenizer] = OrderedDict()
        """The one used last stands last."""
        self._loading = asyncio.Lock()
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="text")

    async def add(self, sha256: str, fetch: Callable[[], Awaitable[bytes]]) -> None:
        """Makes text of the models that have this tokenizer possible. Must have returned before a worker of them counts
        as usable.

        Raises:
            ValueError: what was fetched is not the tokenizer of that hash.
        """
        if sha256 in self._tokenizer_by_sha256:
            return
        tokenizer_json = await fetch()  # outside the lock: a frozen worker must not hold up the others
        async with self._loading:
            if sha256 in self._tokenizer_by_sha256:
                return
            self._tokenizer_by_sha256[sha256] = await self.run(_load, tokenizer_json, sha256)
            if len(self._tokenizer_by_sha256) > self._max_tokenizers:
                self._tokenizer_by_sha256.popitem(last=False)
        _logger.info("tokenizer loaded", extra={"tokenizer_sha256": sha256})

    def tokenizer(self, card: ModelCard) -> Tokenizer:
        """Raises:
        UnavailableError: the model's tokenizer is not here (yet, or no longer).
        """
        tokenizer = self._tokenizer_by_sha256.get(card.tokenizer_sha256)
        if tokenizer is None:
            raise UnavailableError(f"the tokenizer of {card.model!r} is not loaded", retry_after_seconds=1)
        self._tokenizer_by_sha256.move_to_end(card.tokenizer_sha256)
        return tokenizer

    async def run(self, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Runs slow text work in one of the threads."""
        future = self._threads.submit(function, *args, **kwargs)
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def _load(tokenizer_json: bytes, sha256: str) -> Tokenizer:
    found = hashlib.sha256(tokenizer_json).hexdigest()
    if found != sha256:
        raise ValueError(f"the tokenizer has sha256 {found}, the worker says {sha256}")
    return Tokenizer(tokenizer_json)
