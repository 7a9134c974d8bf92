"""Oracle A: right selections and contexts pass, wrong ones do not, for every record format."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palimpsest.core.errors import Unsupported
from palimpsest.core.geometry import LATENT_FORMATS, Formats
from palimpsest.prove.bounds import PORTABLE_1
from palimpsest.prove.cases import cases, profile
from palimpsest.prove.data import Data
from palimpsest.prove.exact import IndexRow, decode_keys
from palimpsest.prove.oracle import (
    DEQUANT_U,
    LatentFormat,
    attend,
    audit_selection,
    canonical_selection,
    check_context,
    decode_latent,
    deployed_fp32,
    stream_scores,
    substitution_power,
)

torch = pytest.importorskip("torch")

TOPK = 128


def deployed(index, values, scales):
    """The portable-1 index score, written down again: fp64, heads ascending, one rounding."""
    keys = decode_keys(values, index.format)
    total = np.zeros(len(keys))
    for weight, query in zip(index.weights.astype(np.float64), index.query, strict=True):
        total = total + weight * np.maximum(keys @ query, 0)
    return (total * (1 if scales is None else scales.astype(np.float64))).astype(np.float32) + np.float32(0)


class Scene:
    """One row of a case: its reader, its index row, its true scores."""

    def __init__(self, make_geometry, case="C02", row=3, formats=None):
        table = {c.id: c for c in cases(profile("small"), TOPK)}
        self.data = Data(21, make_geometry(), formats or Formats(), table[case])
        self.step = table[case].steps[0]
        self.n = self.step.history + row + 1
        query, weights = self.data.queries(self.step, row, row + 1)
        self.index = IndexRow.from_bytes(query[0], weights[0], self.data.formats.index)
        (self.scores,) = stream_scores(self.data.read_index, [self.index], [self.n], block=1000)
        self.ranked = deployed(self.index, *self.data.index_records(0, self.n))
        self.right = canonical_selection(self.ranked, TOPK)

    def audit(self, ids=None, ranked=None, **changes):
        return audit_selection(
            self.data.read_index,
            self.index,
            self.right if ids is None else ids,
            topk=TOPK,
            scores=self.scores,
            deployed=self.ranked if ranked is None else ranked,
            **changes,
        )


@pytest.fixture(scope="module", params=["natural", "lattice", "fp32"])
def scene(request, make_geometry):
    case, formats = {"natural": ("C02", None), "lattice": ("C03", None), "fp32": ("C02", Formats(index="fp32"))}[request.param]
    return Scene(make_geometry, case, 3, formats)


def test_the_right_selection_passes(scene):
    found = scene.audit()
    assert found.ok
    assert found.exact_valid
    assert (found.visible, found.m, found.scored) == (scene.n, TOPK, scene.n)
    assert 0 <= found.score_worst <= 1
    assert found.canonical_missing == (None if scene.index.format == "fp32" else 0)
    assert found.score_bits == (None if scene.index.format == "fp32" else 0)
    assert len(found.cutoff.above) < TOPK <= len(found.cutoff.above) + len(found.cutoff.equal)


def test_canonical_scores_are_the_deployed_bits(make_geometry):
    for case in ("C02", "C03"):
        scene = Scene(make_geometry, case)
        assert np.array_equal(deployed_fp32(scene.scores, "fp8").view(np.uint32), scene.ranked.view(np.uint32))
    assert deployed_fp32(scene.scores, "fp32") is None


def test_block_size_does_not_matter(scene):
    for block in (64, 4096):
        (again,) = stream_scores(scene.data.read_index, [scene.index], [scene.n], block=block)
        if scene.index.format == "fp8":
            assert np.array_equal(again.value, scene.scores.value)
        assert (np.abs(again.value - scene.scores.value) <= again.error + scene.scores.error).all()


def test_rows_are_streamed_together(make_geometry):
    scene = Scene(make_geometry)
    short, long = stream_scores(scene.data.read_index, [scene.index, scene.index], [100, scene.n], block=512)
    assert len(short.value) == 100
    assert np.array_equal(short.value, long.value[:100])
    assert stream_scores(scene.data.read_index, [], []) == []


def test_wrong_selections_are_caught(scene):
    best = int(np.argmax(scene.ranked))
    order = np.argsort(-scene.ranked, kind="stable")
    low = int(order[-1])
    found = scene.audit(np.sort(np.append(scene.right[scene.right != best], low)))
    assert not found.ok
    assert found.must_miss[0] == best
    assert found.must_take[0] == low
    assert not found.exact_valid
    for ids in (scene.right[scene.right != best], np.append(scene.right[1:], scene.right[1])):
        assert not scene.audit(ids).exact_valid


def test_the_next_id_is_caught_by_exact_truth(make_geometry):
    """Drop the k-th, take the (k+1)-th: the gap is larger than the derived error on natural data."""
    scene = Scene(make_geometry)
    order = np.argsort(-scene.ranked, kind="stable")
    swapped = np.sort(np.append(scene.right[scene.right != order[TOPK - 1]], order[TOPK]))
    found = scene.audit(swapped)
    assert not found.ok
    assert not found.exact_valid
    assert found.canonical_missing == 1


def test_a_different_choice_inside_the_class_is_valid_but_not_canonical(make_geometry):
    scene = Scene(make_geometry, "C03", 4)
    cut = scene.audit().cutoff
    assert cut.tied
    other = np.sort(np.concatenate([cut.above, cut.equal[-cut.needed :]]))
    found = scene.audit(other)
    assert found.ok
    assert found.exact_valid
    assert found.canonical_missing == len(np.setdiff1d(scene.right, other)) > 0


def test_wrong_scores_are_caught(scene):
    bent = scene.ranked.copy()
    at = int(np.argmax(np.abs(bent)))
    step = np.float32(2) * np.spacing(bent[at])
    bent[at] += step
    found = scene.audit(ranked=bent)
    assert found.score_faults == 1
    assert found.score_worst > 1
    bent[at] = np.nan
    assert scene.audit(ranked=bent).score_faults == 1


def test_tie_flood_is_caught(make_geometry):
    """Scales zeroed in the history: every set is valid for the ranked scores, and only the persistent bytes object."""
    scene = Scene(make_geometry)
    flat = np.zeros(scene.n, np.float32)
    found = scene.audit(canonical_selection(flat, TOPK), flat)
    assert not found.ok
    assert found.score_faults
    assert found.missed
    assert found.taken


def test_minus_zero_passes(make_geometry):
    table = {c.id: c for c in cases(profile("small"), TOPK)}
    data = Data(2, make_geometry(), Formats(), table["C03"])
    row = data.zero_row(table["C03"].steps[0])
    scene = Scene(make_geometry, "C03", row)
    assert not scene.ranked.any()
    assert scene.right.tolist() == list(range(TOPK))
    found = scene.audit(ranked=-scene.ranked)
    assert found.ok
    assert found.score_bits == scene.n
    assert found.exact_valid


def test_broken_records_are_reported(make_geometry):
    scene = Scene(make_geometry)

    def read(ids):
        values, scales = scene.data.read_index(ids)
        values[ids == 77, 5] = 0x7F
        return values, scales

    (scores,) = stream_scores(read, [scene.index], [scene.n])
    found = dataclasses.replace(scene.audit(), nonfinite=0)
    broken = audit_selection(read, scene.index, scene.right, topk=TOPK, scores=scores)
    assert found.ok
    assert not broken.ok
    assert broken.nonfinite == 1


def test_few_tokens_and_none(make_geometry):
    scene = Scene(make_geometry, "C06", 0)
    assert scene.n == TOPK
    assert scene.audit().ok
    assert scene.audit().cutoff.needed == len(scene.audit().cutoff.equal)
    (empty,) = stream_scores(scene.data.read_index, [scene.index], [0])
    assert audit_selection(scene.data.read_index, scene.index, np.zeros(0, np.int64), topk=TOPK, scores=empty).ok


@given(st.integers(0, 2**32 - 1), st.integers(1, 60))
@settings(max_examples=50, deadline=None)
def test_canonical_selection_is_the_rule(seed, k):
    rng = np.random.default_rng(seed)
    scores = np.rint(rng.standard_normal(50) * 3).astype(np.float32)
    scores[rng.integers(0, 50, 3)] = rng.choice([np.nan, -0.0, 0.0])
    ranked = np.where(np.isnan(scores), -np.inf, scores)
    rule = sorted(range(50), key=lambda i: (-ranked[i], i))[:k]
    assert canonical_selection(scores, k).tolist() == sorted(rule)


# -- attention -------------------------------------------------------------------------------------------------------------------


def layout_of(data):
    g = data.geometry
    return LatentFormat(data.formats.latent, g.kv_lora, g.rope.dims, g.latent_scale)


class Attention:
    """Records and a query of one row, its ids, and the simulated engine."""

    def __init__(self, make_geometry, portable_context, latent, n=300, temperature=1.0, **geometry):
        data = Scene(make_geometry, formats=Formats(latent=latent)).data
        self.data = dataclasses.replace(data, geometry=dataclasses.replace(data.geometry, **geometry))
        self.layout = layout_of(self.data)
        rng = np.random.default_rng(n)
        self.ids = np.sort(rng.permutation(2000)[:n])
        self.records = self.data.read_latent(self.ids)
        self.query = rng.standard_normal((3, self.layout.dim)).astype(np.float32).astype(np.float64)
        keys, _ = decode_latent(self.records, self.layout)
        self.scale = temperature / float(np.sqrt(self.layout.dim) * np.abs(keys).mean())
        self.simulate = portable_context
        self.truth = attend(self.records, self.query, self.layout, softmax_scale=self.scale)

    def engine(self, records=None):
        keys, _ = decode_latent(self.records if records is None else records, self.layout)
        return self.simulate(self.query, keys, self.scale, self.layout.kv_lora)


@pytest.mark.parametrize("latent", LATENT_FORMATS)
@pytest.mark.parametrize("temperature", [0.1, 1.0, 4.0])
def test_the_engine_lies_within_the_bound_for_every_format(make_geometry, portable_context, latent, temperature):
    a = Attention(make_geometry, portable_context, latent, temperature=temperature)
    found = check_context(a.engine(), a.truth)
    assert found.checked == 3 * 512
    assert found.faults == 0
    assert 0 < found.worst <= 1
    other = np.random.default_rng(1).permutation(len(a.records))
    assert check_context(a.engine(a.records[other]), a.truth).faults == 0, "another emission order passes"


@pytest.mark.parametrize("latent", LATENT_FORMATS)
def test_one_substituted_record_is_caught(make_geometry, portable_context, latent):
    a = Attention(make_geometry, portable_context, latent, n=2000 if latent == "fp8" else 300)
    for place in (0, len(a.ids) // 2, len(a.ids) - 1):
        swapped = a.records.copy()
        swapped[place] = a.data.read_latent(np.array([3000 + place]))[0]
        found = check_context(a.engine(swapped), a.truth)
        assert found.faults
        assert found.worst > 1
        assert found.first is not None


def test_other_wrongs_are_caught(make_geometry, portable_context):
    a = Attention(make_geometry, portable_context, "fp8")
    assert check_context(a.engine(a.records[:-1]), a.truth).faults, "last id dropped"
    assert check_context(a.engine(np.concatenate([a.records, a.records[:1]])), a.truth).faults, "an id twice"
    assert check_context(np.roll(a.engine(), 1, axis=0), a.truth).faults, "a neighbour's head"
    broken = a.engine()
    broken[1, 7] = np.nan
    assert check_context(broken, a.truth).first == (1, 7)
    assert check_context(np.zeros_like(broken), a.truth).faults


def test_power_is_measured(make_geometry, portable_context):
    a = Attention(make_geometry, portable_context, "fp8", n=2000)
    others = a.data.read_latent(np.arange(2500, 2532))
    power = substitution_power(a.truth, a.query, others, a.layout, softmax_scale=a.scale, seed=1)
    assert power.tried == 96
    assert power.share >= 95 / 96
    bf16 = attend(
        a.records, a.query, a.layout, softmax_scale=a.scale, arithmetic=dataclasses.replace(PORTABLE_1, name="bf16", p_u=2.0**-8)
    )
    assert substitution_power(bf16, a.query, others, a.layout, softmax_scale=a.scale, seed=1).detected < power.detected


def test_scales_that_are_no_powers_of_two_widen_the_bound(make_geometry, portable_context):
    _, exact = decode_latent(np.zeros((1, 8), np.uint8), LatentFormat("fp8", 4, 4, 0.25))
    _, rounded = decode_latent(np.zeros((1, 8), np.uint8), LatentFormat("fp8", 4, 4, 0.3))
    assert (exact, rounded) == (0, DEQUANT_U)
    a = Attention(make_geometry, portable_context, "fp8", latent_scale=0.3)
    assert check_context(a.engine(), a.truth).faults == 0


def test_ds_mla_records_decode_as_torch_reads_them(make_geometry):
    data = Scene(make_geometry, formats=Formats(latent="fp8_ds_mla")).data
    records = data.latent_records(0, 20)
    layout = layout_of(data)
    assert layout.record_bytes == 656 == records.shape[1]
    raw = torch.from_numpy(records)
    values = raw[:, :512].contiguous().view(torch.float8_e4m3fn).double()
    scales = raw[:, 512:528].contiguous().view(torch.float32).double().repeat_interleave(128, dim=1)
    rope = raw[:, 528:].contiguous().view(torch.bfloat16).double()
    theirs = torch.cat([values * scales, rope], dim=1).numpy()
    ours, dequant = decode_latent(records, layout)
    assert np.array_equal(ours, theirs)
    assert dequant == DEQUANT_U


def test_refusals():
    with pytest.raises(ValueError, match="sees nothing"):
        attend(np.zeros((0, 8), np.uint8), np.zeros((1, 8)), LatentFormat("fp8", 4, 4), softmax_scale=1.0)
    with pytest.raises(AssertionError, match="records of 7 bytes, 8 expected"):
        decode_latent(np.zeros((1, 7), np.uint8), LatentFormat("fp8", 4, 4))
    with pytest.raises(Unsupported, match="nvfp4"):
        decode_latent(np.zeros((1, 8), np.uint8), LatentFormat("nvfp4", 4, 4))
