"""Loads a model: settings in, a runner and a model card out. Called in the engine's process, once per start."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from stallfree_worker.loaded_model import LoadedModel, OnTokenizer, TokenizerFile
from stallfree_worker.model.backends import Model, choose_backend
from stallfree_worker.model.card import ModelFolder, make_card
from stallfree_worker.model.checkpoint import Checkpoint
from stallfree_worker.model.config_reader import JsonObject
from stallfree_worker.model.cores import keep_to_numa_node, usable_cores
from stallfree_worker.model.decoder import Decoder
from stallfree_worker.model.demo import DEMO_MODEL, DEMO_NAME
from stallfree_worker.model.errors import ModelLoadError
from stallfree_worker.model.families import DecoderConfig, read_decoder_config
from stallfree_worker.model.grammar_masks import GrammarVocabulary
from stallfree_worker.model.kv_cache import DEFAULT_CPU_CACHE_BYTES, KVCache, KVCacheShape
from stallfree_worker.model.runner import ModelRunner, RunnerLimits
from stallfree_worker.model.source import model_folder
from stallfree_worker.model.structured_output import StructuredOutputs
from stallfree_worker.settings import ModelSettings, WorkerSettings

_logger = logging.getLogger(__name__)


def _ignore(_tokenizer: TokenizerFile) -> None:
    """For callers that wait for the whole model anyway."""


def load_model(settings: WorkerSettings, on_tokenizer: OnTokenizer = _ignore) -> LoadedModel:
    """Raises `ModelLoadError` for whatever keeps this model from being served with these settings."""
    device = _device(settings)
    if device.type == "cpu" or settings.numa_node != "auto":
        keep_to_numa_node(settings.numa_node)
    torch.set_num_threads(settings.threads or usable_cores())
    path = model_folder(settings)
    folder = ModelFolder.read(path)
    on_tokenizer(folder.tokenizer)
    config = read_decoder_config(folder.config)
    max_model_len = _max_model_len(config, settings.max_model_len)
    num_tokenizer_ids = folder.num_tokenizer_ids()
    vocab_size = min(num_tokenizer_ids, config.vocab_size)
    with Checkpoint(path) as checkpoint:
        dtype = _dtype(settings, folder.config, checkpoint, device)
        model = Model(config=config, device=device, dtype=dtype, num_head_rows=vocab_size, max_model_len=max_model_len)
        backend = choose_backend(model, settings)
        decoder = backend.load_decoder(checkpoint)
    eos_token_ids = folder.eos_token_ids(vocab_size)
    limits = RunnerLimits(max_model_len=max_model_len, eos_token_ids=eos_token_ids)
    cache_shape = KVCacheShape.of(config, block_size=backend.block_size, dtype=dtype)
    vocabulary = GrammarVocabulary.load(
        folder.tokenizer.path,
        num_tokenizer_ids=num_tokenizer_ids,
        num_ids=vocab_size,
        eos_token_ids=eos_token_ids,
    )
    outputs = StructuredOutputs(vocabulary, decoder.device, num_threads=max(2, min(8, usable_cores() // 2)))
    runner = _make_runner(decoder, cache_shape, settings, limits=limits, structured_outputs=outputs)
    runner.prepare()
    _logger.info(
        "model loaded",
        extra={
            "model": settings.model,
            "dtype": str(dtype),
            "backend": backend.name,
            "block_size": backend.block_size,
            "kv_blocks": runner.num_blocks,
            "threads": torch.get_num_threads(),
        },
    )
    return LoadedModel(
        runner=runner,
        card=make_card(
            folder,
            name=settings.served_model_name or _default_name(settings.model),
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            chat_template=settings.chat_template,
        ),
        kv_cache_bytes=runner.num_blocks * cache_shape.block_bytes,
        leaves_host_free=device.type != "cpu" or torch.get_num_threads() < usable_cores(),
    )


def _default_name(model: str) -> str:
    """A hub id as it is; of a path the last part."""
    if model == DEMO_MODEL:
        return DEMO_NAME
    is_path = model.startswith(("/", ".", "~")) or Path(model).exists()
    return Path(model).expanduser().resolve().name if is_path else model


def _make_runner(
    decoder: Decoder,
    shape: KVCacheShape,
    settings: WorkerSettings,
    *,
    limits: RunnerLimits,
    structured_outputs: StructuredOutputs,
) -> ModelRunner:
    most_useful_tokens = limits.max_model_len * settings.max_num_seqs

    def runner_within(memory_bytes: int) -> ModelRunner:
        num_blocks = shape.blocks_within(memory_bytes, most_useful_tokens=most_useful_tokens)
        cache = KVCache(shape, num_blocks=num_blocks, device=decoder.device)
        return ModelRunner(decoder, cache, limits=limits, structured_outputs=structured_outputs)

    if settings.kv_cache_memory is not None:
        return runner_within(int(settings.kv_cache_memory))
    if decoder.device.type == "cpu":
        return runner_within(DEFAULT_CPU_CACHE_BYTES)
    # The largest step tells what weights and activations need; its own cache is counted with them and given back. What
    # recorded passes need besides is little, and left to the share that is not used.
    step_blocks = shape.blocks_of_step(settings.max_step_tokens)
    torch.cuda.reset_peak_memory_stats(decoder.device)
    runner_within(step_blocks * shape.block_bytes).compute_largest_step(
        settings.max_step_tokens, num_requests=settings.max_num_seqs
    )
    needed_bytes = torch.cuda.max_memory_reserved(decoder.device) - step_blocks * shape.block_bytes
    torch.cuda.empty_cache()
    total_bytes = torch.cuda.get_device_properties(decoder.device).total_memory
    return runner_within(int(total_bytes * settings.gpu_memory_utilization) - needed_bytes)


def _max_model_len(config: DecoderConfig, wanted: int | None) -> int:
    longest = config.longest_context
    if wanted is not None and wanted > longest:
        raise ModelLoadError(f"--max-model-len {wanted} is more than the {longest} tokens that the model was made for")
    return wanted or longest


def _device(settings: ModelSettings) -> torch.device:
    has_cuda = torch.cuda.is_available()
    if settings.device == "cuda" and not has_cuda:
        raise ModelLoadError("--device cuda: torch finds no CUDA device here")
    return torch.device("cuda" if has_cuda and settings.device != "cpu" else "cpu")


def _dtype(
    settings: ModelSettings, config_json: JsonObject, checkpoint: Checkpoint, device: torch.device
) -> torch.dtype:
    dtype = _wanted_dtype(settings, config_json, checkpoint)
    if (
        dtype == torch.bfloat16
        and device.type == "cuda"
        and not torch.cuda.is_bf16_supported(including_emulation=False)
    ):
        raise ModelLoadError("--dtype bfloat16: this GPU cannot compute in bfloat16; --dtype float32 works on it")
    return dtype


def _wanted_dtype(settings: ModelSettings, config_json: JsonObject, checkpoint: Checkpoint) -> torch.dtype:
    """What the setting says, or the config, or else the weights themselves."""
    text = config_json.get("text_config")
    sources = [config_json, text if isinstance(text, dict) else {}]
    named = next((source[key] for source in sources for key in ("dtype", "torch_dtype") if source.get(key)), None)
    name = settings.dtype if settings.dtype != "auto" else str(named or checkpoint.dtype).removeprefix("torch.")
    if name == "float16":
        # Activations beyond 65,504 overflow in float16; bfloat16 holds them and is what CPUs compute fast.
        _logger.warning("a float16 model is served in bfloat16", extra={"model": settings.model})
        name = "bfloat16"
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if name not in known:
        raise ModelLoadError(f"config.json: dtype {name!r} cannot be served; float32, bfloat16 and float16 can")
    return known[name]
