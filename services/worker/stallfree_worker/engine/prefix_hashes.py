"""The names of a request's full blocks in the prefix cache: one hash per block, chained from the salt.

A request has one chain, which grows as its tokens come; `block_manager` reads it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b

_DIGEST_BYTES = 32
_SALT_TAG = b"stallfree.salt"
_BLOCK_TAG = b"stallfree.block"


class PrefixHashes:
    """`digests[i]` stands for all tokens of the blocks 0 to i together with the salt.

    It is BLAKE2b-256 over the digest before it and the block's own tokens, so two chains have a digest in common only
    where salt and tokens are the same, and nobody needs to compare the tokens. The salt enters under a tag of its own
    (BLAKE2's personalization), so no salt can pass for a block.
    """

    __slots__ = ("_block_size", "_digests", "_pack", "_pending")

    def __init__(self, token_ids: Sequence[int], *, block_size: int, salt: str = "") -> None:
        self._block_size = block_size
        self._pack = struct.Struct(f"<{block_size}q").pack
        root = blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=_DIGEST_BYTES, person=_SALT_TAG)
        self._digests = [root.digest()]
        num_chained = len(token_ids) - len(token_ids) % block_size
        for start in range(0, num_chained, block_size):
            self._chain(token_ids[start : start + block_size])
        self._pending = list(token_ids[num_chained:])

    def __len__(self) -> int:
        """Full blocks so far."""
        return len(self._digests) - 1

    def __getitem__(self, block: int) -> bytes:
        return self._digests[block + 1]

    def between(self, start: int, end: int) -> Sequence[bytes]:
        """The digests of the blocks `start` to `end - 1`."""
        return self._digests[start + 1 : end + 1]

    def append(self, token_id: int) -> None:
        """The request has one more token."""
        self._pending.append(token_id)
        if len(self._pending) == self._block_size:
            self._chain(self._pending)
            self._pending.clear()

    def _chain(self, token_ids: Sequence[int]) -> None:
        link = self._digests[-1] + self._pack(*token_ids)
        self._digests.append(blake2b(link, digest_size=_DIGEST_BYTES, person=_BLOCK_TAG).digest())
