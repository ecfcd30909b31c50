"""The script that measures a GPU runs whole on a CPU, where its figures mean nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_the_report_has_a_row_for_all_that_it_measures(tmp_path: Path) -> None:
    out = tmp_path / "report.md"
    command = [sys.executable, "-m", "tests.gpu.report", "--out", str(out), "--device", "cpu", "--shape", "tiny"]
    subprocess.run(command, check=True, timeout=120, cwd=Path(__file__).parents[3], stdout=subprocess.DEVNULL)
    rows = [line.split("|")[1].strip() for line in out.read_text(encoding="utf-8").splitlines() if "|" in line]
    assert [row for row in rows if row.startswith("recorded")] == ["recorded, overlapped"] * 2 + ["recorded"] * 2
    assert {"launched", "32", "256", "512", "1024", "2048", "auto"} <= set(rows)
