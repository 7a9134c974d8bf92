"""The ``amx`` engine qualified on a CPU without AMX: its own code over simulated tiles, every case and gate of a small layer."""

import json
import subprocess
import sys

import pytest

from palimpsest.kernels import detect

REAL = frozenset(one for one in detect.AMX_FEATURES if not one.startswith("amx-"))

CODE = """
import json, sys
from pathlib import Path
from tests.kernels.simulated_tiles import install
install()
from tests.prove.harness import job, qualify_locally, verdicts
print(json.dumps(verdicts(qualify_locally(job(Path(sys.argv[1]), engine="amx")))))
"""


@pytest.mark.slow
@pytest.mark.skipif(not detect.target_features() >= REAL, reason="the target lacks AVX512 with VBMI")
def test_amx_passes_every_gate_over_simulated_tiles(tmp_path) -> None:
    done = subprocess.run([sys.executable, "-c", CODE, str(tmp_path)], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert set(found.values()) == {"PASS"}
    assert {"K2", "K3", "O1", "O2", "O4", "X3"} <= set(found)
