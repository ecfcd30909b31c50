"""A model whose output the test writes: the prompt is the script.

`ScriptedRunner` answers a prompt with the prompt's own token ids, one after another, and then with end-of-sequence.
So a test that sends the ids of "ABCDEF" gets exactly these ids back, in whatever chunks, batches or recomputations
the engine runs them: the runner keeps tokens in KV slots and finds them by block table, as a real model finds keys
and values, and a wrong block table gives wrong output.

Reserved ids bring faults. A fault happens in the step that would draw the id, in place of drawing it, so
`[a, b, RAISE]` gives two good tokens first:

    FAIL_ROW   this request's logits are not finite: it fails alone
    RAISE      execute() raises: the engine fails
    EXIT       the engine's process exits at once, with status 3
    HANG       execute() never returns
    SLOW       an ordinary token; every step that computes one or more of it takes SCRIPTED_SLOW_SECONDS longer

Log-probabilities, where they are asked for, follow from the token alone: see `scripted_logprobs`.

The environment brings what concerns the whole process:

    SCRIPTED_STEP_SECONDS   every step takes this much longer
    SCRIPTED_SLOW_SECONDS   how much longer a step with SLOW takes; 0.1 by default
    SCRIPTED_LOAD_SECONDS   loading takes this long
    SCRIPTED_LOAD_ERROR     loading fails with this text

`--kv-cache-memory` counts 1 KiB a token, 16 MiB by default. `--max-model-len` is 8192 by default. `--model` chooses
nothing; it is the model's name unless `--served-model-name` is given.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from pathlib import Path

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from stallfree_shared.wire import ModelCard, RequestId, TokenLogprobs
from stallfree_worker.engine.step import Chunk, KVGroup, StepPlan, StepResult
from stallfree_worker.loaded_model import LoadedModel, OnTokenizer, TokenizerFile
from stallfree_worker.settings import WorkerSettings

PAD, BOS, EOS, FAIL_ROW, RAISE, EXIT, HANG, SLOW = range(8)
SPECIAL_TOKENS = (
    "<pad>", "<bos>", "<eos>", "<fail_row>", "<raise>", "<exit>", "<hang>", "<slow>", "<|system|>", "<|assistant|>",
)  # fmt: skip
PIECES = ("ABC", "DEF", "HI", "KLM", "\nUser")
"""Tokens of several characters. All 256 bytes are tokens of their own, so "G", "J" and ":" are tokens too."""
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] != 'user' -%}<|{{ message['role'] }}|>{%- endif -%}"
    "{{- message['content'] -}}"
    "{%- endfor -%}"
)
"""A chat with one user message is rendered to that message alone: the answer is the message."""
BYTES_PER_TOKEN = 1024
EXIT_STATUS = 3

_DEFAULT_KV_BYTES = 16 * 1024 * 1024
_DEFAULT_MAX_MODEL_LEN = 8192


class ScriptedRunner:
    """A `Runner` without torch: it echoes. See the module's docstring."""

    def __init__(self, *, num_blocks: int, block_size: int = 16, max_model_len: int = _DEFAULT_MAX_MODEL_LEN) -> None:
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._max_model_len = max_model_len
        self._slots = [PAD] * (num_blocks * block_size)

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def block_size(self) -> int:
        return self._block_size

    @property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        return (KVGroup(),)

    @property
    def max_model_len(self) -> int:
        return self._max_model_len

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return frozenset({EOS})

    def execute(self, plan: StepPlan) -> StepResult:
        """Computes one step. Raises RuntimeError where a script says so."""
        for chunk in plan.chunks:
            self._store(chunk)
        self._take_time(plan)
        drawn: dict[RequestId, int] = {}
        failures: dict[RequestId, str] = {}
        for chunk in plan.chunks:
            if chunk.output_index is None:
                continue
            token_id = self._next(chunk, chunk.output_index)
            if token_id == FAIL_ROW:
                failures[chunk.request_id] = "the script says that the logits are not finite"
            else:
                _act(token_id)
                drawn[chunk.request_id] = token_id
        return StepResult(
            step_id=plan.step_id,
            token_id_by_request=drawn,
            failure_by_request=failures,
            logprobs_by_request={
                chunk.request_id: scripted_logprobs(drawn[chunk.request_id], chunk.sampling.logprobs)
                for chunk in plan.chunks
                if chunk.request_id in drawn and chunk.sampling.logprobs is not None
            },
            prompt_logprobs_by_request={
                chunk.request_id: scores for chunk in plan.chunks if (scores := self._prompt_logprobs(chunk))
            },
        )

    def _prompt_logprobs(self, chunk: Chunk) -> tuple[TokenLogprobs, ...]:
        """Of the prompt tokens that the rows of `chunk` predict: each row the token behind its own."""
        num_top = chunk.sampling.prompt_logprobs
        if num_top is None or chunk.history is None:
            return ()
        first = chunk.num_computed_tokens + 1
        targets = chunk.history.prompt_token_ids[first : first + len(chunk.token_ids)]
        return tuple(scripted_logprobs(token_id, num_top) for token_id in targets)

    def _store(self, chunk: Chunk) -> None:
        for position, token_id in enumerate(chunk.token_ids, chunk.num_computed_tokens):
            if position >= chunk.num_shared_tokens:
                self._slots[self._slot(chunk, position)] = token_id

    def _next(self, chunk: Chunk, output_index: int) -> int:
        num_prompt_tokens = chunk.num_computed_tokens + len(chunk.token_ids) - output_index
        return self._slots[self._slot(chunk, output_index)] if output_index < num_prompt_tokens else EOS

    def _slot(self, chunk: Chunk, position: int) -> int:
        block, offset = divmod(position, self._block_size)
        return chunk.block_tables[0].blocks[block] * self._block_size + offset

    def _take_time(self, plan: StepPlan) -> None:
        seconds = float(os.environ.get("SCRIPTED_STEP_SECONDS", "0"))
        if any(SLOW in chunk.token_ids for chunk in plan.chunks):
            seconds += float(os.environ.get("SCRIPTED_SLOW_SECONDS", "0.1"))
        if seconds > 0:
            time.sleep(seconds)


def _act(token_id: int) -> None:
    """Brings the fault that `token_id` stands for, if any."""
    if token_id == RAISE:
        raise RuntimeError("the script says that the step fails")
    if token_id == EXIT:
        os._exit(EXIT_STATUS)
    while token_id == HANG:
        time.sleep(3600)


def scripted_logprobs(token_id: int, num_top: int) -> TokenLogprobs:
    """The token has -token_id / 256; the likeliest are it and, each less likely by 1, the ids behind it."""
    logprob = -token_id / 256
    return TokenLogprobs(logprob=logprob, top=tuple((token_id + rank, logprob - rank) for rank in range(num_top)))


def scripted_tokenizer() -> Tokenizer:
    """A byte-level tokenizer: special tokens, all 256 bytes, and `PIECES`."""
    vocabulary = {token: token_id for token_id, token in enumerate(SPECIAL_TOKENS)}
    for character in sorted(ByteLevel.alphabet()):
        vocabulary[character] = len(vocabulary)
    merges: list[tuple[str, str]] = []
    for piece in PIECES:
        symbols = piece.replace("\n", "Ċ")
        for end in range(1, len(symbols)):
            merges.append((symbols[:end], symbols[end]))
            vocabulary.setdefault(symbols[: end + 1], len(vocabulary))
    tokenizer = Tokenizer(BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer


def scripted_card(*, model: str = "scripted", max_model_len: int = _DEFAULT_MAX_MODEL_LEN) -> ModelCard:
    """What a worker with a scripted model tells routers."""
    tokenizer = scripted_tokenizer()
    return ModelCard(
        model=model,
        max_model_len=max_model_len,
        vocab_size=tokenizer.get_vocab_size(),
        eos_token_ids=frozenset({EOS}),
        tokenizer_sha256=hashlib.sha256(tokenizer.to_str().encode()).hexdigest(),
        chat_template=CHAT_TEMPLATE,
        special_tokens={"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"},
    )


def load_scripted_model(settings: WorkerSettings, on_tokenizer: OnTokenizer) -> LoadedModel:
    """A `ModelLoader`. Raises RuntimeError where the environment says so."""
    max_model_len = settings.max_model_len or _DEFAULT_MAX_MODEL_LEN
    card = scripted_card(model=settings.served_model_name or settings.model, max_model_len=max_model_len)
    on_tokenizer(TokenizerFile(path=_tokenizer_file(card.tokenizer_sha256), sha256=card.tokenizer_sha256))
    time.sleep(float(os.environ.get("SCRIPTED_LOAD_SECONDS", "0")))
    if error := os.environ.get("SCRIPTED_LOAD_ERROR"):
        raise RuntimeError(error)
    num_tokens = int(settings.kv_cache_memory or _DEFAULT_KV_BYTES) // BYTES_PER_TOKEN
    block_size = settings.block_size or 16
    runner = ScriptedRunner(num_blocks=num_tokens // block_size, block_size=block_size, max_model_len=max_model_len)
    return LoadedModel(
        runner=runner,
        card=card,
        kv_cache_bytes=num_tokens * BYTES_PER_TOKEN,
    )


def _tokenizer_file(sha256: str) -> Path:
    path = Path(tempfile.gettempdir()) / f"stallfree-scripted-{sha256[:16]}" / "tokenizer.json"
    path.parent.mkdir(exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}")
    unfinished.write_text(scripted_tokenizer().to_str())
    unfinished.replace(path)
    return path
