"""The case table: every boundary is shown, every symbol resolves, closed-form counters agree with counting."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palimpsest.core.errors import BadConfig, UnknownName
from palimpsest.core.geometry import Formats
from palimpsest.prove.cases import (
    POISONS,
    Records,
    Replay,
    audited_rows,
    boundary_ids,
    cases,
    coverage,
    expected_checks,
    profile,
    rank_rows,
    records_of,
    refusals,
    zero_row,
)

TOPK = {"full": 2048, "wide": 2048, "small": 128}
FULL = {
    "C01": [(0, 4096)],
    "C02": [(524288, 4096)],
    "C03": [(1044480, 4096)],
    "C04": [(1044481, 4095)],
    "C05": [(131071, 2305)],
    "C06": [(2047, 1)],
    "C07": [(700001, 0)],
    "C08": [(262143, a) for a in (4096, 2049, 257, 256, 255, 1, 0)],
    "C09": [(1044480, 4096)],
    "C10": [(65537, 1000)],
    "C11": [(1044480, 4096)],
}
SMALL = {
    "C01": [(0, 256)],
    "C02": [(2048, 256)],
    "C03": [(3840, 256)],
    "C04": [(3841, 255)],
    "C05": [(511, 145)],
    "C06": [(127, 1)],
    "C07": [(2735, 0)],
    "C08": [(1023, a) for a in (256, 129, 17, 16, 15, 1, 0)],
    "C09": [(3840, 256)],
    "C10": [(257, 63)],
    "C11": [(3840, 256)],
}


def sizes(table):
    return {c.id: [(s.history, s.rows) for s in c.steps] for c in table}


@pytest.mark.parametrize(("name", "wanted"), [("full", FULL), ("small", SMALL)])
def test_symbols_resolve_to_the_specified_numbers(name, wanted):
    assert sizes(cases(profile(name), TOPK[name])) == wanted


@pytest.mark.parametrize(
    ("name", "changes", "holes"),
    [
        ("full", {}, set()),
        ("small", {}, set()),
        ("small", {"ranks": 4}, set()),
        # K >= R: no chunk crosses K from empty, so a row that sees one token and a chunk of K+1 rows cannot exist
        ("wide", {}, {"n=1", "a=K+1"}),
        # one or two ranks: no rank is left without rows, or the slice is the chunk
        ("small", {"ranks": 2}, set()),
        ("small", {"ranks": 1}, {"a=S+1", "rank with 0 rows"}),
    ],
)
def test_boundary_coverage_matrix(name, changes, holes):
    p, k = profile(name, **changes), TOPK[name]
    matrix = coverage(p, cases(p, k), k)
    missing = {label for label, ids in matrix.items() if not ids}
    assert missing <= holes, {label: matrix[label] for label in missing}
    assert len(matrix) == 23


def test_wide_profile_adapts_to_k_above_r():
    p = profile("wide")
    table = {c.id: c for c in cases(p, 2048)}
    step = table["C01"].steps[0]
    assert (step.history, step.rows) == (2048 - 32, 64)
    assert step.history + 1 < 2048 < step.visible, "the chunk crosses K"
    assert [s.rows for s in table["C08"].steps] == [64, 33, 17, 16, 15, 1, 0]


def test_boundary_ids_are_the_specified_records():
    p = profile("full")
    c03 = cases(p, 2048)[2]
    assert set(c03.planted) == {0, 1044479, 1044480, 1048575, 240297, 240298, 240299, 233015, 233016, 233017}
    assert 132 * p.tokens // 576 == 240298
    assert 132 * p.tokens % 576, "a record straddles the alias end"
    small = profile("small")
    assert {938, 910} <= set(cases(small, 128)[2].planted)
    assert boundary_ids(small, Records(), 0, 0) == ()
    # a latent record so small that the index history outgrows it: no boundary lies inside
    assert boundary_ids(small, Records(512, 512, 100), 3840, 256) == (0, 3839, 3840, 4095)


def test_records_follow_geometry_and_formats(make_geometry):
    g = make_geometry()
    assert records_of(g, Formats()) == Records(132, 128, 576)
    assert records_of(g, Formats(index="fp32", latent="fp8_ds_mla")) == Records(512, 512, 656)


@pytest.mark.parametrize("name", ["full", "wide", "small"])
def test_table_constraints(name):
    p, k = profile(name), TOPK[name]
    table = cases(p, k)
    assert [c.id for c in table] == [f"C{i:02d}" for i in range(1, 12)]
    assert [c.id for c in table if c.queue] == ["C09", "C10", "C11"]
    for case in table:
        for step in case.steps:
            assert step.history >= 0
            assert 0 <= step.rows <= p.rows
            assert step.visible <= p.tokens
            assert step.poison in POISONS
            assert (step.regime == "none") == (step.rows == 0)
    by = {c.id: c for c in table}
    assert by["C09"].steps[0].inputs == by["C11"].steps[0].inputs == by["C03"].steps[0].inputs
    assert {by[i].data for i in ("C03", "C09", "C10", "C11")} == {"C03"}
    assert by["C11"].equals == "C09"
    assert by["C10"].steps[0].restore
    assert [by[i].steps[0].poison for i in ("C09", "C10", "C11")] == ["Pn", "Ph", "Ps"]
    assert any(s.history % p.page for c in table for s in c.steps)
    assert by["C03"].minima.sides == 2
    assert by["C03"].minima.boundary == len(by["C03"].planted)
    assert all(c.minima.tie_rows for c in table if c.regime in ("lattice", "mixed"))
    assert by["C01"].regime == "mixed"
    assert sum(c.minima.pads for c in table) > 0


@given(st.sampled_from([1, 2, 4, 8, 16]), st.integers(1, 8), st.sampled_from([4, 16, 64]), st.integers(16, 400))
@settings(max_examples=60, deadline=None)
def test_every_legal_profile_resolves(ranks, factor, page, topk):
    rows = ranks * factor * 4
    tokens = -(-max(rows * 4, topk * 4) // (16 * page)) * 16 * page
    p = profile("small", ranks=ranks, rows=rows, page=page, tokens=tokens)
    for case in cases(p, topk):
        counts = [s.rows for s in case.steps]
        assert counts == sorted(counts, reverse=True)
        for step in case.steps:
            assert 0 <= step.history <= step.visible <= tokens
            assert step.rows <= rows
            assert all(0 <= i < tokens for i in case.planted)


@pytest.mark.parametrize(
    ("changes", "topk", "text"),
    [
        ({"rows": 250}, 128, "250 rows do not divide over 16 ranks"),
        ({"rows": 2048}, 128, "2048 rows exceed a quarter of 4096 tokens"),
        ({"tokens": 4100}, 128, "4100 tokens are not a multiple of 16 pages"),
        ({}, 2000, "top-k 2000 must lie in 16..1024"),
        ({"page": 2}, 128, "page of 2 tokens"),
    ],
)
def test_profiles_that_lose_boundaries_are_refused(changes, topk, text):
    with pytest.raises(BadConfig, match=text):
        cases(profile("small", **changes), topk)
    with pytest.raises(UnknownName, match="medium"):
        profile("medium")


def test_refusals_name_impossible_requests():
    p = profile("small")
    asked = refusals(p, 128)
    assert asked["one token too many"]["history"] + asked["one token too many"]["rows"] == p.tokens + 1
    assert len(asked) == 6


def test_rank_rows_of_the_partial_case():
    p = profile("full")
    assert rank_rows(p, 2305) == (256,) * 9 + (1,) + (0,) * 6


@pytest.mark.parametrize("name", ["small", "wide"])
def test_audited_rows_hold_ends_and_seeded_rows(name):
    p = profile(name)
    for case in cases(p, TOPK[name]):
        for step in case.steps:
            rows = audited_rows(p, step, 7)
            assert rows == audited_rows(p, step, 7)
            picked = {row for row, _ in rows}
            assert all(rank == row // p.slice_rows and row < step.rows for row, rank in rows)
            if not step.rows:
                assert not rows
                continue
            assert {0, step.rows - 1} <= picked
            for rank, count in enumerate(rank_rows(p, step.rows)):
                first = rank * p.slice_rows
                assert not count or {first, first + count - 1} <= picked
                assert len([r for r, owner in rows if owner == rank]) <= 4
    big = cases(profile("full"), 2048)[1].steps[0]
    assert audited_rows(profile("full"), big, 1) != audited_rows(profile("full"), big, 2)


@given(
    ranks=st.sampled_from([1, 2, 4, 16]),
    per_rank=st.integers(1, 5),
    history=st.integers(0, 200),
    rows=st.integers(0, 80),
    topk=st.integers(2, 60),
    page=st.sampled_from([4, 16]),
)
@settings(max_examples=80, deadline=None)
def test_expected_checks_equal_counting(ranks, per_rank, history, rows, topk, page):
    p = dataclasses.replace(profile("small", page=page), ranks=ranks, rows=ranks * per_rank)
    rows = min(rows, p.rows)
    replay = Replay(history, rows, "none", "x", "natural")
    counted = [min(topk, history + r + 1) if r < rows else 0 for r in range(p.rows)]
    for rank in range(ranks):
        slice_ = range(rank * per_rank, min((rank + 1) * per_rank, rows))
        owned = [t for t in range(history + rows) if t // page % ranks == rank]
        assert expected_checks(p, topk, replay, rank) == {
            "rows": rows,
            "pad_rows": p.rows - rows,
            "slice_rows": len(slice_),
            "selected": sum(counted),
            "pads": p.rows * topk - sum(counted),
            "slice_selected": sum(counted[r] for r in slice_),
            "visible": sum(history + r + 1 for r in slice_),
            "history": history + rows,
            "shard": len(owned),
            "appended": sum(t >= history for t in owned),
        }


def test_declared_pads_equal_counting():
    p = profile("small")
    for case in cases(p, 128):
        counted = sum(p.rows * 128 - sum(min(128, s.history + r + 1) for r in range(s.rows)) for s in case.steps)
        assert case.minima.pads == counted
        assert counted == sum(expected_checks(p, 128, s, 0)["pads"] for s in case.steps)


def test_zero_row_is_a_row():
    for rows in range(1, 50):
        assert 0 <= zero_row(rows) < rows
