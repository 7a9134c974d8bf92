"""Oracle B and its power, tie density, liveness cells and the licence: each passes where it should and fails where it must."""

import hashlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from palimpsest.core.errors import BadConfig
from palimpsest.kernels.detect import available_engines
from palimpsest.prove import licence, liveness
from palimpsest.prove.bounds import AMX_1, PORTABLE_1
from palimpsest.prove.density import Density, total
from palimpsest.prove.enclosure import check_inside, enclose, follows, power
from palimpsest.prove.oracle import LatentFormat, attend
from palimpsest.prove.verify_table import absent_gates
from tests.prove.harness import job, qualify_locally, verdicts

LAYOUT = LatentFormat("fp8", 512, 64)


def case(n: int = 150, heads: int = 2, scale: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Records [n, 576] of e4m3 codes without NaN, and a query [heads, 576]."""
    rng = np.random.default_rng(7)
    records = rng.integers(0, 256, (n, 576), np.uint8)
    records[(records & 0x7F) >= 0x40] = 0x38
    return records, scale * rng.standard_normal((heads, 576)) / 8


@pytest.mark.parametrize("scale", [0.0, 0.1, 1.0, 4.0])
def test_the_deployed_order_lies_inside(portable_context: Any, scale: float) -> None:
    from palimpsest.prove.oracle import decode_latent

    records, query = case(scale=scale)
    keys, _ = decode_latent(records, LAYOUT)
    context = portable_context(query, keys, 0.1, 512)
    found = enclose(records, query, LAYOUT, softmax_scale=0.1, model=PORTABLE_1)
    inside = check_inside(context, found)
    assert (inside.checked, inside.faults, inside.first) == (2 * 512, 0, None)
    assert 0 < found.unique <= inside.checked


def test_a_wrong_record_a_wrong_query_and_a_nan_lie_outside(portable_context: Any) -> None:
    from palimpsest.prove.oracle import decode_latent

    records, query = case()
    found = enclose(records, query, LAYOUT, softmax_scale=0.1, model=PORTABLE_1)
    keys, _ = decode_latent(records, LAYOUT)
    swapped = keys.copy()
    swapped[3] = keys[4]
    right = portable_context(query, keys, 0.1, 512)
    broken = right.copy()
    broken[1, 5] = np.nan
    for wrong in (portable_context(query, swapped, 0.1, 512), right[::-1], broken):
        assert check_inside(wrong, found).faults > 0
    assert check_inside(broken, found).first == (1, 5)


def test_truncated_probabilities_lie_outside(portable_context: Any) -> None:
    """p rounded to bf16 by cutting bits: a fault that a worst-case bound does not see."""
    from palimpsest.prove.oracle import decode_latent

    records, query = case()
    keys, _ = decode_latent(records, LAYOUT)
    logits = (0.1 * (query @ keys.T)).astype(np.float32)
    p = np.exp((logits - logits.max(axis=1, keepdims=True)).astype(np.float64)).astype(np.float32)
    cut = (p.view(np.uint32) & 0xFFFF0000).view(np.float32)
    context = ((cut @ keys[:, :512].astype(np.float32)) / cut.sum(axis=1, keepdims=True)).astype(np.float32)
    assert check_inside(context, enclose(records, query, LAYOUT, softmax_scale=0.1, model=PORTABLE_1)).faults > 0


def test_an_engine_that_cannot_be_followed_has_no_power() -> None:
    records, query = case()
    found = enclose(records, query, LAYOUT, softmax_scale=0.1, model=AMX_1)
    assert not follows(AMX_1)
    assert follows(PORTABLE_1)
    assert (found.unique, check_inside(np.zeros((2, 512), np.float32), found).faults) == (0, 0)
    truth = attend(records, query, LAYOUT, softmax_scale=0.1)
    counts = power(truth, found, query, records[:4], LAYOUT, scale=0.1, places=np.array([9, 10, 11, 12]))
    assert (counts["tried"], counts["O3"]) == (8, 0)


def test_power_counts_what_each_oracle_betrays_and_falls_with_a_wider_bound() -> None:
    records, query = case()
    truth = attend(records, query, LAYOUT, softmax_scale=0.1)
    found = enclose(records, query, LAYOUT, softmax_scale=0.1, model=PORTABLE_1)
    places = np.array([9, 10, 11, 12])
    counts = power(truth, found, query, records[:4], LAYOUT, scale=0.1, places=places)
    assert counts["tried"] == 8
    assert counts["O3"] == 8
    wide = type(found)(found.low - 1, found.high + 1, 0)
    assert power(truth, wide, query, records[:4], LAYOUT, scale=0.1, places=places)["O3"] == 0


# -- density


def test_density_counts_ties_at_the_cutoff_and_those_at_zero() -> None:
    found = Density()
    scores = np.array([3, 2, 2, 2, 1], np.float32)
    found.add(np.array([0, 1], np.int32), scores)
    found.add(np.array([0, 1, 2, 3], np.int32), scores)
    found.add(np.array([0, 1], np.int32), np.array([1, 0, 0, -1], np.float32))
    found.add(np.array([0, 1], np.int32), np.array([1, np.nan, 0, -1], np.float32))
    found.add(np.array([0, 1, 2, 3, 4], np.int32), scores)
    assert (found.rows, found.selecting, found.tied, found.zero_tied, found.members, found.needed) == (5, 3, 2, 1, 5, 2)


def test_neighbours_share_what_both_select() -> None:
    found = Density()
    found.neighbours(np.array([1, 2, 3], np.int32), np.array([2, 3, 4, 5], np.int32))
    assert (found.pairs, found.shared, found.of) == (1, 2, 4)
    assert total([found.plain(), found.plain()])["shared"] == 4


# -- liveness

STATED = {"source": "s", "plan": "p", "checkpoint": "c", "deadline_s": "60.0"}


def live(
    *, pids: tuple[int, int] = (11, 12), said: dict[str, Any] | None = None, left: list[str] | None = None
) -> dict[tuple[str, int], str]:
    ended = [SimpleNamespace(rank=rank, pid=pid) for rank, pid in enumerate(pids)]
    stated = [STATED | {"pid": 11}, STATED | {"pid": 12} | (said or {})]
    flags = liveness.cells(ended, stated, {k: STATED[k] for k in liveness.IDENTITY[1:]}, deadline_s=60.0, left=left or [])
    return {(str(f["gate"]), int(str(f["rank"]))): str(f["verdict"]) for f in flags}


def test_distinct_ranks_of_one_source_with_nothing_left_pass() -> None:
    assert set(live().values()) == {"PASS"}


@pytest.mark.parametrize(
    ("changes", "gate"),
    [
        ({"said": {"source": "other"}}, "L4"), ({"said": {"plan": "other"}}, "L4"), ({"said": {"checkpoint": "other"}}, "L4"),
        ({"said": {"pid": 11}, "pids": (11, 11)}, "L4"), ({"said": {"pid": 13}}, "L4"), ({"said": {"deadline_s": "None"}}, "L2"),
        ({"left": ["process 12 of a rank still runs"]}, "L3"), ({"pids": (11, 0), "said": {"pid": 0}}, "L1"),
    ],
)  # fmt: skip
def test_a_liveness_fault_fails_its_gate(changes: dict[str, Any], gate: str) -> None:
    assert live(**changes)[gate, 1] == "FAIL"


def test_what_is_left_behind_is_found(tmp_path: Path) -> None:
    import os
    import subprocess

    before = liveness.children(), liveness.open_things()
    assert liveness.left_behind(before, [], tmp_path) == []
    fd = os.memfd_create("left")
    child = subprocess.Popen(["sleep", "60"])
    try:
        (tmp_path / "facts-base-C01-0-0.json").write_text("{}")
        found = " / ".join(liveness.left_behind(before, [child.pid], tmp_path))
        for text in (
            f"process {child.pid} of a rank still runs",
            f"child process {child.pid} is left",
            "/memfd:left",
            "facts-base-C01",
        ):
            assert text in found
    finally:
        child.kill()
        child.wait()
        os.close(fd)


# -- licence


def matrix(**changes: Any) -> bytes:
    return json.dumps(
        {"schema": licence.SCHEMA, "verdict": "PASS", "package_digest": "a" * 64, "mutants": [], **changes}
    ).encode()


def test_a_passed_self_test_of_this_source_licenses() -> None:
    flags, digest = licence.cell(matrix(), "a" * 64)
    assert [(f["gate"], f["verdict"]) for f in flags] == [("V4", "PASS")]
    assert digest == hashlib.sha256(matrix()).hexdigest()


@pytest.mark.parametrize(
    "raw", [None, b"{", b"[]", matrix(verdict="FAIL"), matrix(package_digest="b" * 64), matrix(schema="other")]
)
def test_anything_else_licenses_nothing(raw: bytes | None) -> None:
    assert licence.cell(raw, "a" * 64) == ([], None)
    assert licence.Licence.of(raw, "a" * 64) is None


def test_a_named_file_must_be_a_matrix_and_the_cache_need_not(tmp_path: Path) -> None:
    assert licence.find(None, tmp_path) is None
    (tmp_path / licence.FILE).write_bytes(matrix())
    assert licence.find(None, tmp_path) == matrix()
    (tmp_path / "bad").write_bytes(b"{}")
    for name in ("bad", "missing"):
        with pytest.raises(BadConfig, match="--self-test"):
            licence.find(tmp_path / name, None)


@pytest.mark.parametrize(
    ("name", "self_test", "absent"),
    [("portable-1", "0" * 64, []), ("avx-1", None, ["V4"]), ("avx512-1", "0" * 64, ["O3"]), ("amx-1", None, ["O3", "V4"])],
)
def test_the_reader_knows_what_must_be_absent(name: str, self_test: str | None, absent: list[str]) -> None:
    assert absent_gates({"numerics": {"name": name}, "self_test": self_test}) == absent


@pytest.mark.skipif("avx512" not in available_engines(), reason="the target lacks AVX512 with BF16")
def test_an_engine_that_oracle_b_cannot_follow_has_no_o3(tmp_path: Path) -> None:
    """Its interval would be the whole line, which passes anything."""
    found = verdicts(qualify_locally(job(tmp_path, "C02", engine="avx512")))
    assert "O3" not in found
    assert found["O2"] == found["O5"] == "PASS"
    assert "O3" in verdicts(qualify_locally(job(tmp_path, "C02")))
