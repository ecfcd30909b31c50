"""How many blocks a request needs, by KV group: arithmetic without state. Used by the block manager."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from stallfree_worker.engine.step import KVGroup


class KVLayout:
    """The KV groups of a model, the size of a block, and the largest chunk that a step may compute of one request."""

    def __init__(self, groups: Sequence[KVGroup], *, block_size: int, largest_chunk_tokens: int) -> None:
        self.groups = tuple(groups)
        self.block_size = block_size
        self.largest_chunk_tokens = largest_chunk_tokens
        self.num_groups = len(self.groups)
        self.windows = tuple([group.window_tokens for group in groups])
        layers_by_window: Counter[int | None] = Counter()
        for group in groups:
            layers_by_window[group.window_tokens] += group.num_layers
        num_layers = layers_by_window.total()
        self.window_shares = tuple([(window, count / num_layers) for window, count in layers_by_window.items()])
        """Every window once, None for none, with the share of the layers that have it."""
        self.full_groups = tuple([index for index, window in enumerate(self.windows) if window is None])
        self.window_groups = tuple([index for index, window in enumerate(self.windows) if window is not None])

    @classmethod
    def fitting(
        cls, groups: Sequence[KVGroup], *, block_size: int, largest_chunk_tokens: int, num_blocks: int, num_tokens: int
    ) -> KVLayout:
        """With chunks of at most `largest_chunk_tokens`, halved until a request of `num_tokens` tokens fits
        `num_blocks`: a window and the chunk behind it are held at once, so shorter chunks need less memory. Not below
        the window itself, where little is left to win."""
        layout = cls(groups, block_size=block_size, largest_chunk_tokens=largest_chunk_tokens)
        least = max([window for window in layout.windows if window is not None], default=largest_chunk_tokens)
        while layout.blocks_of_request(num_tokens) > num_blocks and layout.largest_chunk_tokens > least:
            smaller = max(least, layout.largest_chunk_tokens // 2)
            layout = cls(groups, block_size=block_size, largest_chunk_tokens=smaller)
        return layout

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks of one group that hold `num_tokens` tokens from the first one on."""
        return -(-num_tokens // self.block_size)

    def first_needed_block(self, group: int, position: int) -> int:
        """The first block that a token at `position`, or any after it, looks back at."""
        window = self.windows[group]
        return 0 if window is None else max(0, position - window + 1) // self.block_size

    def most_blocks(self, group: int, num_tokens: int) -> int:
        """What a request of `num_tokens` tokens holds at most in this group while its prefill lasts."""
        return self._most_behind(group, self.largest_chunk_tokens, num_tokens)

    def most_decode_blocks(self, group: int, num_tokens: int) -> int:
        """What a decode of up to `num_tokens` tokens holds at most in this group."""
        return self._most_behind(group, 1, num_tokens)

    def blocks_of_request(self, num_tokens: int) -> int:
        """What a request of `num_tokens` tokens needs at most, in all groups together."""
        return sum([self.most_blocks(group, num_tokens) for group in range(self.num_groups)])

    def most_tokens(self, num_blocks: int, *, limit: int) -> int:
        """The longest request, up to `limit` tokens, that `num_blocks` blocks can hold."""
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            if self.blocks_of_request(middle) <= num_blocks:
                low = middle
            else:
                high = middle - 1
        return low

    def tokens_held(self, num_blocks: int, *, num_tokens: int) -> int:
        """Tokens that `num_blocks` blocks hold at most, if all requests are `num_tokens` long and decode. Without
        windows that is every slot. With windows, shorter requests need more blocks a token: they forget less."""
        blocks_of_one = sum([self.most_decode_blocks(group, num_tokens) for group in range(self.num_groups)])
        return num_blocks * self.blocks_for(num_tokens) * self.block_size // max(1, blocks_of_one)

    def _most_behind(self, group: int, chunk_tokens: int, num_tokens: int) -> int:
        """Blocks that a window and a chunk touch, wherever in a block they begin."""
        everything = self.blocks_for(num_tokens)
        window = self.windows[group]
        if window is None:
            return everything
        return min(everything, (window + chunk_tokens + self.block_size - 3) // self.block_size + 1)
