"""The benchmark command runs and writes what it shows; no timing is judged here."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_command_writes_its_rows(tmp_path):
    out = tmp_path / "results.json"
    command = [sys.executable, "-m", "benchmarks", "--engine", "portable", "--only", "memory", "--json", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert found["engine"] == "portable"
    assert found["machine"]["engines"]["portable"] == "torch and numpy"
    assert [row["unit"] for row in found["rows"]] == ["MiB"] * 3
    assert all(row["value"] > 0 and row["met"] is None for row in found["rows"])
    assert "scratch of index_select" in done.stdout


def test_an_engine_nobody_wrote_is_refused():
    command = [sys.executable, "-m", "benchmarks", "--engine", "cuda"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert "unknown engine 'cuda'" in done.stderr
