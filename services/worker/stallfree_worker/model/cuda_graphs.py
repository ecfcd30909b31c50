"""Forward passes that are recorded once and replayed: a step of few tokens takes less time on the GPU than its hundreds
of kernels take to be launched one by one.

A CUDA graph repeats the same kernels on the same memory. So each recorded size has tensors of its own, a batch is
copied into those of the least size that holds it, and what is left over is padding: sequences that read the null block,
tokens whose keys and values go to the waste block. Two kinds of size are recorded:

- `n` decodes: one query each;
- hybrid batches of up to `n` tokens, however many sequences they belong to. The padded sequences have no query at all,
  which variable-length attention allows.

Larger batches are launched kernel by kernel: their kernels take long enough. The rows that sample, and what follows
them, are not recorded. Used with attention that reads all lengths on the device, such as flash-attn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from stallfree_worker.model.attention.interface import PagedSequences, PagedTables
from stallfree_worker.model.batch_inputs import BatchInputs
from stallfree_worker.model.decoder import TorchDecoder
from stallfree_worker.model.device_inputs import DeviceInputs
from stallfree_worker.model.draw import Logits
from stallfree_worker.model.host_numbers import NumberList
from stallfree_worker.model.kv_cache import KVCache

_HYBRID_TOKENS = (64, 128, 256, 512)
"""A layer of a model of 1 billion weights takes some 20 µs on a current GPU for 512 tokens, as long as its launches."""
_WARM_UP_RUNS = 2
"""Libraries allocate their workspaces in the first runs, which must not be recorded."""

Recorder = Callable[[Callable[[], Tensor]], tuple[Tensor, Callable[[], None]]]
"""Takes a computation on fixed memory → the tensor that holds its result after each replay, and the replay."""


class CudaRecorder:
    """The `Recorder` of CUDA. All its graphs share the memory of one pool, as never two run at once, and one stream, as
    libraries keep a workspace for each."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def __call__(self, compute: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UP_RUNS):
                compute()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            result = compute()
        return result, graph.replay


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphSize:
    """What a recorded pass has room for, or a batch needs."""

    num_tokens: int
    num_sequences: int
    has_prefills: bool

    def holds(self, other: GraphSize) -> bool:
        return (
            other.num_tokens <= self.num_tokens
            and other.num_sequences <= self.num_sequences
            and (self.has_prefills or not other.has_prefills)
        )


def graph_sizes(*, max_num_seqs: int, max_step_tokens: int) -> tuple[GraphSize, ...]:
    """The sizes that are recorded, least first: each eighth number of decodes, a few below, and few hybrid ones."""
    numbers = sorted({1, 2, 4, 8, *range(8, max_num_seqs, 8), max_num_seqs} & set(range(1, max_num_seqs + 1)))
    decodes = [GraphSize(num_tokens=number, num_sequences=number, has_prefills=False) for number in numbers]
    hybrid = [
        GraphSize(num_tokens=number, num_sequences=min(number, max_num_seqs), has_prefills=True)
        for number in _HYBRID_TOKENS
        if number <= max_step_tokens
    ]
    return (*decodes, *hybrid)


class GraphedDecoder:
    """A `Decoder` that replays what `prepare` has recorded, and lets another compute all else."""

    find_likeliest = None

    def __init__(
        self,
        decoder: TorchDecoder,
        sizes: Sequence[GraphSize],
        *,
        max_model_len: int,
        make_recorder: Callable[[], Recorder] = CudaRecorder,
    ) -> None:
        """`sizes` with the least first; no sequence is longer than `max_model_len`."""
        self._decoder = decoder
        self._sizes = sizes
        self._max_model_len = max_model_len
        self._make_recorder = make_recorder
        self._cache: KVCache | None = None
        self._passes: dict[GraphSize, _RecordedPass] = {}

    @property
    def device(self) -> torch.device:
        return self._decoder.device

    @torch.inference_mode()
    def prepare(self, cache: KVCache) -> None:
        """Records every size on `cache`; whatever is forwarded on another one is launched kernel by kernel. In the mode
        in which steps are computed: what is compiled here serves them too."""
        self._decoder.prepare(cache)
        self._cache = cache
        self._passes = {}
        record = self._make_recorder()
        for size in reversed(self._sizes):  # the largest first: the others find their memory in its pool
            buffers = _Buffers(size, cache, max_model_len=self._max_model_len, device=self.device)
            hidden, replay = record(partial(self._decoder.compute, buffers.inputs, cache))
            self._passes[size] = _RecordedPass(buffers, hidden, replay)
        largest = self._passes[self._sizes[-1]].hidden
        for num_rows in range(1, min(2, len(largest)) + 1):  # one row and several are compiled apart
            self._decoder.logits(largest, NumberList.of(range(num_rows)))

    @torch.inference_mode()
    def forward(self, inputs: BatchInputs, cache: KVCache) -> Tensor:
        recorded = self._find(inputs) if cache is self._cache else None
        if recorded is None:
            return self._decoder.forward(inputs, cache)
        recorded.buffers.fill(self._decoder.begin(inputs, cache))
        recorded.replay()
        return recorded.hidden[: len(inputs.token_ids)]

    def logits(self, hidden: Tensor, rows: NumberList) -> Logits:
        return self._decoder.logits(hidden, rows)

    def _find(self, inputs: BatchInputs) -> _RecordedPass | None:
        wanted = GraphSize(
            num_tokens=len(inputs.token_ids),
            num_sequences=len(inputs.chunks),
            has_prefills=len(inputs.token_ids) > len(inputs.chunks),
        )
        return next((self._passes[size] for size in self._sizes if size.holds(wanted)), None)


@dataclass(frozen=True, slots=True)
class _RecordedPass:
    buffers: _Buffers
    hidden: Tensor  # [size.num_tokens, hidden_size]
    replay: Callable[[], None]


class _Buffers:
    """The memory that one recorded pass reads its batch from."""

    def __init__(self, size: GraphSize, cache: KVCache, *, max_model_len: int, device: torch.device) -> None:
        self._size = size
        self._null_block = cache.null_block
        self._waste_slot = cache.waste_block * cache.block_size
        num_groups, most_blocks = len(cache.layers.groups), -(-max_model_len // cache.block_size)

        def ints(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        # Lengths on the host are upper bounds: kernels take the real ones from the device.
        query_lengths = (size.num_tokens,) if size.has_prefills else (1,) * size.num_sequences
        self.inputs = DeviceInputs(
            token_ids=ints(size.num_tokens, dtype=torch.int64),
            positions=ints(size.num_tokens, dtype=torch.int64),
            sequences=PagedSequences(
                cu_seqlens_q=ints(size.num_sequences + 1),
                block_size=cache.block_size,
                query_lengths=query_lengths,
                tables=tuple(
                    [
                        PagedTables(
                            seqlens_k=ints(size.num_sequences).fill_(1),
                            block_tables=ints(size.num_sequences, most_blocks).fill_(cache.null_block),
                            kv_lengths=(most_blocks * cache.block_size,),
                        )
                        for _ in range(num_groups)
                    ]
                ),
            ),
            slot_mapping=ints(num_groups, size.num_tokens, dtype=torch.int64).fill_(self._waste_slot),
            fresh_blocks=ints(0, dtype=torch.int64),
        )
        if not size.has_prefills:
            # every decode is at the place of its sequence, the padded ones too
            torch.arange(size.num_sequences + 1, dtype=torch.int32, device=device, out=self._row_starts)

    @property
    def _row_starts(self) -> Tensor:
        return self.inputs.sequences.cu_seqlens_q

    def fill(self, inputs: DeviceInputs) -> None:
        """Copies a batch in, on the device's own stream, and pads what it leaves."""
        own, num_tokens = self.inputs, len(inputs.token_ids)
        num_sequences = len(inputs.sequences.query_lengths)
        own.token_ids[:num_tokens].copy_(inputs.token_ids)
        own.token_ids[num_tokens:].zero_()
        own.positions[:num_tokens].copy_(inputs.positions)
        own.positions[num_tokens:].zero_()
        own.slot_mapping[:, :num_tokens].copy_(inputs.slot_mapping)
        own.slot_mapping[:, num_tokens:].fill_(self._waste_slot)
        if self._size.has_prefills:
            self._row_starts[: num_sequences + 1].copy_(inputs.sequences.cu_seqlens_q)
            self._row_starts[num_sequences + 1 :].fill_(num_tokens)
        for mine, given in zip(own.sequences.tables, inputs.sequences.tables, strict=True):
            mine.seqlens_k[:num_sequences].copy_(given.seqlens_k)
            mine.seqlens_k[num_sequences:].fill_(1)
            # columns that a sequence does not reach are never read
            mine.block_tables[:num_sequences, : given.block_tables.shape[1]].copy_(given.block_tables)
            mine.block_tables[num_sequences:, 0].fill_(self._null_block)
