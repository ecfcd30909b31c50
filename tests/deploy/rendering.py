"""Renders the chart with Helm itself (a library), and reads what comes out. Nothing here judges the result."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import helm_python
import yaml

ROOT = Path(__file__).parents[2]
CHART_FOLDER = ROOT / "deploy/helm/stallfree"
DEFAULT_RELEASE = "rel"

Values = dict[str, Any]
Manifest = dict[str, Any]


@cache
def chart() -> helm_python.Chart:
    return helm_python.Chart.load(CHART_FOLDER)


def render(values: Values | None = None, *, release: str = DEFAULT_RELEASE) -> list[Manifest]:
    """Every object that `helm install` would send, and the test pod."""
    files = chart().render(values or {}, name=release, namespace="models")
    return documents(files)


def documents(files: Mapping[str, str]) -> list[Manifest]:
    """The objects in rendered files."""
    return [
        document
        for path, text in sorted(files.items())
        if path.endswith(".yaml")
        for document in yaml.load_all(text, Loader=yaml.CSafeLoader)
        if document is not None
    ]


def notes(values: Values | None = None) -> str:
    return chart().render(values or {}, name=DEFAULT_RELEASE, namespace="models")["stallfree/templates/NOTES.txt"]


def cpu_values() -> Values:
    values: Values = yaml.safe_load((CHART_FOLDER / "ci/cpu-values.yaml").read_text(encoding="utf-8"))
    return values


def merged(*layers: Values) -> Values:
    """The layers put together as Helm puts value files together: maps by key, all else by the last."""
    result: Values = {}
    for layer in layers:
        for key, value in layer.items():
            both_maps = isinstance(value, dict) and isinstance(result.get(key), dict)
            result[key] = merged(result[key], value) if both_maps else value
    return result


def find(manifests: list[Manifest], kind: str, component: str) -> Manifest:
    """The one object of this kind and component."""
    (found,) = (
        manifest
        for manifest in manifests
        if manifest["kind"] == kind and manifest["metadata"]["labels"]["app.kubernetes.io/component"] == component
    )
    return found


def pod_specs(manifests: list[Manifest]) -> Iterator[tuple[str, Manifest]]:
    """The name and the pod spec of all that makes a pod."""
    for manifest in manifests:
        if manifest["kind"] == "Pod":
            yield manifest["metadata"]["name"], manifest["spec"]
        elif manifest["kind"] == "Deployment":
            yield manifest["metadata"]["name"], manifest["spec"]["template"]["spec"]


def container(manifests: list[Manifest], component: str) -> Manifest:
    (found,) = find(manifests, "Deployment", component)["spec"]["template"]["spec"]["containers"]
    assert isinstance(found, dict)
    return found


def plain_env(manifests: list[Manifest], component: str) -> dict[str, str]:
    """The variables of a component's container that have their value in the manifest."""
    return {entry["name"]: entry["value"] for entry in container(manifests, component)["env"] if "value" in entry}


TOGGLES: Mapping[str, tuple[Values, ...]] = {
    "store": (
        {},
        {"redis": {"password": {"value": "s3cret"}}},
        {"redis": {"password": {"existingSecret": "own-password"}}},
        {"redis": {"enabled": False}},
        {"redis": {"enabled": False}, "externalRedis": {"url": {"value": "redis://:p@store:6379/0"}}},
        {"redis": {"enabled": False}, "externalRedis": {"url": {"existingSecret": "own-url"}}},
    ),
    "api key": (
        {},
        {"router": {"apiKey": {"value": "k"}}},
        {"router": {"apiKey": {"existingSecret": "own-key", "key": "k"}}},
    ),
    "ingress": (
        {},
        {"ingress": {"enabled": True}},
        {"ingress": {"enabled": True, "hosts": ["a.example", "b.example"], "tls": [{"secretName": "own-tls"}]}},
    ),
    "device": ({}, cpu_values()),
    "model": (
        {},
        {"worker": {"cache": {"existingClaim": "own-models"}, "huggingFaceToken": {"value": "t"}}},
        {"worker": {"huggingFaceToken": {"existingSecret": "own-token"}}},
    ),
    "accounts": (
        {},
        {part: {"serviceAccount": {"create": False}} for part in ("router", "worker", "redis")},
        {"worker": {"serviceAccount": {"name": "own-account", "annotations": {"role": "reader"}}}},
    ),
    "rollout": ({}, {"worker": {"strategy": {"type": "Recreate"}, "replicas": 3}}),
    "placement": (
        {},
        {
            "global": {"imageRegistry": "registry.example:5000", "imagePullSecrets": [{"name": "own-pull"}]},
            "commonLabels": {"team": "a"},
            "commonAnnotations": {"note": "b"},
            "worker": {
                "podLabels": {"app.kubernetes.io/component": "other", "tier": "gpu"},
                "nodeSelector": {"gpu": "h200"},
                "tolerations": [{"key": "spot", "operator": "Exists"}],
                "topologySpreadConstraints": [
                    {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway"}
                ],
                "runtimeClassName": "nvidia",
                "extraArgs": ["--log-level=debug"],
                "extraEnv": [{"name": "OMP_NUM_THREADS", "value": "4"}],
                "extraVolumes": [{"name": "models", "hostPath": {"path": "/models"}}],
                "extraVolumeMounts": [{"name": "models", "mountPath": "/models", "readOnly": True}],
            },
            "router": {"priorityClassName": "high", "podAnnotations": {"c": "d"}, "affinity": {"podAntiAffinity": {}}},
        },
    ),
}


@cache
def pairwise_renders() -> tuple[list[Manifest], ...]:
    """What the defaults and every pair of choices of two different toggles render to. Not to be changed."""
    pairs = (
        merged(first, second)
        for one, other in itertools.combinations(TOGGLES.values(), 2)
        for first, second in itertools.product(one, other)
    )
    unique = {json.dumps(values, sort_keys=True): values for values in pairs}
    return tuple(render(values) for values in unique.values())
