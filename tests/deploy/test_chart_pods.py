"""Every pod is safe to run, knows only what exists, starts without haste and leaves without loss."""

from __future__ import annotations

import math
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.routing import Match

from stallfree_router.app import create_app as create_router_app
from stallfree_router.settings import RouterSettings
from stallfree_shared.drain import Drain
from stallfree_worker.app import create_app as create_worker_app
from stallfree_worker.loaded_model import LoadedModel, OnTokenizer
from stallfree_worker.settings import WorkerSettings
from tests.deploy.rendering import (
    Manifest,
    Values,
    container,
    cpu_values,
    find,
    pairwise_renders,
    plain_env,
    pod_specs,
    render,
)

SERVICES = ("router", "worker")
VOLUME_TYPES_OF_RESTRICTED = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "persistentVolumeClaim",
    "projected",
    "secret",
}


def _pod(manifests: list[Manifest], component: str) -> Manifest:
    spec: Manifest = find(manifests, "Deployment", component)["spec"]["template"]["spec"]
    return spec


def _breaches_of_restricted(spec: Manifest) -> list[str]:
    """The rules of the pod security level "restricted" (kubernetes.io, Pod Security Standards) that a pod breaks."""
    pod_context = spec["securityContext"]
    breaches = [key for key in ("hostNetwork", "hostPID", "hostIPC") if spec.get(key)]
    breaches += ["volume " + v["name"] for v in spec.get("volumes", []) if not set(v) & VOLUME_TYPES_OF_RESTRICTED]
    for one in spec["containers"] + spec.get("initContainers", []):
        context = {**pod_context, **one["securityContext"]}
        rules = {
            "runAsNonRoot": context.get("runAsNonRoot") is True,
            "runAsUser": context.get("runAsUser") != 0,
            "seccompProfile": context.get("seccompProfile", {}).get("type") in ("RuntimeDefault", "Localhost"),
            "allowPrivilegeEscalation": context.get("allowPrivilegeEscalation") is False,
            "capabilities": context.get("capabilities") == {"drop": ["ALL"]},
            "privileged": not context.get("privileged"),
            "hostPort": not any(port.get("hostPort") for port in one.get("ports", [])),
        }
        breaches += [f"{one['name']}: {rule}" for rule, holds in rules.items() if not holds]
    return breaches


@pytest.mark.parametrize("values", [{}, cpu_values()], ids=["gpu", "cpu"])
def test_e06_every_pod_meets_the_restricted_level_with_a_read_only_root(values: Values) -> None:
    pods = dict(pod_specs(render(values)))
    assert len(pods) == 4
    for name, spec in pods.items():
        assert _breaches_of_restricted(spec) == [], name
        assert all(one["securityContext"]["readOnlyRootFilesystem"] for one in spec["containers"])


def test_e06_home_and_caches_are_in_writable_volumes() -> None:
    manifests = render()
    for component in SERVICES:
        mounts = [mount["mountPath"] for mount in container(manifests, component)["volumeMounts"]]
        env = plain_env(manifests, component)
        folders = {env[name] for name in ("HOME", "HF_HOME", "STALLFREE_CACHE_DIR") if name in env}
        assert all(any(f"{folder}/".startswith(f"{mount}/") for mount in mounts) for folder in folders)


def test_e13_every_pod_has_the_pull_secrets_and_every_image_the_registry() -> None:
    values = {"global": {"imageRegistry": "registry.example:5000", "imagePullSecrets": [{"name": "pull"}]}}
    for name, spec in pod_specs(render(values)):
        assert spec["imagePullSecrets"] == [{"name": "pull"}], name
        assert all(one["image"].startswith("registry.example:5000/") for one in spec["containers"]), name


def test_a_digest_wins_over_the_tag() -> None:
    digest = "sha256:" + "0" * 64
    assert container(render({"redis": {"image": {"digest": digest}}}), "redis")["image"] == f"valkey/valkey@{digest}"


def test_no_pod_has_a_token_or_service_links() -> None:
    for manifests in pairwise_renders():
        for name, spec in pod_specs(manifests):
            assert spec["automountServiceAccountToken"] is False, name
            assert spec["enableServiceLinks"] is False, name
        assert all(m["automountServiceAccountToken"] is False for m in manifests if m["kind"] == "ServiceAccount")


def test_e17_nothing_refers_to_what_does_not_exist() -> None:
    for manifests in pairwise_renders():
        known = {(m["kind"], m["metadata"]["name"]) for m in manifests} | {("ServiceAccount", "default")}
        for name, spec in pod_specs(manifests):
            missing = {ref for ref in _references(spec) if ref not in known and not ref[1].startswith("own-")}
            assert missing == set(), name
            _assert_volumes_and_mounts_agree(spec)
        _assert_services_select_pods_and_ports(manifests)


def _references(spec: Manifest) -> set[tuple[str, str]]:
    found = {("ServiceAccount", spec["serviceAccountName"])}
    for volume in spec.get("volumes", []):
        if "persistentVolumeClaim" in volume:
            found.add(("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]))
    for entry in (entry for one in spec["containers"] for entry in one.get("env", [])):
        if "valueFrom" in entry:
            found.add(("Secret", entry["valueFrom"]["secretKeyRef"]["name"]))
    return found


def _assert_volumes_and_mounts_agree(spec: Manifest) -> None:
    volumes = [volume["name"] for volume in spec.get("volumes", [])]
    mounts = [mount["name"] for one in spec["containers"] for mount in one.get("volumeMounts", [])]
    assert sorted(volumes) == sorted(mounts)


def _assert_services_select_pods_and_ports(manifests: list[Manifest]) -> None:
    pods = [m["spec"]["template"] for m in manifests if m["kind"] == "Deployment"]
    services = [m for m in manifests if m["kind"] == "Service"]
    for service in services:
        wanted = service["spec"]["selector"].items()
        (pod,) = (pod for pod in pods if wanted <= pod["metadata"]["labels"].items())
        ports = {port["name"] for one in pod["spec"]["containers"] for port in one["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports
        assert all(port["appProtocol"] for port in service["spec"]["ports"])
    names = {(service["metadata"]["name"], port["name"]) for service in services for port in service["spec"]["ports"]}
    for ingress in (m for m in manifests if m["kind"] == "Ingress"):
        for path in (path for rule in ingress["spec"]["rules"] for path in rule["http"]["paths"]):
            backend = path["backend"]["service"]
            assert (backend["name"], backend["port"]["name"]) in names


def test_secrets_given_as_values_stand_in_secrets_alone() -> None:
    values = {
        "router": {"apiKey": {"value": "hidden-1"}},
        "worker": {"huggingFaceToken": {"value": "hidden-2"}},
        "redis": {"password": {"value": "hidden-3"}},
    }
    manifests = render(values)
    assert "hidden-" not in str([manifest for manifest in manifests if manifest["kind"] != "Secret"])
    held = [value for m in manifests if m["kind"] == "Secret" for value in m["stringData"].values()]
    assert sorted(held) == ["hidden-1", "hidden-2", "hidden-3"]


def test_pods_roll_when_a_secret_that_they_read_changes() -> None:
    def checksums(values: Values) -> list[str]:
        templates = [find(render(values), "Deployment", part)["spec"]["template"] for part in SERVICES]
        return [template["metadata"]["annotations"]["checksum/secrets"] for template in templates]

    (router, worker), (router_after, worker_after) = checksums({}), checksums({"router": {"apiKey": {"value": "k"}}})
    assert (router != router_after, worker == worker_after) == (True, True)


def _probe_seconds(probe: dict[str, Any]) -> int:
    period, threshold = probe["periodSeconds"], probe["failureThreshold"]
    assert isinstance(period, int)
    assert isinstance(threshold, int)
    return period * threshold


def test_c21_started_and_ready_ask_another_path_than_alive() -> None:
    manifests = render()
    for component, started in (("router", "/livez"), ("worker", "/readyz")):
        one = container(manifests, component)
        paths = [one[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness", "liveness")]
        assert paths == [started, "/readyz", "/livez"]


def test_every_path_that_is_probed_is_a_route_of_the_program() -> None:
    settings = WorkerSettings(model="any")
    apps = {
        "router": create_router_app(RouterSettings(), drain=Drain(), give_up=_do_nothing),
        "worker": create_worker_app(settings, load_model=_load_nothing, drain=Drain(), give_up=_do_nothing),
    }
    for component, app in apps.items():
        one = container(render(), component)
        probed = {probe["httpGet"]["path"] for key, probe in one.items() if key.endswith("Probe")}
        assert {"/livez", "/readyz"} == probed
        assert all(_has_route(app, path) for path in probed)


def _has_route(app: FastAPI, path: str) -> bool:
    scope = {"type": "http", "path": path, "method": "GET", "headers": []}
    return any(route.matches(scope)[0] is Match.FULL for route in app.routes)


def _load_nothing(_settings: WorkerSettings, _on_tokenizer: OnTokenizer) -> LoadedModel:
    raise AssertionError("an app that is never started loads no model")


def _do_nothing() -> None:
    pass


@pytest.mark.parametrize("load_seconds", [1, 300, 2400, 2400.5])
def test_e05_no_probe_ends_a_worker_before_its_own_time_to_load_is_over(load_seconds: float) -> None:
    manifests = render({"worker": {"maxStartSeconds": load_seconds}})
    startup = container(manifests, "worker")["startupProbe"]
    own_limit = float(plain_env(manifests, "worker")["STALLFREE_ENGINE_START_TIMEOUT_SECONDS"])
    assert own_limit == load_seconds
    assert own_limit + 30 <= _probe_seconds(startup) < own_limit + 90
    assert startup["periodSeconds"] <= 5
    drain_and_start = _probe_seconds(startup) + _pod(manifests, "worker")["terminationGracePeriodSeconds"]
    for component in SERVICES:
        assert find(manifests, "Deployment", component)["spec"]["progressDeadlineSeconds"] > drain_and_start


@pytest.mark.parametrize("component", SERVICES)
@pytest.mark.parametrize(("delay", "timeout"), [(0, 0), (5, 600), (0.5, 0.6), (30, 7200), (0, 1_000_000)])
def test_e16_c18_grace_period_is_longer_than_the_drain(component: str, delay: float, timeout: float) -> None:
    manifests = render({component: {"drain": {"delaySeconds": delay, "timeoutSeconds": timeout}}})
    spec, env = _pod(manifests, component), plain_env(manifests, component)
    drain_seconds = float(env["STALLFREE_DRAIN_DELAY_SECONDS"]) + float(env["STALLFREE_DRAIN_TIMEOUT_SECONDS"])
    assert drain_seconds == delay + timeout
    assert spec["terminationGracePeriodSeconds"] == math.ceil(drain_seconds) + 30
    assert "lifecycle" not in spec["containers"][0]


def test_e04_a_worker_leaves_before_its_successor_needs_the_gpu_and_a_router_after() -> None:
    manifests = render()
    strategies = {part: find(manifests, "Deployment", part)["spec"]["strategy"] for part in SERVICES}
    assert strategies["worker"] == {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}
    assert strategies["router"] == {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
    recreated = render({"worker": {"strategy": {"type": "Recreate"}}})
    assert find(recreated, "Deployment", "worker")["spec"]["strategy"] == {"type": "Recreate"}


@pytest.mark.parametrize("resource", ["nvidia.com/gpu", "nvidia.com/mig-3g.40gb"])
def test_gpu_is_requested_and_limited_to_one_and_tolerated(resource: str) -> None:
    manifests = render({"worker": {"gpu": {"resourceName": resource}, "resources": {"limits": {"cpu": "8"}}}})
    resources = container(manifests, "worker")["resources"]
    assert resources["requests"][resource] == resources["limits"][resource] == "1"
    assert resources["limits"]["cpu"] == "8"
    assert _pod(manifests, "worker")["tolerations"][0]["key"] == "nvidia.com/gpu"


def test_e12_shared_memory_is_memory_and_fits_the_limit() -> None:
    manifests = render()
    (shared,) = (volume for volume in _pod(manifests, "worker")["volumes"] if volume["name"] == "shared-memory")
    assert shared["emptyDir"] == {"medium": "Memory", "sizeLimit": "1Gi"}
    assert container(manifests, "worker")["resources"]["limits"]["memory"] == "16Gi"


def test_cpu_values_ask_for_nothing_that_only_gpu_nodes_have() -> None:
    spec = _pod(render(cpu_values()), "worker")
    assert "nvidia" not in str(spec)
    assert "tolerations" not in spec
    assert {volume["name"] for volume in spec["volumes"]} == {"tmp", "cache"}


def test_workers_are_found_by_a_headless_service_that_lists_those_not_ready_too() -> None:
    spec = find(render(), "Service", "worker")["spec"]
    assert (spec["clusterIP"], spec["publishNotReadyAddresses"]) == ("None", True)


def test_test_pod_asks_the_router_whether_it_is_ready() -> None:
    manifests = render({"router": {"service": {"port": 80}}})
    (pod,) = (manifest for manifest in manifests if manifest["kind"] == "Pod")
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    assert "http://rel-stallfree-router:80/readyz" in pod["spec"]["containers"][0]["args"][0]
    assert pod["spec"]["containers"][0]["image"] == container(manifests, "router")["image"]
