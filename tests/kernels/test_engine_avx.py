"""The two kernels of the avx engine: equal bits at every edge of both, the choice between them, and no byte read outside."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from bare_ranks import aligned
from engines import AVX_KERNELS, SELECTING, Index, same_bits
from guarded import at_the_edge
from test_engine_select import Watch, oracle

from palimpsest.kernels import detect, emulate, sizes
from palimpsest.kernels.call import Scratch

pytestmark = pytest.mark.skipif(not AVX_KERNELS, reason="numba is not installed")
AVX = [name for name in SELECTING if name.startswith("avx")]
both = pytest.mark.parametrize("engine", AVX, indirect=True)
needs_vectors = pytest.mark.skipif(len(AVX_KERNELS) < 2, reason="the compile target lacks VDPBF16PS")


@pytest.fixture
def avx():
    from palimpsest.kernels.index_select import avx

    return avx


def any_codes(problem: Index, *, nan: bool) -> Index:
    """Queries and keys of any codes, subnormal ones included; NaN codes of both signs in a few places."""
    rng = np.random.default_rng(problem.seed)
    for values in (problem.queries, problem.keys):
        codes = rng.integers(0, 254, values.shape, dtype=np.uint8)
        codes += codes >= 127
        values.view(torch.uint8).copy_(torch.from_numpy(codes))
    if nan:
        problem.keys.view(torch.uint8)[3::37, 0], problem.keys.view(torch.uint8)[5::41, -1] = 0x7F, 0xFF
    return problem


def assert_emulated(problem: Index, row: int, found: np.ndarray) -> None:
    query, weights, keys, scales = problem.values(row)
    expected = emulate.avx_scores(query, weights, keys[: len(found)], scales[: len(found)])
    lost = np.isnan(expected)
    assert np.array_equal(np.isnan(found), lost), f"row {row}"
    assert np.array_equal(found.view(np.int32)[~lost], expected.view(np.int32)[~lost]), f"row {row}"


@both
@pytest.mark.parametrize("nan", [False, True])
@pytest.mark.parametrize("heads", [1, 3, 4, 5, 7, 8, 9, 12, 13, 31, 33])
def test_any_number_of_heads_has_the_bits_of_the_emulation(engine, heads, nan):
    problem, watch = any_codes(Index(3, 131, heads, 64, topk=16, seed=heads), nan=nan), Watch()
    _, _, nans = problem.select(engine, 128, tap=watch)
    for row in range(3):
        assert_emulated(problem, row, watch.row(row))
        assert int(nans[row]) == np.isnan(watch.row(row)).sum()
    assert bool(nans.any()) == nan


@both
@pytest.mark.parametrize("dim", [1, 2, 3, 4, 6, 12, 60, 64, 68, 100, 124, 128, 132, 192, 256, 260])
def test_any_dim_has_the_bits_of_the_emulation(engine, dim):
    problem, watch = any_codes(Index(2, 70, 9, dim, topk=16, seed=dim), nan=True), Watch()
    problem.select(engine, 68, tap=watch)
    for row in range(2):
        assert_emulated(problem, row, watch.row(row))


@both
@pytest.mark.parametrize("end", [1, 2, 15, 16, 17, 47, 48, 49, 959, 960, 961, 1023, 1024, 1025, 1919, 1921, 2047, 2048, 2049])
def test_any_end_has_the_bits_of_the_emulation_and_selects_exactly(engine, end):
    problem, watch = any_codes(Index(2, end + 1, 5, 12, topk=300, seed=end), nan=True), Watch()
    found = problem.select(engine, end - 1, tap=watch)
    for row in range(2):
        assert_emulated(problem, row, watch.row(row))
        expected = oracle(watch.row(row), 300)
        assert np.array_equal(found[0][row, : len(expected)].numpy(), expected)
        assert int(found[1][row]) == len(expected) == min(300, end + row)
    plain = problem.select(engine, end - 1)
    assert all(same_bits(a, b) for a, b in zip(found, plain, strict=True)), "watching changed the result"


@both
@pytest.mark.parametrize("place", [0, 1, 2, 3, 61, 66, 67])
def test_every_code_in_every_place_is_exact(engine, place):
    """Codes of a key, then of a query, in one dim against a one: two heads of opposite signs make the score the value itself."""
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    exact = values.float().numpy() + np.float32(0)
    lost = np.isnan(exact)
    signs = torch.tensor([1.0, -1.0])
    for rows, tokens in ((1, 256), (256, 257)):
        problem, watch = Index(rows, tokens, 2, 68, topk=4), Watch()
        problem.weights[:], problem.scales[:] = signs, 1.0
        problem.queries[:], problem.keys[:] = 0.0, 0.0
        if rows == 1:
            problem.keys[:, place], problem.queries[0, :, place] = values, signs.to(torch.float8_e4m3fn)
        else:
            problem.keys[:, place], problem.queries[:, 0, place] = 1.0, values
            problem.queries[:, 1, place].view(torch.uint8).copy_(values.view(torch.uint8) ^ 0x80)
        problem.select(engine, tokens - rows, tap=watch)
        found = watch.row(0) if rows == 1 else np.array([watch.row(row)[0] for row in range(256)])
        assert np.array_equal(np.isnan(found), lost)
        assert np.array_equal(found[~lost], exact[~lost]), f"codes of {'keys' if rows == 1 else 'queries'}"


@both
@pytest.mark.parametrize(("tokens", "dim"), [(1, 4), (17, 24), (47, 128), (960, 64), (1000, 68), (1025, 128)])
def test_nothing_outside_the_operands_is_read(engine, tokens, dim):
    """Every operand ends at a page that nothing may read."""
    problem = any_codes(Index(1, tokens, 3, dim, topk=32, seed=tokens), nan=False)
    base = problem.select(engine, tokens - 1)
    for name in ("keys", "scales", "queries", "weights"):
        setattr(problem, name, at_the_edge(getattr(problem, name)))
    assert all(same_bits(a, b) for a, b in zip(base, problem.select(engine, tokens - 1), strict=True))


@needs_vectors
@pytest.mark.parametrize(
    ("rows", "tokens", "heads", "dim", "topk"), [(70, 2100, 20, 64, 256), (5, 5000, 64, 128, 2048), (17, 1500, 3, 100, 64)]
)
def test_both_kernels_select_the_same_bytes(avx, monkeypatch, rows, tokens, heads, dim, topk):
    """Whatever the threads and groups; scores too, NaN scores as such."""
    problem, found, scores = any_codes(Index(rows, tokens, heads, dim, topk=topk, seed=rows), nan=True), [], []
    for kernels in (avx.plain_loops(), avx.vector_dots()):
        monkeypatch.setattr(avx, "KERNELS", kernels)
        found += [problem.select("avx", tokens - rows, threads=threads) for threads in (1, 3)]
        watch = Watch()
        found.append(problem.select("avx", tokens - rows, tap=watch))
        scores.append([watch.row(row) for row in range(rows)])
    for other in found[1:]:
        assert all(same_bits(a, b) for a, b in zip(found[0], other, strict=True))
    for plain, fast in zip(*scores, strict=True):
        lost = np.isnan(plain)
        assert np.array_equal(lost, np.isnan(fast))
        assert np.array_equal(plain.view(np.int32)[~lost], fast.view(np.int32)[~lost])


def test_both_kernels_fit_the_planned_scratch(avx):
    """A plan knows no machine: whichever kernel runs, its scratch is within the contract's. ``Scratch.take`` refuses an
    overrun."""

    class Planned:
        def __init__(self, topk, heads, dim):
            self.params = {"topk": topk, "heads": heads, "dim": dim}
            self.scratch = Scratch(aligned(sizes.avx_select_scratch(topk, heads, dim)))

    makers = [getattr(avx, name)().make for name in AVX_KERNELS]
    for make in makers:
        for topk in (1, 300, 2048):
            for heads in (1, 4, 5, 8, 31, 64, 128):
                for dim in (1, 4, 24, 68, 128, 512):
                    make(Planned(topk, heads, dim))


def in_another_order(swapped: bool, fused: bool):
    """The probe tile's scores by a dot that adds pairs of dims in another order, or with one rounding for both products."""
    from palimpsest.kernels.index_select.avx import probe_tile

    queries, weights, keys, scales = probe_tile()
    query, key = (torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy() for codes in (queries, keys))
    total = np.zeros(len(keys), np.float32)
    for weight, head in zip(weights, query, strict=True):
        dot = np.zeros(len(keys), np.float32)
        for d in range(0, key.shape[1], 2):
            first, second = head[d] * key[:, d], head[d + 1] * key[:, d + 1]
            if fused:
                dot = (dot.astype(np.float64) + first + second).astype(np.float32)
            else:
                dot = (dot + second) + first if swapped else (dot + first) + second
        total = total + weight * np.maximum(dot, np.float32(0))
    return total * scales + np.float32(0)


def test_the_probe_tells_the_orders_of_roundings_apart(avx):
    def probe_of(scores):
        return avx.rounds_as_avx_1(avx.KERNELS, lambda kernels: scores)

    assert avx.rounds_as_avx_1(avx.plain_loops())
    assert probe_of(in_another_order(swapped=False, fused=False))
    assert not probe_of(in_another_order(swapped=True, fused=False))
    assert not probe_of(in_another_order(swapped=False, fused=True))


@needs_vectors
def test_a_machine_that_rounds_otherwise_gets_the_plain_loops(avx, monkeypatch):
    from palimpsest.kernels.index_select import avx512_kernel, avx_kernel

    kernels, chosen = avx.choose()
    assert (kernels.score, chosen) == (avx512_kernel.pass_tiles, "VDPBF16PS")
    wrong = avx.scores_of(kernels)
    wrong.view(np.int32)[-1] ^= 1
    kernels, chosen = avx.choose(lambda kernels: wrong)
    assert kernels.score is avx_kernel.pass_tiles
    assert chosen == "plain loops: this machine's VDPBF16PS does not round in the order of avx-1"
    problem, watch = Index(2, 100, 8, 64, topk=16), Watch()
    monkeypatch.setattr(avx, "KERNELS", kernels)
    problem.select("avx", 98, tap=watch)
    for row in range(2):
        assert_emulated(problem, row, watch.row(row))


@pytest.mark.parametrize("missing", detect.AVX512_FEATURES)
def test_a_target_without_one_of_the_features_gets_the_plain_loops(avx, monkeypatch, missing):
    from palimpsest.kernels.index_select import avx_kernel

    monkeypatch.setattr(detect, "target_features", lambda: frozenset(detect.AVX512_FEATURES) - {missing})
    assert not detect.has_vdpbf16ps()
    assert "VDPBF16PS" not in detect.available_engines()["avx"]
    kernels, chosen = avx.choose()
    assert (kernels.score, chosen) == (avx_kernel.pass_tiles, "plain loops: the compile target lacks VDPBF16PS")


def test_the_reason_names_the_instruction(monkeypatch):
    monkeypatch.setattr(detect, "target_features", lambda: frozenset(detect.AVX512_FEATURES))
    assert detect.available_engines()["avx"] == "numba is installed; the target has AVX512 and VDPBF16PS"


MASKED = """
import sys
from palimpsest.kernels.index_select import avx
print(avx.CHOSEN)
print("palimpsest.kernels.index_select.avx512_kernel" in sys.modules)
"""


def test_a_masked_target_never_compiles_the_instruction():
    """In a process of its own, as ``NUMBA_CPU_FEATURES`` is read once; AVX512 without BF16 as on most machines that have it."""
    known = {k: v for k, v in os.environ.items() if not k.startswith("NUMBA")}
    features = ",".join(f"+{name}" for name in detect.AVX512_FEATURES if name != "avx512bf16")
    done = subprocess.run(
        [sys.executable, "-c", MASKED], env=known | {"NUMBA_CPU_FEATURES": features, "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.path.dirname(os.path.dirname(os.path.dirname(__file__)))},
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["plain loops: the compile target lacks VDPBF16PS", "False"]
