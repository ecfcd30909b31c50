"""Rotary position embedding: the frequencies of each scaling rule, and turning queries and keys by them.

The rules are those of the published papers as the transformers library computes them, so that checkpoints tuned with
it keep their meaning. Angles are computed per step for the positions at hand, in float32 (here, and in the kernels for
CPUs): no table grows with the longest context.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from stallfree_worker.model.config_reader import ConfigReader, JsonObject
from stallfree_worker.model.errors import ModelLoadError

RopeType = Literal["default", "linear", "dynamic", "llama3", "yarn"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """One rope rule. Layers that share it share their angles."""

    theta: float
    rope_type: RopeType = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    """Multiplies cosine and sine; yarn only."""


def read_rope(values: JsonObject, *, theta: float, max_position_embeddings: int, where: str) -> RopeConfig:
    """Reads `rope_parameters` (or `rope_scaling` of older files) of one kind of layer.

    `theta` holds where the section names none. Raises `ModelLoadError` for a rule or key that is not known.
    """
    reader = ConfigReader(values, where=f"config.json: {where}")
    old_name = reader.text("type", "default")
    name = reader.text("rope_type", old_name)
    theta = reader.number("rope_theta", theta)
    match name:
        case "default":
            rope = RopeConfig(theta=theta)
        case "linear" | "dynamic":
            # Files name the length that was trained on, also where the rule does not use it.
            reader.optional_integer("original_max_position_embeddings")
            rope = RopeConfig(theta=theta, rope_type=name, factor=reader.number("factor"))
        case "llama3":
            rope = _read_llama3(reader, theta, max_position_embeddings)
        case "yarn":
            rope = _read_yarn(reader, theta, max_position_embeddings)
        case _:
            raise ModelLoadError(
                f"config.json: {where}.rope_type {name!r} is not known; known are {', '.join(get_args(RopeType))}"
            )
    reader.refuse_unread()
    return rope


def _read_llama3(reader: ConfigReader, theta: float, max_position_embeddings: int) -> RopeConfig:
    return RopeConfig(
        theta=theta,
        rope_type="llama3",
        factor=reader.number("factor"),
        low_freq_factor=reader.number("low_freq_factor"),
        high_freq_factor=reader.number("high_freq_factor"),
        original_max_position_embeddings=reader.integer("original_max_position_embeddings", max_position_embeddings),
    )


def _read_yarn(reader: ConfigReader, theta: float, max_position_embeddings: int) -> RopeConfig:
    original = reader.integer("original_max_position_embeddings", max_position_embeddings)
    factor = reader.number("factor", max_position_embeddings / original)
    mscale, mscale_all = reader.optional_number("mscale"), reader.optional_number("mscale_all_dim")
    if mscale and mscale_all:
        inferred = _yarn_magnitude(factor, mscale) / _yarn_magnitude(factor, mscale_all)
    else:
        inferred = _yarn_magnitude(factor, 1.0)
    return RopeConfig(
        theta=theta,
        rope_type="yarn",
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=reader.number("beta_fast", 32.0),
        beta_slow=reader.number("beta_slow", 1.0),
        truncate=reader.flag("truncate", default=True),
        attention_factor=reader.number("attention_factor", inferred),
    )


def _yarn_magnitude(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Radians per position of each pair of dimensions: float32 [head_dim / 2].

    dynamic (NTK-aware) equals default up to the trained length, and no longer context is served with it.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / (rope.theta**exponents)
    match rope.rope_type:
        case "linear":
            return plain / rope.factor
        case "llama3":
            return _llama3(rope, plain)
        case "yarn":
            return _yarn(rope, head_dim)
        case _:
            return plain


def _llama3(rope: RopeConfig, plain: Tensor) -> Tensor:
    """Llama 3.1's rule: long waves are stretched by `factor`, short ones kept, those between blended."""
    wavelengths = 2 * math.pi / plain
    turns = rope.original_max_position_embeddings / wavelengths
    kept_share = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - kept_share) * plain / rope.factor + kept_share * plain
    is_long = wavelengths > rope.original_max_position_embeddings / rope.low_freq_factor
    is_short = wavelengths < rope.original_max_position_embeddings / rope.high_freq_factor
    return torch.where(is_long, plain / rope.factor, torch.where(is_short, plain, blended))


def _yarn(rope: RopeConfig, head_dim: int) -> Tensor:
    """YaRN (Peng et al. 2023, section 3.2): a ramp over the dimensions from kept to interpolated frequencies."""
    wave_bases = rope.theta ** (torch.arange(0, head_dim, 2).float() / head_dim)

    def dimension_with(rotations: float) -> float:
        length = rope.original_max_position_embeddings
        return head_dim * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_with(rope.beta_fast), dimension_with(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a ramp of no width would divide by zero
    interpolated_share = ((torch.arange(head_dim // 2).float() - low) / (high - low)).clamp(0, 1)
    kept_share = 1 - interpolated_share
    return 1.0 / (rope.factor * wave_bases) * (1 - kept_share) + 1.0 / wave_bases * kept_share


class RotaryEmbeddings:
    """Angles of all rope rules of a model, in one go: a decode's few tokens cost less than the calls."""

    def __init__(self, ropes: Sequence[RopeConfig], *, head_dim: int, device: torch.device) -> None:
        self._inverse_frequencies = torch.stack([inverse_frequencies(rope, head_dim) for rope in ropes])[:, None].to(
            device
        )
        factors = [rope.attention_factor for rope in ropes]
        self._factors = torch.tensor(factors, device=device)[:, None, None] if set(factors) != {1.0} else None

    def angles(self, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Of each rope cosine and signed sine for `rotate`, float32 [num_tokens, 1, head_dim] each."""
        angles = positions[:, None].float() * self._inverse_frequencies
        cosines, sines = angles.cos(), angles.sin()
        if self._factors is not None:
            cosines, sines = cosines * self._factors, sines * self._factors
        whole = torch.cat((cosines, cosines), dim=-1)[:, :, None], torch.cat((-sines, sines), dim=-1)[:, :, None]
        return list(zip(*whole, strict=True))


def rotate(heads: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Turns `heads`, float32 [num_tokens, num_heads, head_dim]; pairs are (i, i + head_dim / 2) as in GPT-NeoX."""
    cosine, signed_sine = angles
    first, second = heads.chunk(2, dim=-1)
    return torch.addcmul(heads * cosine, torch.cat((second, first), dim=-1), signed_sine)
