"""The model card: what routers must know of a model to turn text into its tokens and back."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from stallfree_shared.wire import ModelCard, SamplingDefaults
from stallfree_worker.loaded_model import TokenizerFile
from stallfree_worker.model.checkpoint import read_json
from stallfree_worker.model.config_reader import JsonObject
from stallfree_worker.model.errors import ModelLoadError

_SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """The small files of a model, read once."""

    path: Path
    tokenizer: TokenizerFile
    config: JsonObject
    generation: JsonObject
    tokenizer_config: JsonObject

    @classmethod
    def read(cls, path: Path) -> ModelFolder:
        """Raises `ModelLoadError` where config.json or tokenizer.json is missing, or a file is no JSON object."""
        config = read_json(path / "config.json")
        tokenizer_path = path / "tokenizer.json"
        if not tokenizer_path.is_file():
            raise ModelLoadError(
                f"{path} has no tokenizer.json; a model with an older tokenizer must be saved once with a fast one"
            )
        generation, tokenizer_config = (
            read_json(path / name) if (path / name).exists() else {}
            for name in ("generation_config.json", "tokenizer_config.json")
        )
        tokenizer = TokenizerFile(path=tokenizer_path, sha256=hashlib.sha256(tokenizer_path.read_bytes()).hexdigest())
        return cls(
            path=path, tokenizer=tokenizer, config=config, generation=generation, tokenizer_config=tokenizer_config
        )

    def eos_token_ids(self, vocab_size: int) -> frozenset[int]:
        """Every id that one of the files says ends a text, but for those that the model cannot draw."""
        text = self.config.get("text_config")
        sources = [self.generation, self.config, text if isinstance(text, Mapping) else {}]
        found = [token_id for source in sources for token_id in _ids(source.get("eos_token_id"))]
        return frozenset(token_id for token_id in found if 0 <= token_id < vocab_size)

    def num_tokenizer_ids(self) -> int:
        """Ids that the tokenizer knows run from 0 to one less than this."""
        tokenizer = read_json(self.tokenizer.path)
        model, added = tokenizer.get("model"), tokenizer.get("added_tokens")
        vocab = model.get("vocab") if isinstance(model, Mapping) else None
        # A Unigram model lists its tokens by id; the others map token to id.
        known = [len(vocab) - 1] if isinstance(vocab, list) else list(vocab.values()) if isinstance(vocab, dict) else []
        known += [token["id"] for token in added] if isinstance(added, list) else []
        if not known:
            raise ModelLoadError(f"{self.tokenizer.path} has no vocabulary")
        return max(known) + 1


def make_card(
    folder: ModelFolder, *, name: str, max_model_len: int, vocab_size: int, chat_template: Path | None
) -> ModelCard:
    return ModelCard(
        model=name,
        max_model_len=max_model_len,
        vocab_size=vocab_size,
        eos_token_ids=folder.eos_token_ids(vocab_size),
        tokenizer_sha256=folder.tokenizer.sha256,
        chat_template=_chat_template(folder, chat_template),
        special_tokens=_special_tokens(folder.tokenizer_config),
        sampling_defaults=_sampling_defaults(folder.generation),
    )


def _ids(value: object) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [item for item in values if isinstance(item, int)]


def _chat_template(folder: ModelFolder, chosen: Path | None) -> str | None:
    """The setting's file, the model's own file, or what older models keep in tokenizer_config.json."""
    if chosen is not None:
        try:
            return chosen.expanduser().read_text(encoding="utf-8")
        except OSError as error:
            raise ModelLoadError(f"--chat-template {chosen} cannot be read: {error}") from error
    own = folder.path / "chat_template.jinja"
    if own.exists():
        return own.read_text(encoding="utf-8")
    kept = folder.tokenizer_config.get("chat_template")
    named = {item["name"]: item["template"] for item in kept} if isinstance(kept, list) else {"default": kept}
    template = named.get("default")
    return template if isinstance(template, str) else None


def _special_tokens(tokenizer_config: JsonObject) -> dict[str, str]:
    """A special token is kept as a string, or as an object with its content."""
    values = {name: tokenizer_config.get(name) for name in _SPECIAL_TOKENS}
    texts = {name: value.get("content") if isinstance(value, Mapping) else value for name, value in values.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _sampling_defaults(generation: JsonObject) -> SamplingDefaults:
    """generation_config.json's values count only where it asks for sampling at all."""
    if generation.get("do_sample") is not True:
        return SamplingDefaults()

    def number(key: str, default: float) -> float:
        value = generation.get(key)
        return float(value) if isinstance(value, int | float) else default

    return SamplingDefaults(
        temperature=number("temperature", 1.0),
        top_p=number("top_p", 1.0),
        top_k=int(number("top_k", 0)),
        min_p=number("min_p", 0.0),
    )
