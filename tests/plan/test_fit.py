"""Inverse planning: the inverse of a plan is the plan, what binds, what one more GiB buys, and sets that cannot fit."""

import itertools

import pytest
from plan_cases import K31, buffer, program, step

from palimpsest.core.errors import BadConfig, Unsupported
from palimpsest.core.geometry import Formats
from palimpsest.core.spec import Limits
from palimpsest.core.units import align_up
from palimpsest.plan.fit import GIB, Budget, cannot_fit, fewest_ranks, fits, largest_context, largest_rows, refuse
from palimpsest.plan.maximum import shapes
from palimpsest.plan.place import place
from palimpsest.recipes.blocks import layer_program

MIB = 1 << 20


def k31(limits):
    return layer_program(K31, limits, Formats(), 3)


def needs(build, limits, granularity=1):
    return Budget(1 << 50, 0, granularity).mapped({s.kind: s.nbytes for s in place(build(limits)).segments})


@pytest.mark.parametrize("tokens", [2048, 65_536 + 64, 262_144, 999_936, 1 << 20, (1 << 20) + 64, 1 << 22])
@pytest.mark.parametrize(("rows", "ranks"), [(256, 1), (1024, 16)])
def test_the_inverse_of_a_plan_is_the_plan(tokens, rows, ranks):
    """With exactly the plan's bytes the answer is its context, or a longer one that takes not one byte more."""
    budget = Budget(needs(k31, Limits(tokens, rows, ranks)), 0, 1)
    found = largest_context(k31, budget, rows=rows, ranks=ranks, least=2048)
    assert found.fits
    assert found.mapped == budget.memory
    if needs(k31, Limits(tokens + 64, rows, ranks)) > budget.memory:
        assert found.limits.tokens == tokens
    assert tokens < 65_536 or found.limits.tokens == tokens
    one_less = largest_context(k31, Budget(budget.memory - 1, 0, 1), rows=rows, ranks=ranks, least=2048)
    assert one_less.limits.tokens < tokens or not one_less.fits


def test_every_page_of_a_sweep_where_histories_bind():
    for tokens in range(1 << 19, (1 << 19) + 64 * 40, 64):
        budget = Budget(needs(k31, Limits(tokens, 256, 4)), 0, 1)
        assert largest_context(k31, budget, rows=256, ranks=4, least=2048).limits.tokens == tokens


def test_the_inverse_agrees_with_trying_every_shape():
    """Small limits, coarse granules, flat stretches: the search finds what looking at everything finds."""

    def build(limits):
        return program(
            [
                buffer("cache", limits.rank_pages * limits.page * 3, kind="persistent"),
                buffer("hist", limits.tokens * 5),
                buffer("q", limits.rows * 40),
            ],
            [step("s0", writes="q", reads="cache"), step("s1", writes="hist"), step("s2", reads="hist q")],
            limits=limits,
        )  # fmt: skip

    tried = {shape: needs(build, shape, 512) for shape in shapes(Limits(640, 20, 2, 32)) if shape.rows in (4, 20)}
    for memory, rows in itertools.product(range(512, 6000, 511), (4, 20)):
        allowed = [s.tokens for s, n in tried.items() if s.rows == rows and n <= memory]
        found = largest_context(build, Budget(memory, 0, 512), rows=rows, ranks=2, page=32)
        if found.fits and found.limits.tokens <= 640:
            assert found.limits.tokens == max(allowed)
        elif not found.fits:
            assert not allowed


def test_rows_and_ranks_are_inverses_too():
    for rows in (1, 100, 4096, 5000):
        budget = Budget(needs(k31, Limits(1 << 20, rows, 16)), 0, 1)
        found = largest_rows(k31, budget, tokens=1 << 20, ranks=16)
        assert found.limits.rows >= rows
        assert found.mapped == budget.memory
        assert needs(k31, Limits(1 << 20, found.limits.rows + 1, 16)) > budget.memory
    enough = {n: needs(k31, Limits(1 << 20, 4096, n)) for n in (1, 2, 4, 8, 16)}
    for ranks, memory in enough.items():
        assert fewest_ranks(k31, Budget(memory, 0, 1), tokens=1 << 20, rows=4096).limits.ranks == ranks


def test_the_answer_says_what_binds_and_what_the_next_gib_buys():
    found = largest_context(k31, Budget(2 * GIB), rows=4096, ranks=16, least=2048)
    assert found.limits.tokens == 3_039_552
    assert found.binding == "latent_history"
    assert [(g.role, g.each) for g in found.grows] == [("latent_history", "576"), ("latent_cache", "36"), ("index_cache", "33/4")]
    more = largest_context(k31, Budget(3 * GIB), rows=4096, ranks=16, least=2048)
    assert found.next_gib == more.limits.tokens
    assert found.spare >= 0
    assert found.peak_step == "sparse_attend"
    assert found.notes == ()
    wide = largest_rows(k31, Budget(2 * GIB), tokens=1 << 20, ranks=16)
    assert wide.binding == "hidden"
    assert wide.next_gib > wide.limits.rows


def test_a_reserve_is_not_planned_with():
    all_of_it = largest_context(k31, Budget(2 * GIB), rows=256, ranks=1, least=2048)
    rest = largest_context(k31, Budget(3 * GIB, GIB), rows=256, ranks=1, least=2048)
    assert rest.limits == all_of_it.limits
    with pytest.raises(BadConfig, match="leave something"):
        Budget(GIB, GIB)
    with pytest.raises(BadConfig, match="power of two"):
        Budget(GIB, 0, 3000)


def test_what_cannot_fit_is_the_smallest_set_and_irreducible():
    found = fewest_ranks(k31, Budget(512 * MIB), tokens=1 << 20, rows=4096)
    assert not found.fits
    assert found.cannot == (("latent_history", 576 * MIB),)
    assert "latent_history" in str(refuse(found, "K3.1"))
    made = k31(Limits(1 << 20, 4096, 16))
    usable = 700 * MIB
    chosen = cannot_fit(made, usable)
    assert sum(n for _, n in chosen) > usable
    for name, nbytes in chosen:
        assert sum(n for other, n in chosen if other != name) <= usable, nbytes
    assert sum(n for _, n in chosen[:-1]) <= usable
    assert cannot_fit(made, 1 << 40) == ()


def test_a_single_question_is_answered_like_a_search():
    limits = Limits(1 << 20, 4096, 16)
    assert fits(k31, Budget(GIB), limits).fits
    refused = fits(k31, Budget(600 * MIB), limits)
    assert not refused.fits
    assert refused.spare < 0
    assert refused.cannot


def test_rank_counts_the_model_does_not_allow_are_skipped():
    assert fewest_ranks(k31, Budget(64 * GIB), tokens=4096, rows=16, choices=(3, 5, 8)).limits.ranks == 8
    with pytest.raises(Unsupported, match="power of two"):
        fewest_ranks(k31, Budget(64 * GIB), tokens=4096, rows=16, choices=(3, 5))


def test_sizes_that_shrink_are_said():
    def build(limits):
        padded = align_up(limits.rows, 16) * (2 if limits.rows < 64 else 1)
        return program([buffer("tiles", 64 * padded)], [step("s0", writes="tiles")], limits=limits)

    notes = [note for rows in range(17, 120) for note in largest_rows(build, Budget(64 * rows, 0, 1), tokens=4096, ranks=1).notes]
    assert any("sizes are not monotone" in note and "tiles shrinks from" in note for note in notes)
