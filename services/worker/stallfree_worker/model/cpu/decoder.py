"""The decoder for CPUs: one call into compiled kernels per forward pass, and one for the output layer.

It computes what `TorchDecoder` does, from the same config and weights; sums and the residual stream are float32
throughout, so in bfloat16 it rounds less often. Called by `runner`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int64

import torch
from torch import Tensor

from stallfree_worker.model.batch_inputs import BatchInputs
from stallfree_worker.model.cpu import library
from stallfree_worker.model.cpu.draws import mask_addresses
from stallfree_worker.model.cpu.packed import PackedMatrix
from stallfree_worker.model.cpu.sketch import Sketch
from stallfree_worker.model.decoder import FindLikeliest
from stallfree_worker.model.draw import Logits
from stallfree_worker.model.families import DecoderConfig
from stallfree_worker.model.host_numbers import NumberList
from stallfree_worker.model.kv_cache import KVCache
from stallfree_worker.model.rope import RopeConfig, inverse_frequencies
from stallfree_worker.model.weights import DecoderWeights, LayerWeights

_BLOCK_SIZES = (16, 32, 64, 128)
_MOST_HEAD_DIM = 256
_MOST_GROUPED_HEADS = 48
_MOST_SKETCHED_INPUTS = 16_384
_FLOAT_BYTES = 4
_ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}


def reason_against(config: DecoderConfig, *, dtype: torch.dtype, block_size: int) -> str | None:
    """Why the kernels cannot compute this model here; None where they can."""
    sizes = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "head_dim": config.head_dim,
    }
    uneven = [f"{name} {size}" for name, size in sizes.items() if size % 16]
    if uneven:
        return f"{uneven[0]} is no multiple of 16"
    if config.head_dim > _MOST_HEAD_DIM:
        return f"head_dim {config.head_dim} is more than {_MOST_HEAD_DIM}"
    if config.num_heads > _MOST_GROUPED_HEADS * config.num_kv_heads:
        return f"num_attention_heads {config.num_heads} is more than {_MOST_GROUPED_HEADS} for each key-value head"
    if block_size not in _BLOCK_SIZES:
        return f"--block-size {block_size} is none of {', '.join(map(str, _BLOCK_SIZES))}"
    return library.reason_against(dtype)


class CpuDecoder:
    """Holds weights, and no state between steps: what a step leaves behind is in the KV cache, whose blocks have a
    layout of their own here."""

    device = torch.device("cpu")

    def __init__(
        self, config: DecoderConfig, weights: DecoderWeights[PackedMatrix], *, block_size: int, num_threads: int
    ) -> None:
        self._library = library.load_library()
        self._weights = weights
        self._num_threads = num_threads
        self._hidden_size = config.hidden_size
        self._num_ids = weights.head.num_outputs
        self._num_tiles = len(weights.head.tiles)
        for layer in weights.layers:  # from here on these weights are this decoder's alone
            layer.gate_up.interleave_halves()
        self._ropes = _Ropes(config)
        self._layers = _layers(config, weights, self._ropes)
        self._sketch = _sketch(config, weights, num_threads)
        self._struct = _struct(config, weights, self._layers, self._ropes, self._sketch, block_size=block_size)
        self._cache: KVCache | None = None
        self._batch = library.Batch()
        """Filled for every step: it would take longer to make another."""
        self._scratch, self._bounds = _Memory(), _Memory()
        self._scratch_tokens = 0
        """So many the scratch memory has room for."""
        self._most_maxima = self._library.stallfree_most_maxima(self._num_ids)
        self._logits_memory = torch.empty(0, self._num_ids)
        self._maxima_memory = torch.empty(0, self._most_maxima)
        self._logits = self._logits_of(0)
        self._hidden = self._hidden_memory = torch.empty(0, config.hidden_size)
        self._num_hidden = self._hidden_address = 0

    def prepare(self, cache: KVCache) -> None:
        """Tells the kernels where the cache is."""
        for index, layer in enumerate(self._layers):
            keys, values = cache.layer(index)
            layer.keys, layer.values = _address(keys), _address(values)
            layer.group = cache.layers.places[index].group
        self._cache = cache

    def forward(self, inputs: BatchInputs, cache: KVCache) -> Tensor:
        """See `Decoder`; the output is float32. What only other rows would need is not computed."""
        if cache is not self._cache:
            raise ValueError("this cache is not the one that was prepared last")
        num_tokens, num_chunks, num_groups = len(inputs.token_ids), len(inputs.chunks), len(cache.layers.groups)
        if len(inputs.packed_tables) != 2 * num_chunks * num_groups:
            raise ValueError(
                f"{len(inputs.packed_tables) // 2} block tables, not {num_groups} for each of {num_chunks}"
            )
        if num_tokens != self._num_hidden:
            if num_tokens > len(self._hidden_memory):
                self._hidden_memory = torch.empty(num_tokens, self._hidden_size)
                self._hidden_address = _address(self._hidden_memory)
            self._hidden, self._num_hidden = self._hidden_memory[:num_tokens], num_tokens
        batch = self._batch
        batch.token_ids = inputs.token_ids.address
        batch.cu_seqlens_q = inputs.row_starts.address
        batch.num_computed = inputs.num_computed.address
        batch.num_shared = inputs.num_shared.address
        batch.wanted_rows = inputs.wanted_rows.address
        batch.tables = inputs.packed_tables.address
        batch.num_tokens = num_tokens
        batch.num_sequences = num_chunks
        batch.num_wanted = len(inputs.wanted_rows)
        batch.num_groups = num_groups
        self._library.stallfree_forward(
            self._struct, batch, self._hidden_address, self._scratch_for(num_tokens), self._num_threads
        )
        return self._hidden

    @property
    def find_likeliest(self) -> FindLikeliest | None:
        """See `Decoder`."""
        return None if self._sketch is None else self._find_likeliest

    def _find_likeliest(self, hidden: Tensor, rows: NumberList, allowed: Sequence[Tensor | None]) -> list[int]:
        num_rows = len(rows)
        tokens = (c_int64 * num_rows)()
        self._library.stallfree_find_likeliest(
            self._struct,
            self._address_of(hidden),
            rows.address,
            num_rows,
            mask_addresses(allowed, num_rows=num_rows, num_ids=self._num_ids),
            tokens,
            self._bounds.address(_FLOAT_BYTES * num_rows * self._num_tiles),
            self._scratch_for(num_rows),
            self._num_threads,
        )
        return list(tokens)

    def logits(self, hidden: Tensor, rows: NumberList) -> Logits:
        """See `Decoder`; float32. The next call writes over them: fresh memory for so many would have to be cleared by
        the system in every step."""
        num_rows = len(rows)
        if len(self._logits.values) != num_rows:
            self._logits = self._logits_of(num_rows)
        self._library.stallfree_logits(
            self._struct,
            self._address_of(hidden),
            rows.address,
            num_rows,
            _address(self._logits.values),
            _address(self._logits.maxima),
            self._scratch_for(num_rows),
            self._num_threads,
        )
        return self._logits

    def _address_of(self, hidden: Tensor) -> int:
        """Most often it is what `forward` has just given: torch need not be asked."""
        return self._hidden_address if hidden is self._hidden else _address(hidden)

    def _logits_of(self, num_rows: int) -> Logits:
        """The first of the memory for logits, which grows where it is too small."""
        if len(self._logits_memory) < num_rows:
            self._logits_memory = torch.empty(num_rows, self._num_ids)
            self._maxima_memory = torch.empty(num_rows, self._most_maxima)
        return Logits(self._logits_memory[:num_rows], self._maxima_memory[:num_rows])

    def _scratch_for(self, num_tokens: int) -> int:
        num_bytes = 0
        if num_tokens > self._scratch_tokens:
            num_bytes = self._library.stallfree_scratch_bytes(self._struct, num_tokens, self._num_threads)
            self._scratch_tokens = num_tokens
        return self._scratch.address(num_bytes)


class _Memory:
    """Memory for intermediate results, which grows where it is too small."""

    def __init__(self) -> None:
        self._held = torch.empty(0, dtype=torch.uint8)
        self._num_bytes = 0
        self._address = 0

    def address(self, num_bytes: int) -> int:
        """Of so many bytes at least."""
        if num_bytes > self._num_bytes:
            self._held = torch.empty(num_bytes, dtype=torch.uint8)
            self._num_bytes, self._address = num_bytes, self._held.data_ptr()
        return self._address


class _Ropes:
    """The rotary rules of a model, each once."""

    def __init__(self, config: DecoderConfig) -> None:
        rules = list(dict.fromkeys(layer.rope for layer in config.layers))
        self._numbers = {rule: number for number, rule in enumerate(rules)}
        self.inverse_frequencies = torch.stack([inverse_frequencies(rule, config.head_dim) for rule in rules])
        self.factors = torch.tensor([float(rule.attention_factor) for rule in rules])

    def __len__(self) -> int:
        return len(self._numbers)

    def number_of(self, rule: RopeConfig) -> int:
        return self._numbers[rule]


def _layers(config: DecoderConfig, weights: DecoderWeights[PackedMatrix], ropes: _Ropes) -> ctypes.Array[library.Layer]:
    return (library.Layer * len(config.layers))(
        *[
            _layer(own, rope=ropes.number_of(layer.rope), window=layer.window_tokens)
            for layer, own in zip(config.layers, weights.layers, strict=True)
        ]
    )


def _layer(weights: LayerWeights[PackedMatrix], *, rope: int, window: int | None) -> library.Layer:
    return library.Layer(
        qkv=_matrix(weights.qkv),
        output=_matrix(weights.output),
        gate_up=_matrix(weights.gate_up),
        down=_matrix(weights.down),
        input_norm=_address(weights.input_norm),
        qk_norm=_address(weights.qk_norm),
        attention_post_norm=_address(weights.attention_post_norm),
        mlp_norm=_address(weights.mlp_norm),
        mlp_post_norm=_address(weights.mlp_post_norm),
        rope=rope,
        window=window or 0,
    )


def _sketch(config: DecoderConfig, weights: DecoderWeights[PackedMatrix], num_threads: int) -> Sketch | None:
    """None where the output layer's matrix has 8 bits anyway or is exact, where what follows it moves logits, and where
    sums are so long that their rounding is not accounted for."""
    is_alike = weights.head.tiles.dtype == torch.bfloat16 and config.logit_softcap is None
    if not is_alike or config.hidden_size > _MOST_SKETCHED_INPUTS:
        return None
    return Sketch(_matrix(weights.head), num_threads=num_threads)


def _struct(
    config: DecoderConfig,
    weights: DecoderWeights[PackedMatrix],
    layers: ctypes.Array[library.Layer],
    ropes: _Ropes,
    sketch: Sketch | None,
    *,
    block_size: int,
) -> library.DecoderStruct:
    dtype = weights.embedding.dtype
    # Gemma was trained with the scale rounded to the dtype of its weights.
    scale = torch.tensor(1.0 if config.embedding_scale is None else config.embedding_scale, dtype=dtype).item()
    return library.DecoderStruct(
        layers=layers,
        head=_matrix(weights.head),
        sketch=library.Sketch() if sketch is None else sketch.struct,
        final_norm=_address(weights.final_norm),
        embedding=_address(weights.embedding),
        inverse_frequencies=_address(ropes.inverse_frequencies),
        rope_factors=_address(ropes.factors),
        is_bfloat16=dtype == torch.bfloat16,
        num_layers=len(layers),
        num_ropes=len(ropes),
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=block_size,
        activation=_ACTIVATIONS[config.activation],
        norm_eps=config.norm_eps,
        attention_scale=config.attention_scale,
        attention_softcap=config.attention_softcap or 0.0,
        logit_softcap=config.logit_softcap or 0.0,
        embedding_scale=scale,
    )


def _matrix(matrix: PackedMatrix) -> library.Matrix:
    return library.Matrix(
        tiles=_address(matrix.tiles),
        bias=_address(matrix.bias),
        scales=_address(matrix.scales),
        num_outputs=matrix.num_outputs,
        num_inputs=matrix.num_inputs,
    )


def _address(tensor: Tensor | None) -> int:
    """Of its first element: the kernels take contiguous tensors, and null for none."""
    if tensor is None:
        return 0
    if not tensor.is_contiguous():
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} is not contiguous")
    return tensor.data_ptr()
