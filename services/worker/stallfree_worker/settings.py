"""The worker's settings, in groups; a class takes its own group only."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import ByteSize, Field

from stallfree_shared.settings import DrainSettings, ServerSettings, SettingsGroup

Dtype = Literal["auto", "float32", "bfloat16"]
Device = Literal["auto", "cpu", "cuda"]
AttentionBackend = Literal["auto", "cpu", "flash_attn", "reference"]
Quantization = Literal["none", "int8"]
BatchingName = Literal["sarathi", "orca", "vllm", "faster_transformer", "chunked_only"]


class ModelSettings(SettingsGroup):
    """Which model is served, and how its numbers are kept."""

    model: str = Field(
        description="What to serve: a folder in Hugging Face format, a GGUF file, or a hub id "
        "such as Qwen/Qwen2.5-0.5B-Instruct. demo:gemma3-270m is the small model of the extra [demo]."
    )
    served_model_name: str | None = Field(
        None, description="Name that clients use; by default the hub id, or the last part of the path."
    )
    max_model_len: int | None = Field(
        None,
        ge=1,
        description="Most tokens of prompt and output together; by default what the model was made for.",
    )
    dtype: Dtype = Field("auto", description="Number format of weights and KV cache; auto takes the model's own.")
    quantization: Quantization = Field(
        "none",
        description="How matrices are kept and multiplied: none, in --dtype; int8, as 8-bit integers with a scale for "
        "each output: half the memory, faster, and logits that differ a little; embeddings stay as they are (CPU "
        "kernels only).",
    )
    device: Device = Field("auto", description="Where to compute; auto takes CUDA where there is a GPU.")
    attention_backend: AttentionBackend = Field(
        "auto",
        description="How the forward pass is computed: cpu, by compiled kernels for CPUs with AVX-512; flash_attn, by "
        "the flash-attn library on CUDA; reference, in plain torch on any device; auto takes the fastest that it can.",
    )
    cuda_graphs: bool = Field(
        True,
        description="With flash_attn, replay recorded forward passes for steps of few tokens; the start takes longer.",
    )
    tensor_parallel_size: int = Field(
        1, ge=1, le=1, description="GPUs that share one model; one is what there is so far."
    )
    threads: int = Field(
        0,
        ge=0,
        description="CPU threads for the model; 0 takes one per core, or as many as the container's CPU limit allows.",
    )
    numa_node: Literal["auto", "all"] | Annotated[int, Field(ge=0)] = Field(
        "auto",
        description="NUMA node whose cores and memory the model keeps to, a number or all; auto takes, on a CPU, the "
        "node that has most of the cores it may use: one worker for each node serves more than one for all.",
    )
    chat_template: Path | None = Field(
        None, description="File with a Jinja chat template, in place of the model's own."
    )
    cache_dir: Path = Field(
        Path("~/.cache/stallfree"), description="Folder for models that were downloaded or converted."
    )


class CacheSettings(SettingsGroup):
    """How much KV cache there is."""

    block_size: int | None = Field(
        None,
        ge=1,
        le=256,
        description="Tokens in one KV block; by default 16, or 256 where FlashAttention-2 computes, which takes no "
        "less.",
    )
    kv_cache_memory: ByteSize | None = Field(
        None,
        ge=1,
        description="Bytes for the KV cache, such as 512MiB or 4GiB; by default what --gpu-memory-utilization leaves "
        "on a GPU, and 1GiB on a CPU.",
    )
    prefix_caching: bool = Field(
        True,
        description="Keep the blocks of computed tokens for later requests that begin alike, until the room is needed.",
    )
    gpu_memory_utilization: float = Field(
        0.9,
        gt=0,
        le=1,
        description="Share of the GPU's memory for weights, activations and KV cache together.",
    )


class SchedulerSettings(SettingsGroup):
    """What one step may hold, and what may wait."""

    max_num_seqs: int = Field(128, ge=1, description="Most requests that run at once.")
    batching: BatchingName = Field(
        "sarathi",
        description="Rule by which requests join a step. All but sarathi are baselines to measure against.",
    )
    token_budget: Literal["auto", "by-position"] | Annotated[int, Field(ge=1)] = Field(
        "auto",
        description="Most tokens that one step computes, all running decodes first, then prefill chunks: a number; "
        "by-position, large chunks first that shrink along the prompt; or auto, as many as keep the predicted step "
        "within the tightest TBT target of the running requests.",
    )
    max_num_batched_tokens: int = Field(
        2048, ge=16, description="Most tokens that a step of auto or by-position ever computes; memory is sized for it."
    )
    max_step_seconds: float = Field(
        0.5,
        gt=0,
        description="Most seconds that auto lets a step take, by its prediction, while nothing decodes, so that a new "
        "short prompt and a cancel need not wait behind one giant step.",
    )
    tbt_target_seconds: float = Field(
        0.2,
        gt=0,
        description="Default target for the time between two tokens; a gap beyond it counts as a stall.",
    )
    ttft_target_seconds: float = Field(
        5.0,
        gt=0,
        description="Default target for the time to the first token. Short prompts go first while longer ones can "
        "still meet theirs.",
    )
    max_prefill_wait_seconds: float = Field(
        5.0,
        gt=0,
        description="Most seconds that a prompt, new or half computed, goes without a chunk while later ones get "
        "theirs; then it comes first, whatever its length. Prompts of like length and target always come in order of "
        "arrival.",
    )
    priority_step_seconds: float = Field(
        30.0, gt=0, description="Seconds of waiting that lift a request by one priority, so that none waits for ever."
    )
    max_waiting_requests: int = Field(1024, ge=1, description="Most requests that wait; more are refused (429).")
    max_waiting_tokens: int = Field(
        1_000_000, ge=1, description="Most prompt tokens that wait; more are refused (429)."
    )

    @property
    def max_step_tokens(self) -> int:
        """Most prefill tokens of one step, whatever chooses them."""
        return self.token_budget if isinstance(self.token_budget, int) else self.max_num_batched_tokens


class EngineProcessSettings(SettingsGroup):
    """How the engine's own process works and is watched."""

    overlap: Literal["auto", "on", "off"] = Field(
        "auto",
        description="Plan the next step while one is computed. auto does where a core is free then: on a GPU, and on a "
        "CPU with more cores than --threads. A prompt that arrives in the meantime waits one step longer.",
    )
    engine_start_timeout_seconds: float = Field(
        1800.0, gt=0, description="Most seconds for loading the model; then the worker gives up."
    )
    step_timeout_seconds: float = Field(
        120.0,
        gt=0,
        description="Most seconds without a sign of an engine that serves, so most that one step may take; then it is "
        "restarted.",
    )
    max_engine_restarts: int = Field(
        3,
        ge=0,
        description="Times that a dead engine is started anew within ten minutes; then the worker exits.",
    )
    trace: Path | None = Field(
        None, description="File to which every step is written as a Chrome trace (open it in Perfetto)."
    )
    trace_max_bytes: ByteSize = Field(
        ByteSize(256 * 1024 * 1024),
        ge=65536,
        description="Bytes at which the trace is renamed to FILE.1, in place of the one before, and begun anew.",
    )
    no_progress_warning_seconds: float = Field(
        10.0, gt=0, description="Seconds that requests are here without a step; then a log line tells what is wanted."
    )
    no_progress_liveness_seconds: float = Field(
        300.0,
        gt=0,
        description="Seconds that requests are here without a step; then /livez fails, so that the pod is restarted. "
        "Longer than --step-timeout-seconds, which mends an engine that is silent.",
    )
    max_frames_behind: int = Field(
        4096, ge=1, description="Frames that may wait for a slow router; then its stream is cut."
    )


class WorkerSettings(
    DrainSettings, ServerSettings, EngineProcessSettings, SchedulerSettings, CacheSettings, ModelSettings
):
    """Serves one model with a Sarathi engine: long prompts in chunks, decodes in every step."""
