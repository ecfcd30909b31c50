"""The chart renders to objects that Kubernetes takes, for every pair of choices, and refuses values that are wrong."""

from __future__ import annotations

import itertools
import json
from typing import Any

import helm_python
import kubernetes_validate
import pytest
import yaml

from tests.deploy.rendering import (
    CHART_FOLDER,
    Manifest,
    Values,
    cpu_values,
    find,
    merged,
    notes,
    pairwise_renders,
    render,
)

KUBERNETES_VERSIONS = ("1.29", "1.31", "1.34", "1.37")


@pytest.mark.parametrize("values", [{}, cpu_values()], ids=["gpu", "cpu"])
def test_strict_lint_finds_nothing_but_a_missing_icon(values: Values) -> None:
    report = helm_python.lint(CHART_FOLDER, values, strict=True)
    assert report["errors"] == []
    assert [message["error"] for message in report["messages"]] == ["icon is recommended"]


def test_e17_every_pair_of_choices_is_valid_in_four_versions_of_kubernetes() -> None:
    renders = pairwise_renders()
    assert len(renders) > 100
    documents = {json.dumps(manifest, sort_keys=True) for manifests in renders for manifest in manifests}
    for document in documents:
        for version in KUBERNETES_VERSIONS:
            kubernetes_validate.validate(json.loads(document), version, strict=True)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"routr": {}}, "routr"),
        ({"router": {"replicaCount": 2}}, "replicaCount"),
        ({"router": {"replicas": "two"}}, "replicas"),
        ({"router": {"drain": {"delaySeconds": -1}}}, "delaySeconds"),
        ({"router": {"settings": {"max_choises": 3}}}, "max_choises"),
        ({"router": {"settings": {"max_choices": "3"}}}, "max_choices"),
        ({"router": {"settings": {"redis_url": "redis://x"}}}, "redis_url"),
        ({"router": {"service": {"type": "Clusterip"}}}, "type"),
        ({"worker": {"model": ""}}, "model"),
        ({"worker": {"settings": {"dtype": "float16"}}}, "dtype"),
        ({"worker": {"gpu": {"count": 2}}}, "count"),
        ({"worker": {"image": {"tag": "latest"}}}, "tag"),
        ({"worker": {"cache": {"sizeLimit": "fifty"}}}, "sizeLimit"),
        ({"worker": {"extraEnv": [{"nmae": "A", "value": "b"}]}}, "nmae"),
        ({"worker": {"extraEnv": [{"name": "A", "value": 1}]}}, "value"),
        ({"redis": {"enabled": "yes"}}, "enabled"),
        ({"ingress": {"host": "a.example"}}, "host"),
        ({"global": {"imagePullSecrets": ["name"]}}, "imagePullSecrets"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_schema_refuses_typos_and_wrong_types_and_names_the_key(values: Values, named: str) -> None:
    with pytest.raises(helm_python.HelmError, match=named):
        render(values)


def test_every_object_of_the_schema_is_closed_but_for_those_that_others_define() -> None:
    schema: dict[str, Any] = json.loads((CHART_FOLDER / "values.schema.json").read_text(encoding="utf-8"))
    open_objects = [path for path, part in _objects(schema, "") if part.get("additionalProperties", True) is True]
    assert open_objects == [
        "/properties/global",
        "/$defs/kubernetesObject",
        "/$defs/kubernetesList/items",
    ]


def _objects(part: Any, path: str) -> list[tuple[str, dict[str, Any]]]:
    if isinstance(part, list):
        return [found for i, item in enumerate(part) for found in _objects(item, f"{path}/{i}")]
    if not isinstance(part, dict):
        return []
    here = [(path, part)] if part.get("type") == "object" else []
    return here + [found for key, value in part.items() for found in _objects(value, f"{path}/{key}")]


def test_every_value_has_a_comment_of_its_own_or_of_the_map_it_is_in() -> None:
    text = (CHART_FOLDER / "values.yaml").read_text(encoding="utf-8")
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    assert isinstance(root, yaml.MappingNode)
    assert _undocumented(root, text.splitlines()) == []


def _undocumented(node: yaml.MappingNode, lines: list[str]) -> list[str]:
    found: list[str] = []
    for key, value in node.value:
        above = itertools.takewhile(lambda line: line.lstrip().startswith("#"), reversed(lines[: key.start_mark.line]))
        if any(line.lstrip().startswith("# --") for line in above):
            continue
        is_section = isinstance(value, yaml.MappingNode) and value.value
        found += _undocumented(value, lines) if is_section else [key.value]
    return found


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"externalRedis": {"url": {"value": "redis://x"}}}, "redis.enabled is true and externalRedis.url is given"),
        ({"router": {"apiKey": {"value": "k", "existingSecret": "s"}}}, "router.apiKey.value and"),
        ({"worker": {"strategy": {"rollingUpdate": {"maxUnavailable": 0}}}}, "no pod could ever be replaced"),
        ({"worker": {"strategy": {"rollingUpdate": {"maxUnavailable": "0%"}}}}, "no pod could ever be replaced"),
        ({"worker": {"extraEnv": [{"name": "STALLFREE_MODEL", "value": "x"}]}}, "extraEnv sets STALLFREE_MODEL"),
    ],
)
def test_contradictions_are_refused_with_what_to_change(values: Values, message: str) -> None:
    with pytest.raises(helm_python.HelmError, match=message):
        render(values)


def test_without_a_store_the_notes_say_that_no_state_is_kept() -> None:
    assert "state is not kept" in notes({"redis": {"enabled": False}})
    assert "state is not kept" not in notes()


def test_notes_give_a_request_that_names_the_served_model_and_the_key() -> None:
    text = notes({"worker": {"model": "/models/tiny.gguf"}, "router": {"apiKey": {"value": "k"}}})
    assert '"model":"tiny.gguf"' in text
    assert "Authorization: Bearer" in text
    assert "Authorization" not in notes()


def _ingress(values: Values) -> Manifest:
    return find(render(merged({"ingress": {"enabled": True}}, values)), "Ingress", "router")


def test_d19_ingress_opens_the_api_and_neither_metrics_nor_probes() -> None:
    for values in ({}, {"ingress": {"hosts": ["a.example", "b.example"]}}):
        rules = _ingress(values)["spec"]["rules"]
        assert [path["path"] for rule in rules for path in rule["http"]["paths"]] == ["/v1"] * len(rules)
        assert [rule.get("host") for rule in rules] == values.get("ingress", {}).get("hosts", [None])


def test_e11_ingress_streams_without_buffers_and_outlasts_the_longest_answer() -> None:
    prefix = "nginx.ingress.kubernetes.io"
    annotations = _ingress({"ingress": {"timeoutSeconds": 1_000_000}})["metadata"]["annotations"]
    assert annotations[f"{prefix}/proxy-buffering"] == "off"
    assert annotations[f"{prefix}/proxy-read-timeout"] == annotations[f"{prefix}/proxy-send-timeout"] == "1000000"
    own = _ingress({"ingress": {"annotations": {f"{prefix}/proxy-buffering": "on"}}})["metadata"]["annotations"]
    assert own[f"{prefix}/proxy-buffering"] == "on"


def test_ingress_and_router_have_one_limit_for_bodies() -> None:
    values = {"ingress": {"enabled": True}, "router": {"maxBodyBytes": 2_000_000}}
    manifests = render(values)
    annotations = find(manifests, "Ingress", "router")["metadata"]["annotations"]
    (router,) = find(manifests, "Deployment", "router")["spec"]["template"]["spec"]["containers"]
    assert annotations["nginx.ingress.kubernetes.io/proxy-body-size"] == "2000000"
    assert {"name": "STALLFREE_MAX_BODY_BYTES", "value": "2000000"} in router["env"]
