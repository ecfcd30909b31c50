"""Names, labels and selectors: legal for every release, unique, and the same after an upgrade."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import helm_python
import pytest
import yaml

from tests.deploy.rendering import (
    CHART_FOLDER,
    DEFAULT_RELEASE,
    Manifest,
    Values,
    documents,
    find,
    pairwise_renders,
    render,
)

DNS_LABEL = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?")
SELECTOR_KEYS = {"app.kubernetes.io/name", "app.kubernetes.io/instance", "app.kubernetes.io/component"}
ADDED_TO_POD_NAMES = len("-0123456789-01234")
EVERYTHING: Values = {
    "ingress": {"enabled": True},
    "router": {"apiKey": {"value": "k"}},
    "worker": {"huggingFaceToken": {"value": "t"}},
    "redis": {"password": {"value": "p"}},
}
RELEASES = [
    "a",
    "stallfree",
    "1st",
    "a.b",
    "a-b",
    "r" * 53,
    "r" * 52 + "s",
    "r" * 28 + "-" + "s" * 24,
    "r" * 29 + "-" + "s" * 23,
    "r" * 27 + "--" + "s" * 24,
]


def _names(manifests: list[Manifest]) -> list[tuple[str, str]]:
    return [(manifest["kind"], manifest["metadata"]["name"]) for manifest in manifests]


@pytest.mark.parametrize("release", RELEASES)
def test_e08_names_and_labels_are_legal_for_every_release(release: str) -> None:
    for manifest in render(EVERYTHING, release=release):
        name = manifest["metadata"]["name"]
        assert DNS_LABEL.fullmatch(name), name
        assert "--" not in name
        if manifest["kind"] == "Deployment":
            assert len(name) + ADDED_TO_POD_NAMES <= 63
        assert all(LABEL_VALUE.fullmatch(value) for value in manifest["metadata"]["labels"].values())


def test_e08_two_objects_never_share_a_name_within_a_release_or_across_releases() -> None:
    names = [name for release in RELEASES for name in _names(render(EVERYTHING, release=release))]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("wish", ["own", "x" * 63, "Own_Name", "x" * 37 + "-y"])
def test_e08_a_full_name_of_the_users_choice_is_made_legal(wish: str) -> None:
    for _, name in _names(render({**EVERYTHING, "fullnameOverride": wish})):
        assert DNS_LABEL.fullmatch(name)
        assert "--" not in name


@pytest.mark.parametrize("model", ["Qwen/Qwen2.5-0.5B-Instruct", "UPPER_case.v1", "/models/a.gguf", "m" * 100])
def test_e09_a_model_id_is_in_no_name_and_in_no_label(model: str) -> None:
    def without_the_model(manifests: list[Manifest]) -> str:
        return yaml.safe_dump([m["metadata"] for m in manifests]) + yaml.safe_dump(
            [m["spec"]["template"]["metadata"] for m in manifests if m["kind"] == "Deployment"]
        )

    assert without_the_model(render({"worker": {"model": model}})) == without_the_model(render())


def _selectors(manifests: list[Manifest]) -> dict[tuple[str, str], dict[str, str]]:
    return {
        (manifest["kind"], manifest["metadata"]["name"]): manifest["spec"]["selector"].get(
            "matchLabels", manifest["spec"]["selector"]
        )
        for manifest in manifests
        if manifest["kind"] in ("Deployment", "Service")
    }


def _chart_with(folder: Path, **description: str) -> helm_python.Chart:
    """A copy of the chart with other entries in its Chart.yaml."""
    copy = folder / "stallfree"
    shutil.copytree(CHART_FOLDER, copy)
    own = yaml.safe_load((copy / "Chart.yaml").read_text(encoding="utf-8"))
    (copy / "Chart.yaml").write_text(yaml.safe_dump({**own, **description}), encoding="utf-8")
    return helm_python.Chart.load(copy)


def test_e01_selectors_are_the_same_in_another_version_of_the_chart(tmp_path: Path) -> None:
    other = _chart_with(tmp_path, version="7.8.9-rc.1+build.5", appVersion="7.8.9+build.5")
    manifests = documents(other.render({}, name=DEFAULT_RELEASE, namespace="models"))
    assert _selectors(manifests) == _selectors(render())
    assert all(LABEL_VALUE.fullmatch(v) for m in manifests for v in m["metadata"]["labels"].values())
    versions = {m["metadata"]["labels"]["app.kubernetes.io/version"] for m in manifests}
    assert versions == {"7.8.9_build.5"}


def test_e01_selectors_hold_name_instance_and_component_and_pods_match_whatever_the_values() -> None:
    expected = {key[1]: labels for key, labels in _selectors(render()).items()}
    for manifests in pairwise_renders():
        for (_, name), labels in _selectors(manifests).items():
            assert set(labels) == SELECTOR_KEYS
            assert labels == expected[name]
        for manifest in (m for m in manifests if m["kind"] == "Deployment"):
            pod_labels = manifest["spec"]["template"]["metadata"]["labels"]
            assert manifest["spec"]["selector"]["matchLabels"].items() <= pod_labels.items()


def test_a_change_of_the_chart_alone_rolls_no_pod(tmp_path: Path) -> None:
    other = _chart_with(tmp_path, version="0.1.1")
    renders = (render(), documents(other.render({}, name=DEFAULT_RELEASE, namespace="models")))
    before, after = (find(manifests, "Deployment", "worker") for manifests in renders)
    assert before["metadata"]["labels"] != after["metadata"]["labels"]
    assert before["spec"]["template"] == after["spec"]["template"]
