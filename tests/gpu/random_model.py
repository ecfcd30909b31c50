"""A folder with a Llama of real shape and random weights: speed does not depend on what they are."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models

_SPREAD = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    max_positions: int = 16384

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


SHAPES = {
    "tiny": Shape(hidden_size=64, intermediate_size=128, num_layers=2, num_heads=4, num_kv_heads=2, vocab_size=300),
    "llama-1b": Shape(
        hidden_size=2048, intermediate_size=8192, num_layers=16, num_heads=32, num_kv_heads=8, vocab_size=128256
    ),
    "llama-8b": Shape(
        hidden_size=4096, intermediate_size=14336, num_layers=32, num_heads=32, num_kv_heads=8, vocab_size=128256
    ),
}


def save_random_model(folder: Path, shape: Shape, device: torch.device) -> Path:
    """In bfloat16, with one embedding for input and output."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator(device).manual_seed(7)

    def matrix(*size: int) -> torch.Tensor:
        weights = torch.empty(size, dtype=torch.bfloat16, device=device)
        return weights.normal_(std=_SPREAD, generator=generator).cpu()

    hidden, kv_size = shape.hidden_size, shape.num_kv_heads * shape.head_dim
    norm = torch.ones(hidden, dtype=torch.bfloat16)
    tensors = {"model.embed_tokens.weight": matrix(shape.vocab_size, hidden), "model.norm.weight": norm}
    for layer in range(shape.num_layers):
        sizes = {
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (kv_size, hidden),
            "self_attn.v_proj": (kv_size, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (shape.intermediate_size, hidden),
            "mlp.up_proj": (shape.intermediate_size, hidden),
            "mlp.down_proj": (hidden, shape.intermediate_size),
        }
        prefix = f"model.layers.{layer}."
        tensors |= {f"{prefix}{name}.weight": matrix(*size) for name, size in sizes.items()}
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = norm.clone()
    save_file(tensors, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    vocab = {f"<{token}>": token for token in range(shape.vocab_size)}
    Tokenizer(models.WordLevel(vocab)).save(str(folder / "tokenizer.json"))
    return folder
