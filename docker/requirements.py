# noqa: INP001 - a script of the image builds, in no package
"""Prints what the distributions in the given folders need from outside this repository, one requirement a line.

The images install these in a layer of their own, so that a change of our code alone leaves that layer (for a worker:
gigabytes of torch) as it is. A folder may name extras: `services/worker[gguf]`.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path


def external_requirements(folders: Iterable[str]) -> list[str]:
    """The requirements of the distributions in `folders`, sorted, each once, without those on one another.

    Raises:
        KeyError: a folder names an extra that its distribution does not have.
    """
    found: set[str] = set()
    for folder in folders:
        path, _, extras = folder.removesuffix("]").partition("[")
        project = tomllib.loads((Path(path) / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        found.update(project["dependencies"])
        for extra in filter(None, extras.split(",")):
            found.update(project["optional-dependencies"][extra])
    return sorted(requirement for requirement in found if not re.match(r"stallfree-", requirement))


if __name__ == "__main__":
    sys.stdout.write("\n".join(external_requirements(sys.argv[1:])) + "\n")
