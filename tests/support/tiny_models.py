"""Tiny models with random weights, one of every family, saved as folders in Hugging Face format.

    path = build_tiny_model(tmp_path / "tiny")                 # a Llama
    path = build_tiny_model(tmp_path / "tiny", family="gemma3")

Their text means nothing, but everything is there: config, weights, a byte-level tokenizer that decodes any id, a chat
template. Weights are drawn from a fixed seed, so two builds of a family are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedTokenizerFast
from transformers.models.gemma3 import Gemma3TextConfig
from transformers.models.llama import LlamaConfig
from transformers.models.mistral import MistralConfig
from transformers.models.qwen2 import Qwen2Config
from transformers.models.qwen3 import Qwen3Config

SLIDING_WINDOW = 32
MAX_POSITIONS = 4096
VOCAB_SIZE = 320
"""256 bytes, the special tokens, and merges: the tokenizer knows every id."""

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_SPECIAL_TOKENS = ("<|bos|>", "<|eos|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>")
_MERGES = tuple((left, right) for left in "etaoins" for right in "etaoinsrh")[:57]

_SIZES: Mapping[str, object] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recipe:
    config_class: Callable[..., PreTrainedConfig]
    arguments: Mapping[str, object]


def _llama(**arguments: object) -> _Recipe:
    return _Recipe(config_class=LlamaConfig, arguments={"tie_word_embeddings": False, **arguments})


def _rope(rope_type: str, **values: object) -> dict[str, object]:
    return {"rope_type": rope_type, "rope_theta": 10_000.0, **values}


_LLAMA3_ROPE = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 128}
_RECIPES: dict[str, _Recipe] = {
    "llama": _llama(),
    "llama-tied": _llama(tie_word_embeddings=True),
    "llama-bias": _llama(attention_bias=True, mlp_bias=True, head_dim=32),
    "llama-linear": _llama(rope_parameters=_rope("linear", factor=4.0)),
    "llama-dynamic": _llama(rope_parameters=_rope("dynamic", factor=2.0)),
    "llama-llama3": _llama(rope_parameters=_rope("llama3", **_LLAMA3_ROPE)),
    "llama-yarn": _llama(rope_parameters=_rope("yarn", factor=4.0, original_max_position_embeddings=1024)),
    "mistral": _Recipe(config_class=MistralConfig, arguments={"sliding_window": SLIDING_WINDOW, "head_dim": 32}),
    "qwen2": _Recipe(config_class=Qwen2Config, arguments={"tie_word_embeddings": True}),
    "qwen2-sliding": _Recipe(
        config_class=Qwen2Config,
        arguments={"use_sliding_window": True, "sliding_window": SLIDING_WINDOW, "max_window_layers": 1},
    ),
    "qwen3": _Recipe(config_class=Qwen3Config, arguments={"head_dim": 32}),
    "gemma3": _Recipe(
        config_class=Gemma3TextConfig,
        arguments={
            "num_hidden_layers": 4,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "query_pre_attn_scalar": 24,
            "sliding_window": SLIDING_WINDOW,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}
FAMILIES: tuple[str, ...] = tuple(_RECIPES)


def build_tiny_model(folder: Path, family: str = "llama", **overrides: object) -> Path:
    """Saves a model of `family` (one of `FAMILIES`) to `folder`, in float32; `overrides` are config values."""
    recipe = _RECIPES[family]
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3}
    config = recipe.config_class(**{**_SIZES, "vocab_size": VOCAB_SIZE, **tokens, **recipe.arguments, **overrides})
    return save_tiny_model(folder, config)


def save_tiny_model(folder: Path, config: PreTrainedConfig) -> Path:
    """Saves a random model of a config of the transformers library to `folder`, in float32, with the tokenizer."""
    torch.manual_seed(17)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]  # untyped there
    _spread_weights(model, embedding_spread=0.01 if config.model_type == "gemma3_text" else 0.1)
    model.save_pretrained(folder)
    _save_tokenizer(folder)
    return folder


def _spread_weights(model: torch.nn.Module, *, embedding_spread: float) -> None:
    """A fresh model's weights are so small that it repeats one token; larger ones make logits that depend on all
    that came before, and norms and biases that are not all alike. Gemma multiplies its embeddings by 8."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.add_(torch.randn_like(weight) * 0.2)
            else:
                weight.copy_(torch.randn_like(weight) * (embedding_spread if "embed" in name else 0.2))


def _save_tokenizer(folder: Path) -> None:
    vocab = {token: index for index, token in enumerate(["<|unk|>", *_SPECIAL_TOKENS])}
    for token in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[token] = len(vocab)
    for left, right in _MERGES:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=list(_MERGES)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in _SPECIAL_TOKENS])
    named = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "pad_token": "<|pad|>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named)  # type: ignore[no-untyped-call]  # untyped there
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
