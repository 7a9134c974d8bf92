"""index_select of the compiled engines: scores equal their emulation bit for bit, selection is exact, and no split changes a
byte."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from engines import SELECTING, Index, same_bits
from test_ops import compare, play

from palimpsest.kernels import emulate, sizes
from palimpsest.kernels.index_select.cases import cases
from palimpsest.prove import bounds
from palimpsest.prove.exact import IndexRow, filtered_scores

EMULATED = {"amx": emulate.amx_scores, "avx": emulate.avx_scores, "avx512": emulate.avx_scores}
ARITHMETIC = {"amx": bounds.AMX_1, "avx": bounds.AVX_1, "avx512": bounds.AVX512_1}
#: causal ends around every tile, block and top-k edge
ENDS = (1, 15, 16, 17, 31, 33, 63, 65, 1023, 1024, 1025, 2047, 2048, 2049)

pytestmark = pytest.mark.parametrize("engine", SELECTING, indirect=True)


class Watch:
    """Collects the tapped scores per row, checking that tiles arrive in key order."""

    def __init__(self):
        self.scores, self.blocks = {}, []

    def __call__(self, event, **data):
        if event == "selected":
            self.blocks.append(data["rows"])
            return
        assert not data["scores"].flags.writeable
        row = self.scores.setdefault(data["row"], [])
        assert sum(map(len, row)) == data["start"]
        row.append(data["scores"].copy())

    def row(self, row):
        return np.concatenate(self.scores[row])


def oracle(scores, topk):
    """Ids of the topk best scores: score descending, id ascending, NaN as -inf; returned ascending."""
    ranked = np.where(np.isnan(scores), -np.inf, scores) + 0.0
    order = np.lexsort((np.arange(len(scores)), -ranked))
    return np.sort(order[:topk])


@pytest.mark.parametrize(
    ("heads", "dim", "rows", "end"), [(64, 128, 3, 1100), (32, 128, 2, 97), (20, 64, 2, 130), (3, 24, 4, 67)]
)
def test_scores_equal_the_emulation_bit_for_bit(engine, heads, dim, rows, end):
    problem, watch = Index(rows, end, heads, dim, topk=16, seed=heads), Watch()
    problem.select(engine, end - rows, tap=watch)
    for row in range(rows):
        query, weights, keys, scales = problem.values(row)
        visible = end - rows + row + 1
        expected = EMULATED[engine](query, weights, keys[:visible], scales[:visible])
        assert np.array_equal(watch.row(row).view(np.int32), expected.view(np.int32)), f"row {row}"


@pytest.mark.parametrize("end", ENDS)
def test_ragged_ends_select_exactly(engine, end):
    problem, watch = Index(3, end + 2, heads=8, topk=2048, seed=end), Watch()
    ids, counts, nans = problem.select(engine, end - 1, tap=watch)
    plain = problem.select(engine, end - 1)
    for row in range(3):
        expected = oracle(watch.row(row), 2048)
        assert int(counts[row]) == min(2048, end + row) == len(expected)
        assert np.array_equal(ids[row, : len(expected)].numpy(), expected)
        assert (ids[row, len(expected) :] == -1).all()
    assert not nans.any()
    assert all(same_bits(a, b) for a, b in zip((ids, counts, nans), plain, strict=True)), "watching changed the result"


@pytest.mark.parametrize("kind", ["ascending", "descending", "constant", "few", "zeros", "nan", "inf"])
def test_hostile_scores_select_exactly(engine, kind):
    """More keys than the candidate buffer, in the orders that hurt a streaming selection."""
    tokens, topk = 5000, 300
    problem, watch = Index(2, tokens, heads=1, dim=8, topk=topk, seed=3), Watch()
    problem.queries[:], problem.keys[:], problem.weights[:] = 1.0, 1.0, 1.0
    scales = {
        "ascending": torch.arange(tokens) + 1.0,
        "descending": tokens - torch.arange(tokens) + 0.0,
        "constant": torch.ones(tokens),
        "few": torch.arange(tokens) % 3 + 1.0,
        "zeros": torch.where(torch.arange(tokens) % 2 == 0, 0.0, -0.0),
        "nan": torch.where(torch.arange(tokens) % 2 == 0, torch.nan, 1.0),
        "inf": torch.where(torch.arange(tokens) % 7 == 0, torch.inf, -torch.inf),
    }
    problem.scales = scales[kind].float()
    ids, counts, nans = problem.select(engine, tokens - 2, tap=watch)
    for row in range(2):
        visible = tokens - 1 + row
        assert np.array_equal(ids[row].numpy(), oracle(watch.row(row), topk)), f"row {row}"
        assert int(nans[row]) == (-(-visible // 2) if kind == "nan" else 0)
    assert all(same_bits(a, b) for a, b in zip((ids, counts, nans), problem.select(engine, tokens - 2), strict=True))


def test_a_row_of_nan_selects_the_lowest_ids(engine):
    problem = Index(1, 500, heads=4, dim=32, topk=100)
    problem.weights[:] = torch.nan
    ids, counts, nans = problem.select(engine, 499)
    assert ids[0].tolist() == list(range(100))
    assert (int(counts[0]), int(nans[0])) == (100, 500)


def test_no_split_changes_a_byte(engine):
    """Threads, chunk cuts and ranks."""
    problem = Index(70, 3100, heads=8, dim=64, topk=256)
    base = problem.select(engine, 3030)
    for threads in (2, 3, 8):
        assert all(same_bits(a, b) for a, b in zip(base, problem.select(engine, 3030, threads=threads), strict=True)), (
            f"{threads} threads"
        )
    for cuts in ((0, 1, 64, 65, 70), (0, 33, 70), tuple(range(71))):
        parts = [problem.select(engine, 3030, rows=pair) for pair in pairwise(cuts)]
        assert all(same_bits(a, torch.cat(b)) for a, b in zip(base, zip(*parts, strict=True), strict=True)), f"cuts {cuts[:5]}"
    for ranks in (2, 16):
        parts = [problem.select(engine, 3030, rank=rank, ranks=ranks) for rank in range(-(-70 // -(-70 // ranks)))]
        assert all(same_bits(a, torch.cat(b)) for a, b in zip(base, zip(*parts, strict=True), strict=True)), f"{ranks} ranks"


@pytest.mark.parametrize("fill", [0x00, 0x7F, 0x80, 0xFF])
def test_stale_scratch_never_shows(engine, fill):
    problem = Index(5, 1500, heads=20, topk=64)
    assert all(
        same_bits(a, b) for a, b in zip(problem.select(engine, 1495), problem.select(engine, 1495, fill=fill), strict=True)
    )


def test_sets_differ_from_the_exact_ones_only_inside_the_error(engine):
    """Every id on one side only has a true score within the derived error of the true cutoff, and every score is within its
    own."""
    problem, watch = Index(4, 6000, seed=11, topk=512), Watch()
    ids, _, _ = problem.select(engine, 5996, tap=watch)
    for row in range(4):
        visible = 5997 + row
        codes = problem.queries[row].view(torch.uint8).numpy()
        keys = problem.keys.float().numpy().astype(np.float64)[:visible]
        exact = filtered_scores(
            IndexRow.from_bytes(codes, problem.weights[row].numpy(), "fp8"), keys, problem.scales.numpy()[:visible]
        )
        spread = (
            np.abs(problem.weights[row].double().numpy()) @ (np.abs(problem.queries[row].double().numpy()) @ np.abs(keys).T)
        ) * problem.scales.double().numpy()[:visible]
        allowed = (
            bounds.score_error(ARITHMETIC[engine], value=exact.value, mass=exact.mass, spread=spread, heads=64, dim=128)
            + exact.error
        )
        assert (np.abs(watch.row(row) - exact.value) <= allowed).all()
        wanted, found = set(oracle(exact.value, 512).tolist()), set(ids[row].tolist())
        cutoff = np.partition(exact.value, visible - 512)[visible - 512]
        unexplained = [i for i in wanted ^ found if abs(exact.value[i] - cutoff) > 2 * allowed[i]]
        assert not unexplained


@pytest.mark.parametrize("case", list(cases()), ids=lambda case: case.name)
def test_agrees_with_the_reference_on_hostile_cases(engine, case):
    compare("index_select", case, play("index_select", case, engine), play("index_select", case, "reference"))


@pytest.mark.parametrize(("heads", "topk"), [(64, 2048), (32, 2048), (128, 2048), (64, 512), (1, 4096)])
def test_scratch_stays_within_4_mib_at_any_size(engine, heads, topk):
    scratch = (sizes.amx_select_scratch if engine == "amx" else sizes.avx_select_scratch)(topk, heads, 128)
    assert scratch <= 4 << 20
