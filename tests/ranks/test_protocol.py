"""One protocol, two transports: the same behaviours in-process and in real processes."""

import pytest

from palimpsest.core.errors import RankError


@pytest.mark.parametrize("size", [1, 4])
def test_legal_traffic_arrives(ranks, size: int) -> None:
    events = []
    values = ranks(size, "everything_legal", on_event=lambda rank, event: events.append((rank, event)), deadline_s=30)
    assert [value["wrong"] for value in values] == [[]] * size
    assert sorted(rank for rank, _ in events) == list(range(size))
    assert all(event == {"rank": rank, "done": True} for rank, event in events)


def test_nobody_leaves_a_barrier_before_everybody_came(ranks) -> None:
    values = ranks(3, "barrier_holds", {"sleep": 0.2})
    assert max(value["before"] for value in values) <= min(value["after"] for value in values)


def test_different_labels_are_named(ranks) -> None:
    with pytest.raises(RankError) as caught:
        ranks(3, "wrong_label", deadline_s=20)
    assert (caught.value.rank, caught.value.phase) == (1, "p5")
    assert "rank 0 sends exchange 'ids' of 1 message, 8 bytes, but rank 1 expects exchange 'keys'" in str(caught.value)


@pytest.mark.parametrize(("sent", "expected"), [(64, 16), (16, 64)])
def test_different_sizes_are_named(ranks, sent: int, expected: int) -> None:
    with pytest.raises(RankError) as caught:
        ranks(2, "wrong_size", {"sent": sent, "expected": expected}, deadline_s=20)
    assert (caught.value.rank, caught.value.phase) == (1, "p5")
    assert f"message, {sent} bytes, but rank 1 expects exchange 'ids' of 1 message, {expected} bytes" in str(caught.value)


def test_different_calls_are_named(ranks) -> None:
    with pytest.raises(RankError, match=r"barrier 'first'.*agree 'second'|agree 'second'.*barrier 'first'") as caught:
        ranks(2, "wrong_call", deadline_s=20)
    assert (caught.value.rank, caught.value.phase) == (1, "p5")


def test_the_first_rank_that_differs_from_rank_0_is_named(ranks) -> None:
    with pytest.raises(RankError) as caught:
        ranks(4, "disagree", {"texts": ["abc", "abc", "abd", "xyz"]}, deadline_s=20)
    assert (caught.value.rank, caught.value.phase) == (2, "case 1")
    assert "disagrees with rank 0 on 'plan digest': it has 'abd', rank 0 has 'abc'" in str(caught.value)


def test_texts_that_differ_only_at_the_end_differ(ranks) -> None:
    with pytest.raises(RankError, match="rank 1 in case 1: disagrees"):
        ranks(2, "disagree", {"texts": ["x" * 5000 + "a", "x" * 5000 + "b"]}, deadline_s=20)


def test_an_exception_names_its_rank_and_phase(ranks) -> None:
    with pytest.raises(RankError, match="rank 1 in p6: ValueError: no such page"):
        ranks(3, "fail", {"rank": 1, "how": "raise"}, deadline_s=20)


def test_calls_allocate_no_tensor(ranks) -> None:
    """Only views, copies between views, and the transport's own send and receive."""
    for names in ranks(2, "watched", deadline_s=20):
        assert set(names) <= {"aten.view.default", "aten.view.dtype", "aten.copy_.default", "aten.detach.default"} | {
            "c10d.send.default",
            "c10d.recv_.default",
        }
