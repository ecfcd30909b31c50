"""One decoder described by data: what tells Llama, Mistral, Qwen2, Qwen3 and Gemma 3 apart, read from config.json.

`decoder` computes from a `DecoderConfig` alone and knows no family's name. A family is one row of `_FAMILIES`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from stallfree_worker.model.config_reader import ConfigReader, JsonObject
from stallfree_worker.model.errors import ModelLoadError
from stallfree_worker.model.rope import RopeConfig, read_rope

Activation = Literal["silu", "gelu_tanh"]
SLIDING, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfig:
    """How one layer attends."""

    rope: RopeConfig
    window_tokens: int | None
    """A token sees itself and the `window_tokens - 1` before it; None sees all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """The whole architecture of a decoder."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerConfig, ...]
    max_position_embeddings: int
    norm_eps: float
    activation: Activation
    attention_scale: float
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    has_mlp_bias: bool = False
    has_qk_norm: bool = False
    has_post_norms: bool = False
    """Attention and MLP outputs are normed too, before they join the residual stream."""
    norm_weight_offset: float = 0.0
    """Gemma keeps `weight - 1` in the file."""
    embedding_scale: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    has_tied_embeddings: bool = False

    @property
    def longest_context(self) -> int:
        """Most tokens that the model was made for. YaRN names the length before stretching, and often only that."""
        stretched = [
            int(layer.rope.original_max_position_embeddings * layer.rope.factor)
            for layer in self.layers
            if layer.rope.rope_type == "yarn"
        ]
        return max([self.max_position_embeddings, *stretched])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    read_layers: Callable[[ConfigReader, int, int], tuple[LayerConfig, ...]]
    """(reader, number of layers, max_position_embeddings) → layers."""
    defaults: Mapping[str, int]
    """What the family means where its config.json leaves a size out."""
    qkv_bias: bool | Literal["attention_bias"] = False
    output_bias: bool | Literal["attention_bias"] = False
    has_mlp_bias_key: bool = False
    has_qk_norm: bool = False
    is_gemma: bool = False
    ties_embeddings: bool = False


def read_decoder_config(config: JsonObject) -> DecoderConfig:
    """Raises `ModelLoadError` naming the key for an unknown family, rope rule, key or ill-typed value."""
    _refuse_other_heads(config)
    model_type = config.get("model_type")
    if model_type == "gemma3":
        return _read_gemma3_text_part(config)
    family = _FAMILIES.get(str(model_type))
    if family is None:
        raise ModelLoadError(f"config.json: model_type {model_type!r} is not known; known are {', '.join(_FAMILIES)}")
    return _read(ConfigReader(config), family)


def _refuse_other_heads(config: JsonObject) -> None:
    """A classifier or embedding model has the same layers, and nothing to generate with."""
    names = config.get("architectures")
    for name in names if isinstance(names, list) else []:
        if not str(name).endswith(("ForCausalLM", "ForConditionalGeneration")):
            raise ModelLoadError(f"config.json: architectures names {name}, which does not generate text")


def _read_gemma3_text_part(config: JsonObject) -> DecoderConfig:
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise ModelLoadError("config.json: a gemma3 model needs text_config")
    ties = {"tie_word_embeddings": config["tie_word_embeddings"]} if "tie_word_embeddings" in config else {}
    return _read(ConfigReader({**ties, **text}, where="config.json: text_config"), _FAMILIES["gemma3_text"])


def _read(reader: ConfigReader, family: _Family) -> DecoderConfig:
    def size(key: str) -> int:
        return reader.integer(key, family.defaults.get(key))

    num_layers, max_positions = size("num_hidden_layers"), size("max_position_embeddings")
    hidden_size, num_heads = size("hidden_size"), size("num_attention_heads")
    head_dim = reader.integer("head_dim", family.defaults.get("head_dim", hidden_size // num_heads))
    decoder = DecoderConfig(
        vocab_size=size("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=size("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=reader.integer("num_key_value_heads", family.defaults.get("num_key_value_heads", num_heads)),
        head_dim=head_dim,
        layers=family.read_layers(reader, num_layers, max_positions),
        max_position_embeddings=max_positions,
        norm_eps=reader.number("rms_norm_eps", 1e-6),
        activation=_read_activation(reader, family),
        attention_scale=_read_attention_scale(reader, family, head_dim),
        has_qkv_bias=_read_bias(reader, family.qkv_bias),
        has_output_bias=_read_bias(reader, family.output_bias),
        has_mlp_bias=family.has_mlp_bias_key and reader.flag("mlp_bias", default=False),
        has_qk_norm=family.has_qk_norm,
        has_post_norms=family.is_gemma,
        norm_weight_offset=1.0 if family.is_gemma else 0.0,
        embedding_scale=hidden_size**0.5 if family.is_gemma else None,
        attention_softcap=reader.optional_number("attn_logit_softcapping") if family.is_gemma else None,
        logit_softcap=reader.optional_number("final_logit_softcapping") if family.is_gemma else None,
        has_tied_embeddings=reader.flag("tie_word_embeddings", default=family.ties_embeddings),
    )
    if decoder.num_heads % decoder.num_kv_heads:
        raise ModelLoadError(
            f"config.json: num_attention_heads {num_heads} is no multiple of num_key_value_heads {decoder.num_kv_heads}"
        )
    reader.refuse_unread()
    return decoder


def _read_bias(reader: ConfigReader, rule: bool | Literal["attention_bias"]) -> bool:
    return reader.flag("attention_bias", default=False) if rule == "attention_bias" else rule


def _read_activation(reader: ConfigReader, family: _Family) -> Activation:
    key, default = ("hidden_activation", "gelu_pytorch_tanh") if family.is_gemma else ("hidden_act", "silu")
    name = reader.text(key, default)
    known: dict[str, Activation] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
    if name not in known:
        raise ModelLoadError(f"config.json: {key} {name!r} is not known; known are {', '.join(known)}")
    return known[name]


def _read_attention_scale(reader: ConfigReader, family: _Family, head_dim: int) -> float:
    squared = reader.number("query_pre_attn_scalar", 256) if family.is_gemma else head_dim
    return 1.0 / math.sqrt(squared)


def _read_single_rope(reader: ConfigReader, max_positions: int) -> RopeConfig:
    """One rope for all layers: `rope_parameters` since transformers 5, `rope_scaling` and `rope_theta` before."""
    theta = reader.number("rope_theta", 10_000.0)
    new, old = reader.section("rope_parameters"), reader.section("rope_scaling")
    where = "rope_scaling" if old else "rope_parameters"
    return read_rope(old or new or {}, theta=theta, max_position_embeddings=max_positions, where=where)


def _read_plain_layers(reader: ConfigReader, num_layers: int, max_positions: int) -> tuple[LayerConfig, ...]:
    return (LayerConfig(rope=_read_single_rope(reader, max_positions), window_tokens=None),) * num_layers


def _read_mistral_layers(reader: ConfigReader, num_layers: int, max_positions: int) -> tuple[LayerConfig, ...]:
    window = reader.optional_integer("sliding_window", absent=4096)
    return (LayerConfig(rope=_read_single_rope(reader, max_positions), window_tokens=window),) * num_layers


def _read_qwen_layers(reader: ConfigReader, num_layers: int, max_positions: int) -> tuple[LayerConfig, ...]:
    """Qwen slides from layer `max_window_layers` on, if at all; `layer_types` says the same in newer files."""
    if reader.flag("use_mrope", default=False):
        raise ModelLoadError("config.json: use_mrope is for images and video, which are not served")
    rope = _read_single_rope(reader, max_positions)
    slides = reader.flag("use_sliding_window", default=False)
    window = reader.optional_integer("sliding_window", absent=4096)
    num_full = int(reader.number("max_window_layers", 28))
    by_index = tuple(SLIDING if slides and index >= num_full else FULL for index in range(num_layers))
    types = _check_layer_types(reader.texts("layer_types") or by_index, num_layers)
    if SLIDING in types and (window is None or not slides):
        raise ModelLoadError(
            "config.json: layer_types has sliding_attention, but use_sliding_window and sliding_window give no window"
        )
    return tuple(LayerConfig(rope=rope, window_tokens=window if kind == SLIDING else None) for kind in types)


def _read_gemma3_layers(reader: ConfigReader, num_layers: int, max_positions: int) -> tuple[LayerConfig, ...]:
    if reader.flag("use_bidirectional_attention", default=False):
        raise ModelLoadError("config.json: use_bidirectional_attention is for embedding models, which are not served")
    window = reader.integer("sliding_window", 4096)
    pattern = reader.integer("sliding_window_pattern", reader.integer("_sliding_window_pattern", 6))
    by_index = tuple(SLIDING if (index + 1) % pattern else FULL for index in range(num_layers))
    types = _check_layer_types(reader.texts("layer_types") or by_index, num_layers)
    ropes = _read_gemma3_ropes(reader, max_positions)
    return tuple(LayerConfig(rope=ropes[kind], window_tokens=window if kind == SLIDING else None) for kind in types)


def _read_gemma3_ropes(reader: ConfigReader, max_positions: int) -> dict[str, RopeConfig]:
    """Global and sliding layers each have a base of their own; old files scale the global ones alone."""
    thetas = {FULL: reader.number("rope_theta", 1_000_000.0), SLIDING: reader.number("rope_local_base_freq", 10_000.0)}
    old = reader.section("rope_scaling") or {}
    nested = ConfigReader(reader.section("rope_parameters") or {}, where="config.json: rope_parameters")
    ropes = {}
    for kind, theta in thetas.items():
        values = {**(nested.section(kind) or {}), **(old if kind == FULL else {})}
        where = f"rope_parameters.{kind}"
        ropes[kind] = read_rope(values, theta=theta, max_position_embeddings=max_positions, where=where)
    nested.refuse_unread()
    return ropes


def _check_layer_types(types: tuple[str, ...], num_layers: int) -> tuple[str, ...]:
    unknown = sorted(set(types) - {SLIDING, FULL})
    if unknown:
        raise ModelLoadError(f"config.json: layer_types names {', '.join(unknown)}; known are {SLIDING} and {FULL}")
    if len(types) != num_layers:
        raise ModelLoadError(f"config.json: layer_types has {len(types)} entries for {num_layers} layers")
    return types


_GEMMA3_DEFAULTS = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
}
_FAMILIES: dict[str, _Family] = {
    "llama": _Family(
        read_layers=_read_plain_layers,
        defaults={},
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        has_mlp_bias_key=True,
    ),
    "mistral": _Family(read_layers=_read_mistral_layers, defaults={"num_key_value_heads": 8}),
    "qwen2": _Family(read_layers=_read_qwen_layers, defaults={}, qkv_bias=True),
    "qwen3": _Family(
        read_layers=_read_qwen_layers,
        defaults={"head_dim": 128},
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        has_qk_norm=True,
    ),
    "gemma3_text": _Family(
        read_layers=_read_gemma3_layers,
        defaults=_GEMMA3_DEFAULTS,
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        has_qk_norm=True,
        is_gemma=True,
        ties_embeddings=True,
    ),
}
