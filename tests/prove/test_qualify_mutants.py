"""Each gate fails on a run that deserves it, and only then: mutants of single steps on in-process ranks."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

sys.path.insert(0, str(Path(__file__).parent))
from harness import Mutant, failing, job, qualify_locally, verdicts

from palimpsest.core.errors import RankError
from palimpsest.kernels.call import Call, Chunk, Implementation

Change = Callable[[Call, Chunk], object]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("qualify")


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def after(op: str, change: Change, name: str | None = None, only: str = "") -> Mutant:
    """Runs the step, then ``change(call, chunk)`` when it is ``op`` (and step ``name``) in arrangement ``only``.

    The warm replay and the recorded tail (whose calls have no planned bytes) are left alone.
    """

    def mutant(arrangement: str, which: str, run: Implementation, call: Call, chunk: Chunk) -> None:
        run(call, chunk)
        if which == op and (name is None or call.name == name) and only in ("", arrangement) and call.raws and live(chunk):
            with _disable_current_modes():  # the allocation guard has a test of its own
                change(call, chunk)

    return mutant


def live(chunk: Chunk) -> bool:
    """Neither empty nor the warm replay, whose rows are zero."""
    return chunk.rows > 0 and (chunk.hidden is None or bool(bits(chunk.hidden).numpy().any()))


def flip(tensor: torch.Tensor, at: int = 0) -> None:
    flat = bits(tensor)
    flat[at : at + 1].bitwise_xor_(1)


def shift_scales(call: Call, chunk: Chunk) -> None:
    """The scale plane read one record off."""
    scales = call.view("history", "scales").numpy()
    scales[: chunk.visible - 1] = scales[1 : chunk.visible].copy()


def write_past_visible(call: Call, chunk: Chunk) -> None:
    flip(call.view("history", "keys"), chunk.visible * call.view("history", "keys").shape[1])


def wrong_id(call: Call, chunk: Chunk) -> None:
    """The first row takes the lowest id it did not select, and loses one it did."""
    ids, count = call.view("local_ids")[0], int(call.view("local_counts", "counts")[0])
    taken = set(ids[:count].tolist())
    free = next(i for i in range(chunk.history) if i not in taken)
    ids[:count].copy_(torch.tensor(sorted(taken - {max(taken)} | {free}), dtype=torch.int32))


def duplicate_id(call: Call, chunk: Chunk) -> None:
    call.view("local_ids")[0, 1:2].copy_(call.view("local_ids")[0, 0:1])


def stale_ids(call: Call, chunk: Chunk) -> None:
    """Another rank's slice is left from the previous replay: here, its rows hold the first row's ids."""
    half = call.view("ids").shape[0] // 2
    other = slice(half, chunk.rows) if call.comm.rank == 0 else slice(0, half)
    call.view("ids")[other].copy_(call.view("ids")[0 if call.comm.rank else half].clone().expand_as(call.view("ids")[other]))


def unpadded(call: Call, chunk: Chunk) -> None:
    call.view("ids")[chunk.rows :].fill_(0)


def turn_ids(call: Call, chunk: Chunk) -> None:
    """The same sets, emitted the other way round, just before the exchange."""
    ids, counts = call.view("local_ids"), call.view("local_counts", "counts")
    for row in range(min(len(ids), chunk.rows)):
        count = int(counts[row])
        ids[row, :count].copy_(ids[row, :count].flip(0))


def select_wrongly(arrangement: str, op: str, run: Implementation, call: Call, chunk: Chunk) -> None:
    """The selector itself picks a wrong id: it is there when the selection is judged."""
    if op == "index_select" and live(chunk):
        watch = call.tap

        def tap(event: str, **data: object) -> None:
            if event == "selected":
                wrong_id(call, chunk)
            watch(event, **data)

        call.tap = tap
    run(call, chunk)


def select_wrongly_in_alias(arrangement: str, op: str, run: Implementation, call: Call, chunk: Chunk) -> None:
    select_wrongly(arrangement, op if arrangement == "alias" else "", run, call, chunk)


def drop_last_records(call: Call, chunk: Chunk) -> None:
    """The producer skips the last ragged tile."""
    call.view("history", "keys")[chunk.visible - 5 : chunk.visible].view(torch.uint8).fill_(0)


CASES = [
    ("scales one record off", "C02", after("gather_history", shift_scales, "gather_index"), {"X4", "K3"}),
    ("index written past the visible tokens", "C02", after("gather_history", write_past_visible, "gather_index"), {"S6", "V2"}),
    (
        "a bit of the gathered latents",
        "C02",
        after("gather_history", lambda c, k: flip(c.view("history")), "gather_latent"),
        {"X4"},
    ),
    (
        "a bit of the persistent cache",
        "C02",
        after("gather_history", lambda c, k: flip(c.view("cache")), "gather_latent"),
        {"S5"},
    ),
    (
        "a bit of the persistent cache, alias only",
        "C02",
        after("gather_history", lambda c, k: flip(c.view("cache")), "gather_latent", "alias"),
        {"X1"},
    ),
    ("a wrong id", "C02", after("index_select", wrong_id), {"K2"}),
    ("a wrong id, alias only", "C02", after("index_select", wrong_id, only="alias"), {"K2", "O1"}),
    ("the selector picks a wrong id", "C02", "select_wrongly", {"K2", "K3"}),
    ("the selector picks a wrong id, alias only", "C02", "select_wrongly_in_alias", {"K2", "K4"}),
    ("the last ragged tile of the index", "C04", after("gather_history", drop_last_records, "gather_index"), {"X4"}),
    ("a duplicate id", "C02", after("index_select", duplicate_id), {"K1", "K2"}),
    ("stale ids of the other rank", "C02", after("exchange_ids", stale_ids), {"X5"}),
    ("rows past the chunk not padded", "C05", after("exchange_ids", unpadded), {"K1"}),
    ("ids in another order", "C02", after("index_select", turn_ids), {"K1"}),
    (
        "head weights doubled, alias only",
        "C02",
        after("index_query", lambda c, k: c.view("head_weights").mul_(2), only="alias"),
        {"X3", "K2"},
    ),
    (
        "an index query bit, alias only",
        "C02",
        after("index_query", lambda c, k: flip(c.view("index_query")), only="alias"),
        {"X2"},
    ),
    (
        "an attention query bit, alias only",
        "C02",
        after("attention_query", lambda c, k: flip(c.view("query")), only="alias"),
        {"X2"},
    ),
    ("a weight changed", "C02", after("query_latent", lambda c, k: flip(c.view("q_a"))), {"X6"}),
    ("the caller's rows changed", "C02", after("bind_inputs", lambda c, k: flip(k.hidden)), {"X6"}),
    ("a context bit", "C02", after("sparse_attend", lambda c, k: flip(c.view("context")), only="alias"), {"O1"}),
    ("an output bit", "C02", after("reduce_output", lambda c, k: flip(c.view("output")), only="alias"), {"O1"}),
    ("output rows past the chunk", "C05", after("reduce_output", lambda c, k: c.view("output")[k.rows :].fill_(0)), {"O1"}),
    ("output not finite", "C02", after("reduce_output", lambda c, k: c.view("output")[0].fill_(torch.nan)), {"O6"}),
    ("the output left as it was", "C06", after("reduce_output", lambda c, k: c.view("output")[0].fill_(torch.nan)), {"O6"}),
]


@pytest.mark.parametrize(("case", "mutant", "gates"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_a_mutant_is_caught_by_its_gates(place: Path, case: str, mutant: Mutant | str, gates: set[str]) -> None:
    if isinstance(mutant, str):
        mutant = unguarded({"select_wrongly": select_wrongly, "select_wrongly_in_alias": select_wrongly_in_alias}[mutant])
    assert gates <= failing(qualify_locally(job(place, case), mutant))


def scaled_attention(arrangement: str, op: str, run: Implementation, call: Call, chunk: Chunk) -> None:
    """Every run of the op, the recorded tail's too, reads the next head's query: only an independent gate can tell."""
    if op == "sparse_attend" and live(chunk):
        query = call.view("query")
        turned = query.roll(1, dims=1)
        call = Call(call.name, call.params, {**call.views, "query": {"query": turned}}, call.raws, call.scratch, call.comm)
    run(call, chunk)


def test_a_fault_of_attention_itself_is_caught_by_the_oracle(place: Path) -> None:
    made = job(place, "C02")
    found = verdicts(qualify_locally(made, unguarded(scaled_attention)))
    assert found["O2"] == "FAIL"
    assert found["O1"] == "PASS"


def unguarded(mutant: Mutant) -> Mutant:
    """Lets a mutant allocate, so that it is judged by another gate than the allocation guard."""

    def wrapped(arrangement: str, op: str, run: Implementation, call: Call, chunk: Chunk) -> None:
        with _disable_current_modes():
            mutant(arrangement, op, run, call, chunk)

    return wrapped


def test_attention_that_ignores_the_order_makes_the_order_check_inconclusive(place: Path) -> None:
    def zeros(arrangement: str, op: str, run: Implementation, call: Call, chunk: Chunk) -> None:
        if op == "sparse_attend":
            call.view("context")[: chunk.rows].zero_()
        else:
            run(call, chunk)

    found = verdicts(qualify_locally(job(place, "C02"), zeros))
    assert found["O1s"] == "INCONCLUSIVE"
    assert found["O2"] == "FAIL"


def test_a_tail_that_differs_between_two_runs_is_inconclusive(place: Path) -> None:
    turns: Iterator[int] = iter(range(10**9))

    def drifting(arrangement: str, op: str, run: Implementation, call: Call, chunk: Chunk) -> None:
        run(call, chunk)
        if op == "sparse_attend" and chunk.rows:
            call.view("context")[0, 0, :1].fill_(float(next(turns)))

    assert verdicts(qualify_locally(job(place, "C02"), drifting))["O0"] == "INCONCLUSIVE"


def test_a_lattice_score_off_by_one_weight_fails_the_lattice_gate(place: Path) -> None:
    """Weights change after the queries were planted and captured: the ranked scores are exact for other weights."""

    def mutant(arrangement: str, op: str, run: Implementation, call: Call, chunk: Chunk) -> None:
        if op == "index_select" and live(chunk):
            call.view("head_weights")[:, :1].add_(1)
        run(call, chunk)

    found = verdicts(qualify_locally(job(place, "C03"), mutant))
    assert found["K5"] == "FAIL"
    assert found["K3"] == "FAIL"


def test_other_members_of_a_tie_are_certified(place: Path) -> None:
    """The alias arrangement takes another member of a planted tie class: K4 proves the tie, and the changed output is seen."""

    def other_tie(call: Call, chunk: Chunk) -> None:
        ids, count = call.view("local_ids")[2], int(call.view("local_counts", "counts")[2])
        scores, chosen = other_tie.scores, ids[:count].tolist()  # type: ignore[attr-defined]
        low = min(scores[i] for i in chosen)
        out = max(i for i in chosen if scores[i] == low)
        into = next(i for i in range(len(scores) - 1, -1, -1) if scores[i] == low and i not in chosen)
        ids[:count].copy_(torch.tensor(sorted(set(chosen) - {out} | {into}), dtype=torch.int32))

    def mutant(arrangement: str, op: str, run: Implementation, call: Call, chunk: Chunk) -> None:
        if op != "index_select" or arrangement != "alias" or call.comm.rank or not live(chunk):
            run(call, chunk)
            return
        watch, kept = call.tap, {}

        def tap(event: str, **data: object) -> None:
            if event == "scores" and data["row"] == 2:
                kept[data["start"]] = data["scores"].tolist()  # type: ignore[attr-defined]
            if event == "selected":
                other_tie.scores = [s for start in sorted(kept) for s in kept[start]]  # type: ignore[attr-defined]
                other_tie(call, chunk)
            watch(event, **data)

        call.tap = tap
        run(call, chunk)

    results = qualify_locally(job(place, "C03"), unguarded(mutant))
    found = verdicts(results)
    certificates = [c for r in results for c in r["certificates"]]
    assert found["K4"] == "PASS"
    assert found["O1"] == "FAIL"
    assert len(certificates) == 1
    assert {m["class"] for m in certificates[0]["certificate"]["members"]} == {"exact_tie"}


def test_a_hidden_allocation_ends_the_run_with_rank_and_phase(place: Path) -> None:
    def mutant(arrangement: str, op: str, run: Implementation, call: Call, chunk: Chunk) -> None:
        run(call, chunk)
        if op == "project_output" and live(chunk):
            call.view("partial").copy_(call.view("partial") + 0)

    with pytest.raises(RankError, match=r"HiddenAllocation|outside the plan") as caught:
        qualify_locally(job(place, "C02"), mutant)
    assert caught.value.phase == "p8"


def test_a_rank_that_raises_is_named(place: Path) -> None:
    def mutant(arrangement: str, op: str, run: Implementation, call: Call, chunk: Chunk) -> None:
        if op == "index_select" and call.comm.rank == 1 and live(chunk):
            raise ValueError("planted")
        run(call, chunk)

    with pytest.raises(RankError, match="rank 1 in p3: ValueError: planted"):
        qualify_locally(job(place, "C02"), mutant)


def test_no_mutant_no_failure(place: Path) -> None:
    results = qualify_locally(job(place))
    assert failing(results) == set()
    assert all(f["n_checked"] == f["n_expected"] > 0 for r in results for f in r["flags"])
