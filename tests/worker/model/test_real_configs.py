"""The config.json of models that people serve, key by key as published: each is taken, and means what it means to the
transformers library. Sizes are made tiny; every other value is the model's own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.gemma3 import Gemma3TextConfig

from stallfree_worker.model.errors import ModelLoadError
from stallfree_worker.model.families import read_decoder_config
from stallfree_worker.model.loader import load_model
from tests.support.tiny_models import VOCAB_SIZE, save_tiny_model
from tests.worker.model.conftest import tiny_settings
from tests.worker.model.engine_driver import EngineDriver

Config = Mapping[str, object]
TINY: Config = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB_SIZE,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 3,
}
PROMPTS = [[7 + (31 * index + length) % (VOCAB_SIZE - 7) for index in range(length)] for length in (5, 40, 90)]
NUM_TOKENS = 24

_COMMON: Config = {"attention_dropout": 0.0, "initializer_range": 0.02, "torch_dtype": "bfloat16", "use_cache": True}
_LLAMA: Config = {
    **_COMMON,
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "hidden_act": "silu",
    "mlp_bias": False,
    "model_type": "llama",
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
}
LLAMA_32_1B: Config = {
    **_LLAMA,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "head_dim": 64,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "transformers_version": "4.45.0.dev0",
    "vocab_size": 128256,
}
SMOLLM2_135M: Config = {
    **_LLAMA,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_size": 576,
    "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "pad_token_id": 2,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "transformers.js_config": {"kv_cache_dtype": {"fp16": "float16", "q4f16": "float16"}},
    "transformers_version": "4.42.3",
    "vocab_size": 49152,
}
QWEN_25_05B: Config = {
    **_COMMON,
    "architectures": ["Qwen2ForCausalLM"],
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "transformers_version": "4.43.1",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN_3_06B: Config = {
    **_COMMON,
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "transformers_version": "4.51.0",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
MISTRAL_7B_V03: Config = {
    **_COMMON,
    "architectures": ["MistralForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "transformers_version": "4.42.0.dev0",
    "vocab_size": 32768,
}
_GEMMA_3: Config = {
    **_COMMON,
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "bos_token_id": 2,
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000.0,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": 512,
    "vocab_size": 262144,
}
GEMMA_3_270M_IT: Config = {
    **_GEMMA_3,
    "_sliding_window_pattern": 6,
    "eos_token_id": 1,
    "hidden_size": 640,
    "intermediate_size": 2048,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 3,
    "num_hidden_layers": 18,
    "transformers_version": "4.55.0.dev0",
    "use_bidirectional_attention": False,
}
GEMMA_3_1B_IT: Config = {
    **_GEMMA_3,
    "cache_implementation": "hybrid",
    "eos_token_id": [1, 106],
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "num_hidden_layers": 26,
    "sliding_window_pattern": 6,
    "transformers_version": "4.50.0.dev0",
}
GEMMA_3_4B_IT: Config = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "eos_token_id": [1, 106],
    "image_token_index": 262144,
    "initializer_range": 0.02,
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "transformers_version": "4.50.0.dev0",
    "vision_config": {"hidden_size": 1152, "image_size": 896, "model_type": "siglip_vision_model"},
}
CONFIGS = {
    "Llama-3.2-1B": LLAMA_32_1B,
    "SmolLM2-135M-Instruct": SMOLLM2_135M,
    "TinyLlama-1.1B-Chat": {**_LLAMA, "max_position_embeddings": 2048, "max_sequence_length": 2048},
    "Qwen2.5-0.5B-Instruct": QWEN_25_05B,
    "Qwen2.5-7B-Instruct with YaRN": {
        **QWEN_25_05B,
        "tie_word_embeddings": False,
        "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"},
    },
    "DeepSeek-R1-Distill-Qwen-1.5B": {**QWEN_25_05B, "tie_word_embeddings": False, "use_mrope": False},
    "Qwen3-0.6B": QWEN_3_06B,
    "Mistral-7B-v0.3": MISTRAL_7B_V03,
    "Mistral-7B-v0.1": {**MISTRAL_7B_V03, "rope_theta": 10000.0, "sliding_window": 4096},
    "Mistral-Nemo": {**MISTRAL_7B_V03, "head_dim": 128, "max_position_embeddings": 1024000},
    "gemma-3-270m-it": GEMMA_3_270M_IT,
    "gemma-3-1b-it": GEMMA_3_1B_IT,
    "an unsloth copy": {**GEMMA_3_1B_IT, "unsloth_fixed": True, "unsloth_version": "2025.3.1"},
}


def tiny(config: Config) -> Config:
    """The same keys with tiny sizes. Windows are short enough to matter."""
    values = {**config, **TINY}
    if values.get("sliding_window") is not None and config["model_type"] != "qwen2":
        values["sliding_window"] = 16
    if "layer_types" in config:
        values["layer_types"] = ["sliding_attention"] * 5 + ["full_attention"]
    return values


def library_outputs(folder: Path) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    outputs = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, do_sample=False)
        outputs.append([int(token) for token in out[0, len(prompt) :]])
    return outputs


def our_outputs(folder: Path) -> list[list[int]]:
    return EngineDriver(load_model(tiny_settings(folder, dtype="float32")).runner, token_budget=32).generate(
        PROMPTS, num_tokens=NUM_TOKENS
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_b30_published_config_is_taken_whole_and_gives_the_tokens_of_generate(name: str, tmp_path: Path) -> None:
    read_decoder_config(CONFIGS[name] if "vocab_size" in CONFIGS[name] else tiny(CONFIGS[name]))
    config_file = tmp_path / "config.json"
    config_file.write_text(json.dumps(tiny(CONFIGS[name])))
    save_tiny_model(tmp_path, AutoConfig.from_pretrained(tmp_path))
    config_file.write_text(json.dumps(tiny(CONFIGS[name])))  # as published, not as the library writes it
    assert our_outputs(tmp_path) == library_outputs(tmp_path)


def test_b30_text_part_of_a_published_multimodal_config_scales_its_global_layers_alone(tmp_path: Path) -> None:
    text = GEMMA_3_4B_IT["text_config"]
    assert isinstance(text, dict)
    assert {layer.rope.factor for layer in read_decoder_config(GEMMA_3_4B_IT).layers if layer.window_tokens} == {1.0}
    tiny_text = {**text, **TINY, "head_dim": 32, "sliding_window": 16}
    save_tiny_model(tmp_path, Gemma3TextConfig(**tiny_text))
    expected = library_outputs(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**GEMMA_3_4B_IT, "text_config": tiny_text}))
    assert our_outputs(tmp_path) == expected


@pytest.mark.parametrize("changes", [{"rope_interleaved": True}, {"partial_rotary_factor": 0.5}])
def test_b30_key_that_is_known_with_one_value_is_refused_with_another(changes: Config) -> None:
    with pytest.raises(ModelLoadError, match=next(iter(changes))):
        read_decoder_config({**SMOLLM2_135M, **changes})
