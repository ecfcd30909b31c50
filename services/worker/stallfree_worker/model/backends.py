"""Which implementation computes the forward pass: by the settings, the device, the model and what is installed here.

Called by `loader`, once. What `auto` cannot have is told in the log, what was asked for by name and cannot be had ends
the start.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from stallfree_worker.model.attention.flash_attn import find_flash_attention
from stallfree_worker.model.attention.flash_attn import reason_against as reason_against_flash
from stallfree_worker.model.attention.interface import AttentionBackend
from stallfree_worker.model.attention.reference import ReferenceAttention
from stallfree_worker.model.checkpoint import Checkpoint
from stallfree_worker.model.cpu.decoder import CpuDecoder
from stallfree_worker.model.cpu.decoder import reason_against as reason_against_cpu
from stallfree_worker.model.cpu.packed import PackedMatrix
from stallfree_worker.model.cuda_graphs import GraphedDecoder, graph_sizes
from stallfree_worker.model.decoder import Decoder, TorchDecoder
from stallfree_worker.model.errors import ModelLoadError
from stallfree_worker.model.families import DecoderConfig
from stallfree_worker.model.linear import Linear
from stallfree_worker.model.operations import PLAIN, Operations, fused_operations
from stallfree_worker.model.weights import WeightTarget, load_weights
from stallfree_worker.settings import WorkerSettings

_logger = logging.getLogger(__name__)
_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What is to be computed, and where."""

    config: DecoderConfig
    device: torch.device
    dtype: torch.dtype
    num_head_rows: int
    max_model_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """How it is computed."""

    name: str
    block_size: int
    """Tokens in one KV block: the setting, or what suits the backend."""
    load_decoder: Callable[[Checkpoint], Decoder]


def choose_backend(model: Model, settings: WorkerSettings) -> Backend:
    """Raises `ModelLoadError` where the settings name what cannot be had."""
    name = settings.attention_backend
    if settings.quantization != "none":
        return _quantized(model, settings)
    if name == "reference":
        return _in_plain_torch(model, settings)
    if name == "auto":
        name = "cpu" if model.device.type == "cpu" else "flash_attn"
    found = _with_cpu_kernels(model, settings) if name == "cpu" else _with_flash_attention(model, settings)
    if isinstance(found, Backend):
        return found
    if settings.attention_backend == name:
        raise ModelLoadError(f"--attention-backend {name}: {found}")
    _logger.warning("plain torch computes, for want of something faster", extra={"backend": name, "reason": found})
    return _in_plain_torch(model, settings)


def _in_plain_torch(model: Model, settings: WorkerSettings) -> Backend:
    block_size = settings.block_size or _BLOCK_SIZE

    def load(checkpoint: Checkpoint) -> Decoder:
        return _load_in_torch(model, checkpoint, ReferenceAttention())

    return Backend(name="reference", block_size=block_size, load_decoder=load)


def _quantized(model: Model, settings: WorkerSettings) -> Backend:
    found: Backend | str
    if model.dtype != torch.bfloat16:
        found = f"activations must be bfloat16, and --dtype gives {str(model.dtype).removeprefix('torch.')}"
    elif settings.attention_backend not in {"auto", "cpu"}:
        found = f"--attention-backend {settings.attention_backend} does not know it"
    else:
        found = _with_cpu_kernels(model, settings)
    if isinstance(found, str):
        raise ModelLoadError(f"--quantization {settings.quantization}: {found}")
    return found


def _with_cpu_kernels(model: Model, settings: WorkerSettings) -> Backend | str:
    """Or the reason why not."""
    block_size = settings.block_size or _BLOCK_SIZE
    if model.device.type != "cpu":
        return f"the compiled kernels are for CPUs, and the device is {model.device.type}"
    reason = reason_against_cpu(model.config, dtype=model.dtype, block_size=block_size)
    if reason is not None:
        return f"the compiled kernels cannot be used: {reason}"

    def load(checkpoint: Checkpoint) -> Decoder:
        make_matrix = PackedMatrix.quantized if settings.quantization == "int8" else PackedMatrix
        target = WeightTarget(model.device, model.dtype, model.num_head_rows, make_matrix)
        weights = load_weights(checkpoint, model.config, target)
        return CpuDecoder(model.config, weights, block_size=block_size, num_threads=torch.get_num_threads())

    return Backend(name="cpu", block_size=block_size, load_decoder=load)


def _with_flash_attention(model: Model, settings: WorkerSettings) -> Backend | str:
    """Or the reason why not."""
    attention = find_flash_attention(model.device)
    if isinstance(attention, str):
        return attention
    reason = reason_against_flash(model.config.head_dim, model.dtype)
    if reason is not None:
        return reason
    multiple = attention.block_size_multiple
    block_size = settings.block_size or multiple
    if block_size % multiple:
        raise ModelLoadError(
            f"--block-size {block_size} is no multiple of {multiple}, which this generation of flash-attn asks for; "
            "leave it out, or take --attention-backend reference"
        )

    def load(checkpoint: Checkpoint) -> Decoder:
        decoder = _load_in_torch(model, checkpoint, attention, operations=fused_operations())
        if not settings.cuda_graphs:
            return decoder
        sizes = graph_sizes(max_num_seqs=settings.max_num_seqs, max_step_tokens=settings.max_step_tokens)
        return GraphedDecoder(decoder, sizes, max_model_len=model.max_model_len)

    return Backend(name="flash_attn", block_size=block_size, load_decoder=load)


def _load_in_torch(
    model: Model, checkpoint: Checkpoint, attention: AttentionBackend, operations: Operations = PLAIN
) -> TorchDecoder:
    target = WeightTarget(model.device, model.dtype, model.num_head_rows, Linear)
    weights = load_weights(checkpoint, model.config, target)
    return TorchDecoder(model.config, weights, attention, operations)
