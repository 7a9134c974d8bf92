"""Counts of different things do not mix, sizes parse and print exactly, and Limits takes no rows for tokens."""

import json
import operator

import pytest

from palimpsest.core.canon import canonical
from palimpsest.core.errors import BadConfig
from palimpsest.core.spec import Limits
from palimpsest.core.units import Pages, Pools, Ranks, Rows, Tokens

KINDS = (Tokens, Pages, Pools, Rows, Ranks)


@pytest.mark.parametrize("one", KINDS)
@pytest.mark.parametrize("two", KINDS)
@pytest.mark.parametrize("op", [operator.add, operator.sub, operator.lt, operator.le, operator.gt, operator.ge, operator.eq])
def test_counts_of_different_things_do_not_mix(one, two, op):
    if one is two:
        op(one(3), two(3))
        return
    with pytest.raises(TypeError, match="count different things"):
        op(one(3), two(3))


def test_a_count_keeps_its_unit_and_mixes_with_plain_numbers():
    assert type(Tokens(3) + 1) is Tokens
    assert type(1 + Tokens(3)) is Tokens
    assert type(8 - Tokens(3)) is Tokens
    assert Tokens(3) + 1 == 4 == Tokens(5) - Tokens(1)
    assert sum([Rows(1), Rows(2)]) == 3
    assert {Tokens(3): 1}[3] == 1
    assert repr(Pages(7)) == "Pages(7)"
    assert f"{Tokens(1024):,} {Tokens(3)}" == "1,024 3"
    assert json.loads(canonical({"n": Tokens(3)})) == {"n": 3}


def test_conversions_say_by_what():
    assert Tokens(65).pages(64) == 2
    assert type(Tokens(65).pages(64)) is Pages
    assert Pages(2).tokens(64) == 128
    assert Tokens(9).pools(4).tokens(4) == 12
    assert type(Pools(3).tokens(4)) is Tokens


def test_limits_take_the_right_counts_and_hold_plain_numbers():
    limits = Limits(Tokens(128), Rows(16), Ranks(2), Tokens(64))
    assert limits == Limits(128, 16, 2)
    assert all(type(n) is int for n in (limits.tokens, limits.rows, limits.ranks, limits.page))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ((Rows(128), 16, 2), "tokens = Rows(128) counts rows; tokens are wanted"),
        ((128, Tokens(16), 2), "rows = Tokens(16) counts tokens; rows are wanted"),
        ((Pages(128), 16, 2), "counts pages"),
        ((128, 16, Pools(2)), "counts pools"),
        ((128, 16, 2, Pages(64)), "page = Pages(64) counts pages; tokens are wanted"),
        ((128.0, 16, 2), "must be a positive whole number"),
        ((128, True, 2), "must be a positive whole number"),
        ((128, 0, 2), "rows = 0"),
    ],
)
def test_limits_refuse_the_wrong_thing(values, words):
    with pytest.raises(BadConfig) as caught:
        Limits(*values)
    assert words in str(caught.value)
