"""Validity of selected sets, tie classes, and certificates that survive neither tampering nor a wrong claim."""

import copy
import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palimpsest.prove.bounds import PORTABLE_1
from palimpsest.prove.certificate import byte_value, check_certificate, float_bits
from palimpsest.prove.exact import E4M3_VALUES, Cutoff, Exact, IndexRow, decode_keys, exact_cutoff, filtered_scores, refiner
from palimpsest.prove.ties import (
    Difference,
    TieRow,
    certificate,
    classify,
    difference,
    exact_faults,
    presence_total,
    structure_faults,
    tie_presence,
    validity_faults,
)

SEEDS = st.integers(0, 2**32 - 1)


def top(scores, k):
    """Score descending, then id ascending; ids ascending."""
    return np.sort(np.lexsort((np.arange(len(scores)), -scores))[:k])


@pytest.fixture
def scores():
    s = np.random.default_rng(1).standard_normal(500).astype(np.float32)
    s[[10, 400]] = s[np.argsort(-s)[63]]
    return s


def test_the_right_set_is_valid_in_any_order(scores):
    right = top(scores, 64)
    for ids in (right, right[::-1], np.random.default_rng(0).permutation(right)):
        assert validity_faults(ids, scores, 64) == []


def test_any_choice_inside_the_cutoff_class_is_valid(scores):
    right = top(scores, 64)
    cut = scores[right].min()
    inside, outside = right[scores[right] == cut], np.setdiff1d(np.flatnonzero(scores == cut), right)
    assert len(inside)
    assert len(outside)
    assert validity_faults(np.append(np.setdiff1d(right, inside[:1]), outside[0]), scores, 64) == []


def test_mutated_sets_are_caught(scores):
    right = top(scores, 64)
    best, order = int(np.argmax(scores)), np.argsort(-scores, kind="stable")
    below = int(order[np.searchsorted(-scores[order], -scores[right].min(), "right")])
    mutants = {
        "drop the top id, take one below the cutoff": np.append(right[right != best], below),
        "drop the top id": right[right != best],
        "duplicate": np.append(right[right != best], right[0] if right[0] != best else right[1]),
        "one too many": np.append(right, below),
        "outside": np.append(right[right != best], 500),
        "negative": np.append(right[right != best], -3),
    }
    for name, ids in mutants.items():
        assert validity_faults(ids, scores, 64), name


def test_one_ulp_below_the_cutoff_is_caught(scores):
    right = top(scores, 64)
    kth = right[np.argmin(scores[right])]
    close = scores.copy()
    other = int(np.setdiff1d(np.arange(500), right)[0])
    close[[10, 400]] = close[[10, 400]] - 1
    close[kth] = scores[kth]
    close[other] = np.nextafter(scores[kth], np.float32(-np.inf))
    right = top(close, 64)
    assert kth in right
    assert validity_faults(right, close, 64) == []
    swapped = np.append(right[right != kth], other)
    assert "is below" in validity_faults(swapped, close, 64)[0]


def test_zero_has_no_sign_and_nan_is_a_fault():
    scores = np.array([1, -0.0, 0.0, -0.0, -1], np.float32)
    for pair in ([0, 1], [0, 2], [0, 3]):
        assert validity_faults(np.array(pair), scores, 2) == []
    assert validity_faults(np.array([0, 4]), scores, 2)
    for bad in (np.nan, np.inf, -np.inf):
        broken = scores.copy()
        broken[4] = bad
        assert "not finite" in validity_faults(np.array([0, 1]), broken, 2)[0]


def test_few_visible_tokens_select_everything():
    scores = np.arange(3, dtype=np.float32)
    assert validity_faults(np.array([0, 1, 2]), scores, 8) == []
    assert validity_faults(np.array([0, 1]), scores, 8)
    assert validity_faults(np.zeros(0, np.int32), scores[:0], 8) == []


@settings(max_examples=60, deadline=None)
@given(SEEDS, st.integers(1, 30), st.booleans())
def test_validity_is_the_definition(seed, k, coarse):
    """min over the set >= max over the rest, exactly when G inside A inside G + E."""
    rng = np.random.default_rng(seed)
    scores = rng.standard_normal(30).astype(np.float32)
    if coarse:
        scores = np.rint(scores)
    ids = top(scores, k)
    for _ in range(rng.integers(0, 3)):
        ids[rng.integers(k)] = rng.integers(30)
    tau = np.sort(scores)[::-1][k - 1]
    above, class_ = set(np.flatnonzero(scores > tau)), set(np.flatnonzero(scores == tau))
    valid = len(set(ids)) == k and above <= set(ids) <= above | class_
    assert (validity_faults(ids, scores, k) == []) == valid
    cutoff = exact_cutoff(scores.astype(np.float64), np.zeros(30), k, lambda i: [])
    assert (exact_faults(ids, cutoff, 30) == []) == valid


def emitted(history, active, prepared, topk):
    ids, counts = np.full((prepared, topk), -1, np.int32), np.zeros(prepared, np.int32)
    rng = np.random.default_rng(history)
    for row in range(active):
        n = history + row + 1
        counts[row] = min(topk, n)
        ids[row, : counts[row]] = np.sort(rng.permutation(n)[:topk])
    return ids, counts


@pytest.mark.parametrize(("history", "active"), [(0, 12), (3, 9), (100, 12), (5, 0)])
def test_structure_of_legal_rows(history, active):
    ids, counts = emitted(history, active, 12, 8)
    assert structure_faults(ids, counts, history=history, rows=active, topk=8) == []
    assert structure_faults(ids[4:], counts[4:], history=history, rows=active, topk=8, first_row=4) == []


@pytest.mark.parametrize(
    ("name", "row", "text"),
    [
        ("duplicate", 9, "not ascending"),
        ("descending", 9, "not ascending"),
        ("future id", 9, "outside"),
        ("early pad", 9, "outside"),
        ("late id", 2, "not a pad"),
        ("count", 9, "count 7, 8 expected"),
        ("inactive row kept", 11, "count 8, 0 expected"),
        ("inactive ids kept", 11, "not a pad"),
    ],
)
def test_structure_mutants_are_caught(name, row, text):
    ids, counts = emitted(3, 11, 12, 8)
    if name == "duplicate":
        ids[row, 3] = ids[row, 2]
    elif name == "descending":
        ids[row] = ids[row, ::-1]
    elif name == "future id":
        ids[row, 7] = 3 + row + 1
    elif name == "early pad":
        ids[row, 7] = -1
    elif name == "late id":
        ids[row, 7] = 0
    elif name == "count":
        counts[row] = 7
    elif name == "inactive row kept":
        ids[row], counts[row] = np.arange(8), 8
    else:
        ids[row] = np.arange(8)
    faults = structure_faults(ids, counts, history=3, rows=11, topk=8)
    assert [r for r, _ in faults] == [row]
    assert text in faults[0][1]


def test_difference_drops_pads():
    found = difference(np.array([1, 2, 5, -1]), np.array([2, 5, 9, -1]))
    assert found == Difference((1,), (9,))
    assert not difference(np.array([3, 1]), np.array([1, 3]))


def test_classes():
    half, one = Exact.from_float(0.5), Exact.from_float(1)
    assert classify(one, one, bits=1, kth_bits=2, within=False) == "exact_tie"
    assert classify(half, one, bits=2, kth_bits=2, within=True) == "rounded_tie"
    assert classify(half, one, bits=2, kth_bits=2, within=False) == "other"
    assert classify(half, one, bits=1, kth_bits=2, within=True) == "other"
    assert classify(half, one, bits=None, kth_bits=None, within=True) == "other"


def test_the_checkers_own_decoders_agree():
    finite = [c for c in range(256) if c & 127 != 127]
    assert [float(byte_value(c)) for c in finite] == E4M3_VALUES[finite].tolist()
    rng = np.random.default_rng(0)
    values = rng.integers(0, 2**32, 2000, np.uint64).astype(np.uint32)
    for bits, value in zip(values.tolist(), values.view(np.float32).tolist(), strict=True):
        if np.isfinite(value):
            assert float(float_bits(bits)) == value
        else:
            with pytest.raises(ValueError, match="not finite"):
                float_bits(bits)
    with pytest.raises(ValueError, match="NaN"):
        byte_value(0x7F)


@dataclasses.dataclass
class Planted:
    """A row with exact ties at the cutoff, and one member swapped between the two arrangements."""

    row: TieRow
    values: np.ndarray
    scales: np.ndarray
    cutoff: Cutoff
    found: Difference
    bits: dict

    def read(self, id):
        return self.values[id].tobytes() + self.scales[id].tobytes()

    def make(self, **changes):
        return certificate(self.row, changes.get("found", self.found), self.cutoff, self.read, model=PORTABLE_1, bits=self.bits)


@pytest.fixture
def planted():
    rng = np.random.default_rng(8)
    query = np.array([0, 0x38, 0xB8], np.uint8)[rng.integers(0, 3, (4, 32))]
    weights = np.array([1, -2, 2, 1], np.float32)
    values = np.array([0, 0x38, 0xB8], np.uint8)[rng.integers(0, 3, (200, 32))]
    scales = np.ones(200, np.float32)
    row = TieRow(5, 1, 50, 200, "fp8", 4, 32, query.tobytes(), weights.tobytes())
    near = filtered_scores(row.index_row, decode_keys(values, "fp8"), scales)
    cutoff = exact_cutoff(near.value, near.error, 50, lambda i: [])
    row = dataclasses.replace(row, topk=len(cutoff.above) + len(cutoff.equal) // 2)
    cutoff = exact_cutoff(near.value, near.error, row.topk, lambda i: [])
    assert cutoff.tied
    base, alias = cutoff.equal[: cutoff.needed], cutoff.equal[-cutoff.needed :]
    bits = dict(enumerate(near.value.astype(np.float32).view(np.uint32).tolist()))
    return Planted(row, values, scales, cutoff, difference(base, alias), bits)


def test_a_true_certificate_passes_and_survives_json(planted):
    cert = json.loads(json.dumps(planted.make()))
    assert check_certificate(cert, planted.read) == []
    assert check_certificate(cert, planted.read, whole=True) == []
    assert {m["class"] for m in cert["members"]} == {"exact_tie"}


def changed(cert, path, value):
    cert = copy.deepcopy(cert)
    at = cert
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value(at[path[-1]]) if callable(value) else value
    return cert


TAMPERED = {
    "score": (("members", 0, "mantissa"), lambda v: v + 2),
    "exponent": (("members", 0, "exponent"), lambda v: v + 1),
    "digest": (("members", 0, "sha256"), "0" * 64),
    "class": (("members", 0, "class"), "rounded_tie"),
    "cutoff witness": (("kth", "mantissa"), lambda v: v - 2),
    "members dropped": (("members",), lambda v: v[1:]),
    "needed": (("needed",), lambda v: v + 1),
    "above": (("above",), lambda v: v - 1),
    "equal too few": (("equal",), 0),
    "one side only": (("only_alias",), []),
    "id outside": (("only_alias", 0), 200),
    "visible": (("visible",), 10),
    "query": (("query",), lambda v: "38" + v[2:] if v[:2] != "38" else "b8" + v[2:]),
    "query short": (("query",), lambda v: v[2:]),
    "weights": (("weights",), lambda v: "0000c03f" + v[8:]),
    "weights nan": (("weights",), lambda v: "0000c07f" + v[8:]),
    "schema": (("schema",), "qualify.tie/v2"),
    "extra field": (("note",), "x"),
    "format": (("format",), "fp4"),
    "wrong type": (("row",), "5"),
    "boolean id": (("only_base", 0), True),
    "rounding": (("rounding", "score"), 3),
}


@pytest.mark.parametrize("name", list(TAMPERED))
def test_a_tampered_certificate_is_caught(planted, name):
    path, value = TAMPERED[name]
    cert = planted.make()
    if name == "extra field":
        cert = cert | {"note": "x"}
    else:
        cert = changed(cert, path, value)
    assert check_certificate(cert, planted.read)


def test_counts_that_only_a_whole_check_sees(planted):
    cert = changed(changed(planted.make(), ("above",), lambda v: v - 1), ("needed",), lambda v: v + 1)
    cert = changed(cert, ("equal",), lambda v: v + 3)
    assert check_certificate(cert, planted.read) == []
    assert "lie above the cutoff" in check_certificate(cert, planted.read, whole=True)[0]


def test_not_a_certificate():
    for thing in (None, [], {}, "x", {"schema": "qualify.tie/v1"}):
        assert check_certificate(thing, lambda i: b"")


def test_a_certificate_for_changed_records_fails(planted):
    cert = planted.make()
    planted.values[cert["members"][0]["id"], 3] ^= 0x80
    planted.values[cert["members"][0]["id"], 4] ^= 0x38
    assert check_certificate(cert, planted.read)
    assert check_certificate(planted.make(), lambda i: planted.read(i)[:-1])


def test_an_id_that_is_no_tie_cannot_be_certified(planted):
    below = int(np.setdiff1d(np.arange(200), np.concatenate([planted.cutoff.above, planted.cutoff.equal]))[0])
    wrong = Difference(planted.found.only_base[:1], (below,))
    cert = planted.make(found=wrong)
    kinds = {m["id"]: m["class"] for m in cert["members"]}
    assert kinds[below] == "other"
    faults = check_certificate(cert, planted.read)
    assert any("not a tie" in f for f in faults)
    assert check_certificate(changed(cert, ("members", 0, "class"), "exact_tie"), planted.read)


def test_a_rounded_tie_is_told_from_an_exact_one_and_from_a_claim():
    """Two scores that differ below fp32: with equal deployed bits the class is rounded_tie, with other bits it is nothing."""
    query = np.array([[0x38, 0], [0, 0x38]], np.uint8)
    weights = np.array([1, 2.0**-40], np.float32)
    values = np.array([[0x38, 0x38], [0x38, 0x40], [0x30, 0]], np.uint8)
    scales = np.ones(3, np.float32)
    row = TieRow(0, 0, 1, 3, "fp8", 2, 2, query.tobytes(), weights.tobytes())
    index = IndexRow.from_bytes(query, weights, "fp8")
    near = filtered_scores(index, decode_keys(values, "fp8"), scales)
    cutoff = exact_cutoff(near.value, near.error, 1, refiner(index, lambda ids: (values[ids], scales[ids])))
    assert cutoff.equal.tolist() == [1]
    bits = dict(enumerate(near.value.astype(np.float32).view(np.uint32).tolist()))
    assert bits[0] == bits[1]

    def read(id):
        return values[id].tobytes() + scales[id].tobytes()

    found = Difference((1,), (0,))
    cert = certificate(row, found, cutoff, read, model=PORTABLE_1, bits=bits)
    assert {m["id"]: m["class"] for m in cert["members"]} == {0: "rounded_tie", 1: "exact_tie"}
    assert check_certificate(cert, read, whole=True) == []
    assert check_certificate(cert, read, rounding={"dot": -53, "head": -53, "score": -24}) == []
    assert "rounding" in check_certificate(cert, read, rounding={"dot": -53, "head": -53, "score": -25})[0]
    for other in ({0: bits[0] + 1, 1: bits[1]}, {}, {2: 0, 0: bits[2], 1: bits[2]}):
        cert = certificate(row, found, cutoff, read, model=PORTABLE_1, bits=other)
        assert any("not a tie" in f for f in check_certificate(cert, read))


def test_fp32_certificates():
    rng = np.random.default_rng(4)
    query, weights = rng.standard_normal((2, 8), np.float32), np.abs(rng.standard_normal(2, np.float32))
    keys = rng.standard_normal((30, 8), np.float32)
    keys[7] = query[0]
    keys[20] = keys[7]
    row = TieRow(0, 0, 5, 30, "fp32", 2, 8, query.tobytes(), weights.tobytes())
    near = filtered_scores(row.index_row, keys.astype(np.float64), None)
    place = 1 + int(np.count_nonzero(near.value > near.value[7]))
    row = dataclasses.replace(row, topk=place)
    cutoff = exact_cutoff(near.value, near.error, place, refiner(row.index_row, lambda ids: (keys[ids].view(np.uint8), None)))
    assert cutoff.equal.tolist() == [7, 20]
    cert = certificate(row, Difference((7,), (20,)), cutoff, lambda i: keys[i].tobytes(), model=PORTABLE_1)
    assert check_certificate(cert, lambda i: keys[i].tobytes(), whole=True) == []


def test_tie_presence_counts_sides_and_shards():
    cutoff = Cutoff(3, Exact(1, 0), np.array([2]), np.array([4, 40, 90]), 0)
    seen = tie_presence(cutoff, alias_end=50, page=16, ranks=4)
    assert (seen.tied, seen.members, seen.sides, seen.shards) == (True, 3, 2, 3)
    whole = tie_presence(dataclasses.replace(cutoff, m=4), alias_end=50, page=16, ranks=4)
    assert not whole.tied
    assert presence_total([seen, whole]) == {"tie_rows": 1, "sides": 2, "shards": 3}
