"""The tree is what the README's map says, and the processes that must stay light are light."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOP_LEVEL = {
    "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile", "pyproject.toml", "constraints.txt",
    "requirements-dev.txt", "services", "shared", "deploy", "docker", "tests", "loadtest", "docs",
}  # fmt: skip


def _tracked() -> list[Path]:
    listing = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [Path(line) for line in listing.splitlines()]


def test_the_top_level_holds_nothing_unexpected() -> None:
    names = {path.parts[0] for path in _tracked()}
    assert {name for name in names if not name.startswith(".")} <= TOP_LEVEL
    assert {"README.md", "services", "shared", "deploy", "docker", "tests", "loadtest"} <= names


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("stallfree_router.main", ("torch", "transformers", "stallfree_worker")),
        ("stallfree_worker.engine.engine", ("torch", "numpy", "stallfree_worker.model")),
        ("stallfree_worker.app", ("torch", "transformers", "stallfree_worker.model")),
        ("stallfree_loadtest.main", ("torch", "transformers", "stallfree_router", "stallfree_worker.model")),
    ],
)
def test_a_module_pulls_in_nothing_heavy(module: str, forbidden: tuple[str, ...]) -> None:
    code = f"import sys, {module}; print([name for name in {forbidden!r} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert found.strip() == "[]"


def test_the_map_in_the_readme_names_every_module_of_the_services() -> None:
    readme = (ROOT / "README.md").read_text()
    modules = [
        path
        for path in _tracked()
        if path.suffix == ".py" and path.parts[0] in ("shared", "services", "loadtest") and path.name != "__init__.py"
    ]
    assert modules
    assert [str(path) for path in modules if path.name not in readme] == []
