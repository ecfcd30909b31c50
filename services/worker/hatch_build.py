"""Compiles the CPU kernels at install, on Linux on x86-64 with a C++ compiler; elsewhere plain torch computes.

Run by the build backend for wheels and for editable installs. `STALLFREE_REQUIRE_KERNELS=1` makes a failure one of the
install, as for images.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_OUTPUT = Path("stallfree_worker/model/cpu/_kernels.so")
_AVX512 = (
    "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16", "-mavx512vnni", "-mfma",
    "-mprefer-vector-width=512",
)  # fmt: skip
_COMMON = ("-O3", "-std=c++17", "-fPIC", "-fno-math-errno", "-Wall", "-Wextra")


class KernelsBuildHook(BuildHookInterface[Any]):  # type: ignore[misc]  # the backend is there at build time only
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        del version
        root = Path(self.root)
        if sys.platform != "linux" or platform.machine() != "x86_64":
            return
        try:
            _compile(root / "native", root / _OUTPUT)
        except (OSError, subprocess.CalledProcessError) as error:
            (root / _OUTPUT).unlink(missing_ok=True)
            reason = getattr(error, "stderr", None) or error
            if os.environ.get("STALLFREE_REQUIRE_KERNELS", "0") != "0":
                raise RuntimeError(f"the CPU kernels cannot be compiled: {reason}") from error
            sys.stderr.write(f"the CPU kernels are left out, plain torch will compute on CPUs: {reason}\n")
            return
        build_data["artifacts"].append(str(_OUTPUT))
        build_data["pure_python"] = False
        build_data["tag"] = "py3-none-linux_x86_64"


def _compile(sources: Path, output: Path) -> None:
    """Raises OSError where there is no compiler for it, CalledProcessError with its messages where it fails."""
    compiler = shlex.split(os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++") or "")
    if not compiler:
        raise OSError("there is no C++ compiler: install g++, or name one in CXX")
    with tempfile.TemporaryDirectory(dir=output.parent, prefix="_kernels-") as folder:
        objects = []
        for source, flags in (("support.cpp", ()), ("decoder.cpp", (*_AVX512, "-fopenmp"))):
            objects.append(str(Path(folder) / f"{source}.o"))
            _run([*compiler, *_COMMON, *flags, "-c", str(sources / source), "-o", objects[-1]])
        library = Path(folder) / output.name
        _run([*compiler, "-shared", "-fopenmp", *objects, "-o", str(library)])
        library.replace(output)


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)  # noqa: S603 - a compiler that the user chose
