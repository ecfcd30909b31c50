"""What the chart tells the two programs is what they understand: each variable, each value, each key of `settings`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import yaml

from stallfree_router.settings import RouterSettings
from stallfree_shared.settings import ENV_PREFIX, SettingsGroup
from stallfree_worker.settings import WorkerSettings
from tests.deploy.rendering import (
    CHART_FOLDER,
    ROOT,
    Values,
    container,
    cpu_values,
    merged,
    pairwise_renders,
    plain_env,
    render,
)

PROGRAMS: dict[str, type[SettingsGroup]] = {"router": RouterSettings, "worker": WorkerSettings}
SET_BY_OTHER_VALUES = {
    "router": {
        "port",
        "worker_urls",
        "max_body_bytes",
        "api_key",
        "redis_url",
        "drain_delay_seconds",
        "drain_timeout_seconds",
    },
    "worker": {
        "port",
        "model",
        "device",
        "cache_dir",
        "tensor_parallel_size",
        "engine_start_timeout_seconds",
        "drain_delay_seconds",
        "drain_timeout_seconds",
    },
}
READ_ENVIRONMENT = """
import sys
from stallfree_shared.settings import load_settings
from stallfree_{program}.settings import {name}
print(load_settings({name}, program="stallfree-{program}", arguments=sys.argv[1:]).model_dump_json())
"""


def _as_the_program_reads_it(values: Values, component: str) -> dict[str, Any]:
    """The settings of a real process that has exactly the container's variables and arguments."""
    manifests = render(values)
    code = READ_ENVIRONMENT.format(program=component, name=PROGRAMS[component].__name__)
    finished = subprocess.run(
        [sys.executable, "-c", code, *container(manifests, component).get("args", [])],
        env={"PATH": os.environ["PATH"], **plain_env(manifests, component)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    read: dict[str, Any] = json.loads(finished.stdout)
    return read


def test_every_variable_that_the_chart_sets_is_a_setting_of_the_program() -> None:
    for manifests in pairwise_renders():
        for component, settings in PROGRAMS.items():
            names = {entry["name"] for entry in container(manifests, component)["env"]}
            known = {f"{ENV_PREFIX}{field.upper()}" for field in settings.model_fields}
            assert {name for name in names if name.startswith(ENV_PREFIX)} <= known


@pytest.mark.parametrize("component", PROGRAMS)
def test_settings_in_the_schema_are_those_of_the_program_but_what_other_values_set(component: str) -> None:
    schema = json.loads((CHART_FOLDER / "values.schema.json").read_text(encoding="utf-8"))
    listed = set(schema["properties"][component]["properties"]["settings"]["properties"])
    fields = set(PROGRAMS[component].model_fields)
    assert SET_BY_OTHER_VALUES[component] <= fields
    assert listed == fields - SET_BY_OTHER_VALUES[component]


@pytest.mark.parametrize("component", PROGRAMS)
def test_schema_takes_every_default_of_the_program(component: str) -> None:
    defaults = json.loads(PROGRAMS[component].model_construct().model_dump_json(exclude_none=True))
    own = {name: value for name, value in defaults.items() if name not in SET_BY_OTHER_VALUES[component]}
    env = plain_env(render({component: {"settings": own}}), component)
    assert {f"{ENV_PREFIX}{name.upper()}" for name in own} <= set(env)


def test_router_takes_the_charts_values_and_looks_workers_up_by_name() -> None:
    values: Values = {"router": {"settings": {"log_format": "text"}, "extraArgs": ["--max-in-flight-requests", "7"]}}
    read = _as_the_program_reads_it(values, "router")
    assert read["worker_urls"] == ["dns+http://rel-stallfree-worker:8000"]
    assert read["redis_url"] == "redis://rel-stallfree-redis:6379/0"
    assert (read["port"], read["log_format"], read["max_in_flight_requests"]) == (8000, "text", 7)
    assert (read["drain_delay_seconds"], read["drain_timeout_seconds"]) == (5.0, 600.0)


@pytest.mark.parametrize(("values", "device"), [({}, "cuda"), (cpu_values(), "cpu")], ids=["gpu", "cpu"])
def test_worker_takes_the_charts_values_on_either_device(values: Values, device: str) -> None:
    read = _as_the_program_reads_it(values, "worker")
    assert read["device"] == device
    assert read["cache_dir"].startswith("/cache/")


def test_e09_model_ids_and_large_numbers_arrive_as_they_were_written() -> None:
    strange: Values = {
        "worker": {"model": "1e5", "settings": {"served_model_name": "on", "max_waiting_tokens": 12_345_678}}
    }
    read = _as_the_program_reads_it(strange, "worker")
    assert (read["model"], read["served_model_name"], read["max_waiting_tokens"]) == ("1e5", "on", 12_345_678)


def test_router_reads_the_charts_request_classes() -> None:
    classes = {"gold": {"tbt_target_seconds": 0.05, "priority": -5}, "default": {"ttft_target_seconds": 2}}
    read = _as_the_program_reads_it(
        {"router": {"settings": {"request_classes": classes, "min_priority": -1}}}, "router"
    )
    assert read["request_classes"] == {
        "gold": {"tbt_target_seconds": 0.05, "ttft_target_seconds": None, "priority": -5},
        "default": {"tbt_target_seconds": None, "ttft_target_seconds": 2.0, "priority": 0},
    }
    assert read["min_priority"] == -1


def test_every_variable_in_compose_is_a_setting_of_its_program() -> None:
    services = yaml.safe_load((ROOT / "docker/compose.yaml").read_text(encoding="utf-8"))["services"]
    for component, settings in PROGRAMS.items():
        names = {name for name in services[component]["environment"] if name.startswith(ENV_PREFIX)}
        assert names <= {f"{ENV_PREFIX}{field.upper()}" for field in settings.model_fields}


def test_password_of_the_store_is_defined_before_the_url_that_holds_it() -> None:
    values = merged({"redis": {"password": {"existingSecret": "own"}}})
    entries = container(render(values), "router")["env"]
    names = [entry["name"] for entry in entries]
    assert names.index("REDIS_PASSWORD") < names.index("STALLFREE_REDIS_URL")
    assert (
        entries[names.index("STALLFREE_REDIS_URL")]["value"] == "redis://:$(REDIS_PASSWORD)@rel-stallfree-redis:6379/0"
    )
