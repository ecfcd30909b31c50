"""A decoder's weights: which tensors a `DecoderConfig` needs, checked by name and shape, and fused for computing.

Called by `loader` once. Query, key and value projections become one matrix, gate and up another, so that a step
makes fewer and larger products.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from stallfree_worker.model.checkpoint import Checkpoint
from stallfree_worker.model.errors import ModelLoadError
from stallfree_worker.model.families import DecoderConfig

_logger = logging.getLogger(__name__)

_PREFIXES = ("model.", "language_model.model.", "model.language_model.")
"""Where the decoder stands in a file: alone, or beside a vision tower (older and newer spelling)."""
_HEADS = ("lm_head.weight", "language_model.lm_head.weight")
_OTHER_PARTS = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")
"""Parts of a multimodal model that a text decoder does not use."""
_MOST_NAMES_SHOWN = 8

LinearT = TypeVar("LinearT")
"""A matrix in the form that a decoder multiplies with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights(Generic[LinearT]):
    """Norm weights are float32 and ready to multiply with; projections are in the model's dtype."""

    input_norm: Tensor
    qkv: LinearT
    qk_norm: Tensor | None
    """[num_heads + num_kv_heads, head_dim]: one row per head, so that queries and keys are normed in one go."""
    output: LinearT
    attention_post_norm: Tensor | None
    mlp_norm: Tensor
    gate_up: LinearT
    down: LinearT
    mlp_post_norm: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderWeights(Generic[LinearT]):
    embedding: Tensor
    """[vocab_size, hidden_size]"""
    layers: tuple[LayerWeights[LinearT], ...]
    final_norm: Tensor
    head: LinearT
    """Rows of the tokenizer's ids only: padded rows of the output matrix can never be drawn."""


@dataclass(frozen=True, slots=True)
class WeightTarget(Generic[LinearT]):
    device: torch.device
    dtype: torch.dtype
    num_head_rows: int
    make_linear: Callable[[Tensor, Tensor | None], LinearT]
    """Of a weight [out_features, in_features] and a bias."""


def load_weights(
    checkpoint: Checkpoint, config: DecoderConfig, target: WeightTarget[LinearT]
) -> DecoderWeights[LinearT]:
    """Raises `ModelLoadError` naming weights that are missing, unexpected or of a wrong shape."""
    prefix = _find_prefix(checkpoint)
    head_name = next((name for name in _HEADS if name in checkpoint.names), _HEADS[0])
    shapes = {prefix + name: shape for name, shape in _decoder_shapes(config).items()}
    if not config.has_tied_embeddings:
        shapes[head_name] = (config.vocab_size, config.hidden_size)
    _check_names(checkpoint, shapes, config)
    reader = _Reader(checkpoint, shapes, target)
    embedding = reader.matrix(f"{prefix}embed_tokens.weight")
    if config.has_tied_embeddings:
        _warn_if_unequal_head(checkpoint, head_name, f"{prefix}embed_tokens.weight")
    head = embedding if config.has_tied_embeddings else reader.matrix(head_name)
    return DecoderWeights(
        embedding=embedding,
        layers=tuple(_load_layer(reader, f"{prefix}layers.{i}.", config) for i in range(len(config.layers))),
        final_norm=reader.norm(f"{prefix}norm.weight", config),
        head=target.make_linear(head[: target.num_head_rows], None),
    )


class _Reader(Generic[LinearT]):
    """Gives tensors of the expected shape, on the device, in the dtype."""

    def __init__(
        self, checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]], target: WeightTarget[LinearT]
    ) -> None:
        self._checkpoint = checkpoint
        self._shapes = shapes
        self._target = target

    def _raw(self, name: str) -> Tensor:
        tensor = self._checkpoint.tensor(name)
        if tuple(tensor.shape) != self._shapes[name]:
            raise ModelLoadError(
                f"weight {name} has shape {tuple(tensor.shape)}, but config.json asks for {self._shapes[name]}"
            )
        if not tensor.is_floating_point() or tensor.dtype.itemsize < torch.bfloat16.itemsize:
            raise ModelLoadError(f"weight {name} is kept as {tensor.dtype}; quantized weights cannot be served")
        return tensor

    def matrix(self, name: str) -> Tensor:
        return self._raw(name).to(device=self._target.device, dtype=self._target.dtype, copy=True)

    def norm(self, name: str, config: DecoderConfig) -> Tensor:
        return self._raw(name).to(device=self._target.device, dtype=torch.float32) + config.norm_weight_offset

    def linear(self, stem: str, names: tuple[str, ...], *, has_bias: bool) -> LinearT:
        """One product for several projections of the same input, their rows one below the other."""
        weight = torch.cat([self.matrix(f"{stem}{name}.weight") for name in names])
        bias = torch.cat([self.matrix(f"{stem}{name}.bias") for name in names]) if has_bias else None
        return self._target.make_linear(weight, bias)


def _load_layer(reader: _Reader[LinearT], stem: str, config: DecoderConfig) -> LayerWeights[LinearT]:
    # Gemma 3 calls the norm after attention by the name that others give to the norm before the MLP.
    mlp_norm = "pre_feedforward_layernorm" if config.has_post_norms else "post_attention_layernorm"

    def post_norm(name: str) -> Tensor | None:
        return reader.norm(f"{stem}{name}.weight", config) if config.has_post_norms else None

    return LayerWeights(
        input_norm=reader.norm(f"{stem}input_layernorm.weight", config),
        qkv=reader.linear(f"{stem}self_attn.", ("q_proj", "k_proj", "v_proj"), has_bias=config.has_qkv_bias),
        qk_norm=_load_qk_norm(reader, f"{stem}self_attn.", config) if config.has_qk_norm else None,
        output=reader.linear(f"{stem}self_attn.", ("o_proj",), has_bias=config.has_output_bias),
        attention_post_norm=post_norm("post_attention_layernorm"),
        mlp_norm=reader.norm(f"{stem}{mlp_norm}.weight", config),
        gate_up=reader.linear(f"{stem}mlp.", ("gate_proj", "up_proj"), has_bias=config.has_mlp_bias),
        down=reader.linear(f"{stem}mlp.", ("down_proj",), has_bias=config.has_mlp_bias),
        mlp_post_norm=post_norm("post_feedforward_layernorm"),
    )


def _load_qk_norm(reader: _Reader[LinearT], stem: str, config: DecoderConfig) -> Tensor:
    query, key = (reader.norm(f"{stem}{name}.weight", config) for name in ("q_norm", "k_norm"))
    return torch.cat((query.expand(config.num_heads, -1), key.expand(config.num_kv_heads, -1)))


def _decoder_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Name below the prefix → shape of every tensor that the decoder needs, the output head aside."""
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (config.vocab_size, config.hidden_size),
        "norm.weight": (config.hidden_size,),
    }
    layer = _layer_shapes(config)
    for index in range(len(config.layers)):
        shapes.update({f"layers.{index}.{name}": shape for name, shape in layer.items()})
    return shapes


def _layer_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    projections = {
        "self_attn.q_proj": (q_rows, hidden, config.has_qkv_bias),
        "self_attn.k_proj": (kv_rows, hidden, config.has_qkv_bias),
        "self_attn.v_proj": (kv_rows, hidden, config.has_qkv_bias),
        "self_attn.o_proj": (hidden, q_rows, config.has_output_bias),
        "mlp.gate_proj": (inner, hidden, config.has_mlp_bias),
        "mlp.up_proj": (inner, hidden, config.has_mlp_bias),
        "mlp.down_proj": (hidden, inner, config.has_mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {}
    for name, (rows, columns, has_bias) in projections.items():
        shapes[f"{name}.weight"] = (rows, columns)
        if has_bias:
            shapes[f"{name}.bias"] = (rows,)
    norms = ["input_layernorm", "post_attention_layernorm"]
    norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"] if config.has_post_norms else []
    shapes.update({f"{name}.weight": (hidden,) for name in norms})
    if config.has_qk_norm:
        shapes.update({f"self_attn.{name}.weight": (config.head_dim,) for name in ("q_norm", "k_norm")})
    return shapes


def _find_prefix(checkpoint: Checkpoint) -> str:
    for prefix in _PREFIXES:
        if f"{prefix}embed_tokens.weight" in checkpoint.names:
            return prefix
    raise ModelLoadError(f"weight {_PREFIXES[0]}embed_tokens.weight is missing")


def _check_names(checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]], config: DecoderConfig) -> None:
    missing = sorted(shapes.keys() - checkpoint.names)
    if missing:
        untied = " (config.json says tie_word_embeddings is false)" if missing[0] in _HEADS else ""
        raise ModelLoadError(f"weights are missing: {_show(missing)}{untied}")
    spare = checkpoint.names - shapes.keys()
    unexpected = sorted(name for name in spare if not _is_harmless(name, config))
    if unexpected:
        raise ModelLoadError(f"the model has weights that its config.json gives no use for: {_show(unexpected)}")


def _is_harmless(name: str, config: DecoderConfig) -> bool:
    if name in _HEADS:
        return config.has_tied_embeddings
    return name.startswith(_OTHER_PARTS) or name.endswith(".rotary_emb.inv_freq")


def _show(names: list[str]) -> str:
    more = len(names) - _MOST_NAMES_SHOWN
    return ", ".join(names[:_MOST_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _warn_if_unequal_head(checkpoint: Checkpoint, head_name: str, embedding_name: str) -> None:
    if head_name in checkpoint.names and not torch.equal(
        checkpoint.tensor(head_name), checkpoint.tensor(embedding_name)
    ):
        _logger.warning(
            "the file's output head differs from the embeddings it is tied to, and is not used",
            extra={"weight": head_name},
        )
