"""Defects of the reference implementation that concern the whole worker; the others: `tests/worker/engine`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from stallfree_shared.settings import load_settings
from stallfree_worker.settings import WorkerSettings
from tests.support.wire_client import ROOT

ONE_CHOICE_SO_FAR = {"tensor_parallel_size"}
OTHER_VALUES: dict[str, str] = {
    "model": "a/model",
    "served_model_name": "name",
    "max_model_len": "777",
    "dtype": "float32",
    "quantization": "int8",
    "device": "cpu",
    "attention_backend": "reference",
    "cuda_graphs": "",
    "tensor_parallel_size": "1",
    "threads": "3",
    "numa_node": "1",
    "chat_template": "/template",
    "cache_dir": "/cache",
    "block_size": "32",
    "kv_cache_memory": "5MiB",
    "prefix_caching": "",  # --no-prefix-caching
    "gpu_memory_utilization": "0.55",
    "max_num_seqs": "17",
    "batching": "orca",
    "token_budget": "333",
    "max_num_batched_tokens": "999",
    "max_step_seconds": "0.75",
    "tbt_target_seconds": "0.33",
    "ttft_target_seconds": "3.5",
    "max_prefill_wait_seconds": "4.5",
    "priority_step_seconds": "12",
    "max_waiting_requests": "55",
    "max_waiting_tokens": "5555",
    "overlap": "on",
    "engine_start_timeout_seconds": "100",
    "step_timeout_seconds": "44",
    "max_engine_restarts": "7",
    "trace_max_bytes": "1MiB",
    "no_progress_warning_seconds": "11",
    "no_progress_liveness_seconds": "222",
    "max_frames_behind": "66",
    "host": "127.0.0.1",
    "port": "0",
    "log_level": "warning",
    "log_format": "text",
    "drain_delay_seconds": "0.5",
    "drain_timeout_seconds": "5",
}


def test_defect_2_every_flag_reaches_the_engine(tmp_path: Path) -> None:
    """Flag by flag from the command line to the loader in the engine's own process, which tells what it was given."""
    values = {**OTHER_VALUES, "trace": str(tmp_path / "trace.json")}
    assert values.keys() == WorkerSettings.model_fields.keys(), "this test has to know every setting"
    flags = [
        f"--{name.replace('_', '-')}={value}" if value else f"--no-{name.replace('_', '-')}"
        for name, value in values.items()
    ]
    ended = subprocess.run(
        [sys.executable, "-m", "tests.worker.telling_worker", *flags],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    told = re.search(r"RuntimeError: (\{.*\})", ended.stderr)
    assert told is not None, ended.stderr
    reached: dict[str, Any] = json.loads(told[1])
    assert reached == json.loads(load_settings(WorkerSettings, program="x", arguments=flags).model_dump_json())
    defaults = json.loads(load_settings(WorkerSettings, program="x", arguments=["--model=m"]).model_dump_json())
    assert {name for name in reached if reached[name] == defaults[name]} == ONE_CHOICE_SO_FAR
