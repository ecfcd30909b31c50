"""Reads config.json strictly: every key is either taken, known to mean nothing here, or stops the start.

A key that is silently ignored ruins answers without an error, so an unknown one is refused by its name. Called by
`families` only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from stallfree_worker.model.errors import ModelLoadError

JsonObject = Mapping[str, object]

KEYS_WITHOUT_MEANING = frozenset(
    {
        # who wrote the file, and how training and generation are set up: nothing that changes one forward pass
        *(
            "_name_or_path",
            "_model_name_or_path",
            "architectures",
            "model_type",
            "transformers_version",
            "transformers.js_config",
            "auto_map",
            "is_llama_config",
            "unsloth_fixed",
            "unsloth_version",
        ),
        *(
            "dtype",
            "torch_dtype",
            "bos_token_id",
            "eos_token_id",
            "pad_token_id",
            "unk_token_id",
            "sep_token_id",
            "decoder_start_token_id",
            "use_cache",
            "cache_implementation",
        ),
        *("initializer_range", "attention_dropout", "pretraining_tp", "max_sequence_length", "neftune_noise_alpha"),
        *("_attn_implementation_autoset", "_attn_implementation", "attn_implementation", "_flash_attn_2_enabled"),
        *("output_attentions", "output_hidden_states", "return_dict", "torchscript", "chunk_size_feed_forward"),
        *("id2label", "label2id", "problem_type", "is_encoder_decoder", "is_decoder", "tokenizer_class"),
        # what transformers 4 wrote into the `text_config` of a multimodal model: defaults of other architectures
        *("add_cross_attention", "cross_attention_hidden_size", "tie_encoder_decoder", "pruned_heads", "prefix"),
        *("finetuning_task", "task_specific_params", "remove_invalid_values", "use_bfloat16", "tf_legacy_loss"),
        # and of generation, which generation_config.json has taken over
        *("do_sample", "temperature", "top_k", "top_p", "typical_p", "max_length", "min_length"),
        *("num_beams", "num_beam_groups", "diversity_penalty", "early_stopping", "length_penalty"),
        *("repetition_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids"),
        *("num_return_sequences", "output_scores", "return_dict_in_generate", "exponential_decay_length_penalty"),
        *("forced_bos_token_id", "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens"),
    }
)

_ONLY_VALUES: Mapping[str, object] = {"rope_interleaved": False, "partial_rotary_factor": 1.0}
"""Keys that some files name with the one value that is computed here; any other value is refused."""


class ConfigReader:
    """Hands out the values of one JSON object and remembers which were asked for."""

    def __init__(self, values: JsonObject, *, where: str = "config.json") -> None:
        self._values = values
        self._where = where
        self._read: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return self._values.get(key) is not None

    def integer(self, key: str, default: int | None = None) -> int:
        """Raises `ModelLoadError` where the key has no value and no default, or is no positive integer."""
        value = self._take(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self._wrong(key, "a positive integer", value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._take(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self._wrong(key, "a number", value)
        return float(value)

    def optional_integer(self, key: str, *, absent: int | None = None) -> int | None:
        """None where the file says null, `absent` where it says nothing at all."""
        if key not in self._values:
            return absent
        if key not in self:
            self._read.add(key)
            return None
        return self.integer(key)

    def optional_number(self, key: str) -> float | None:
        if key not in self:
            self._read.add(key)
            return None
        return self.number(key)

    def flag(self, key: str, *, default: bool) -> bool:
        value = self._take(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false", value)
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._take(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, "a string", value)
        return value

    def texts(self, key: str) -> tuple[str, ...] | None:
        value = self._take(key, ())
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
            raise self._wrong(key, "a list of strings", value)
        return tuple(value) or None

    def section(self, key: str) -> JsonObject | None:
        value = self._take(key, {})
        if not isinstance(value, Mapping):
            raise self._wrong(key, "an object", value)
        return cast("JsonObject", value) or None

    def refuse_unread(self) -> None:
        """Raises `ModelLoadError` with the names of keys that carry a value nobody asked for."""
        unread = {key for key, value in self._values.items() if value is not None and _ONLY_VALUES.get(key) != value}
        unknown = sorted(unread - self._read - KEYS_WITHOUT_MEANING)
        if unknown:
            listed = ", ".join(f"{key}={self._values[key]!r}" for key in unknown)
            raise ModelLoadError(f"{self._where} has settings that this worker does not know: {listed}")

    def _take(self, key: str, default: object) -> object:
        self._read.add(key)
        value = self._values.get(key)
        return default if value is None else value

    def _wrong(self, key: str, expected: str, value: object) -> ModelLoadError:
        return ModelLoadError(f"{self._where}: {key} must be {expected}, not {value!r}")
