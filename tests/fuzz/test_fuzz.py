"""200,000 mutated files against every reader: nothing but UserError and EvidenceError comes out, in bounded time and memory."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
#: readers and the least number of inputs each must see
TARGETS = {
    "header": 50_000,
    "header text": 30_000,
    "index": 30_000,
    "config": 20_000,
    "plan": 10_000,
    "plan file": 4_000,
    "flag lines": 5_000,
    "tie lines": 4_000,
    "record text": 1_000,
    "record": 100,
    "flags": 50,
    "ties": 50,
    "manifest": 50,
}


def python(*words: str, timeout: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=timeout, cwd=HERE.parents[1], check=False
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_readers_survive_200_000_inputs(tmp_path: Path) -> None:
    made = python(str(HERE / "seeds.py"), str(tmp_path), timeout=300)
    assert made.returncode == 0, made.stderr
    folder, tie = json.loads(made.stdout)
    done = python(str(HERE / "long_run.py"), "200000", "--seed", "20261201", "--evidence", folder, "--tie", tie, timeout=800)
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)
    assert found["escapes"] == [], json.dumps(found["escapes"], indent=1)
    assert found["inputs"] >= 200_000
    assert {name: counts["inputs"] for name, counts in found["targets"].items() if counts["inputs"] < TARGETS[name]} == {}
    assert set(found["targets"]) == set(TARGETS)
    for name, counts in found["targets"].items():
        assert counts["refused"] > 0 or name == "plan file", name
        assert counts["accepted"] > 0 or counts["inputs"] < 200, f"{name}: nothing behind its first check was reached"
    assert found["grown_kib"] < 64 << 10


def test_an_escape_is_found(tmp_path: Path) -> None:
    """The harness reports a reader that raises something else, hangs or fills the memory."""
    code = f"""
import sys
sys.path.insert(0, {str(HERE)!r})
import long_run, json, signal, resource
from targets import Target
signal.signal(signal.SIGPROF, long_run._alarm)
long_run.SECONDS = 0.05
def broken(data):
    if len(data) > 40: return b"".join(bytes(1 << 28) for _ in range(64))
    if data[:1] != b"{{": raise KeyError("x")
    while len(data) % 2: pass
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, resource.RLIM_INFINITY))
escapes = []
long_run.fuzz(Target("broken", (b'{{"ab":1}}',), broken, 1), 40, 1, escapes)
print(json.dumps(sorted({{e["error"].split(":")[0] for e in escapes}})))
"""
    done = python("-c", code, timeout=200)
    assert json.loads(done.stdout) == ["KeyError", "MemoryError", "TooSlow"], done.stderr


def test_the_same_seed_gives_the_same_inputs() -> None:
    spec = importlib.util.spec_from_file_location("palimpsest_fuzz_mutate", HERE / "mutate.py")
    mutate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mutate)
    import random

    one, two = ([mutate.mutated(rng, b'{"a":[1,2]}', b"{}") for _ in range(200)] for rng in (random.Random(5), random.Random(5)))
    assert one == two
    assert len(set(one)) > 100
