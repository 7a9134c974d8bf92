"""Field cases A3: bytes reused too early, stale or never written, and replays that read what another one left."""

import dataclasses
import itertools

import pytest
import torch

from palimpsest.core.errors import PlanRefused, RankError, UserError
from palimpsest.core.spec import Program
from palimpsest.plan.check import check
from palimpsest.plan.place import place
from palimpsest.ranks.local import run_local
from palimpsest.recipes.rope import tables
from palimpsest.run.execute import prepare
from palimpsest.run.guards import SlackCanaries, WriteWatcher
from palimpsest.run.poison import PATTERNS, poison
from palimpsest.run.weights import synthetic

#: what the bytes between two replays are overwritten with, beside the patterns of ``run/poison.py``
WORDS = {"quiet NaN": 0x7FC00000, "infinity": 0x7F800000, "bytes 7F": 0x7F7F7F7F, "minus one": -1, "alternating": 0x55AA55AA}


def fill_words(session, word: int) -> None:
    for kind in ("reusable", "staging"):
        whole = session.arena.segment(kind)
        whole[: whole.numel() // 4 * 4].view(torch.int32).fill_(word)


def on_queue(made: Program, name: str, *, after: tuple[str, ...] = ()) -> Program:
    """The same order of steps with ``name`` on a second queue, waiting for ``after``; the next step waits for it."""
    steps, seen = [], False
    for step in made.steps:
        if step.name == name:
            step, seen = dataclasses.replace(step, queue="copy", after=after), True
        elif seen:
            step, seen = dataclasses.replace(step, after=(*step.after, name)), False
        steps.append(step)
    return made.with_steps(tuple(steps))


@pytest.mark.parametrize("ranks", [1, 2])
def test_3_01_an_overlap_needs_an_order_in_every_schedule(m0, ranks: int) -> None:
    """The latent gather on a queue of its own: with an event behind the barrier the histories may share, without one never."""
    made = m0.program(ranks=ranks)
    plan = place(made)
    assert plan.by_name["index_history"].offset == plan.by_name["latent_history"].offset
    loose = on_queue(made, "gather_latent", after=("append_latent", "gather_index"))
    with pytest.raises(PlanRefused, match="index_history"):
        check(loose, dataclasses.replace(plan, program_digest=loose.digest))
    own = place(loose)
    check(loose, own)
    one, two = own.by_name["index_history"], own.by_name["latent_history"]
    assert one.stop <= two.offset or two.stop <= one.offset
    tied = on_queue(made, "gather_latent", after=("selection_barrier", "append_latent"))
    shared = place(tied)
    check(tied, shared)
    assert shared.by_name["index_history"].offset == shared.by_name["latent_history"].offset


def test_3_01_two_interleaved_requests_keep_their_own_bytes(m0) -> None:
    """Two sequences served alternately by two sessions of one process, under several schedules of the ranks: as if alone."""
    made = m0.program(ranks=2)
    plan, rows = place(made), {seed: m0.hidden(seed=seed) for seed in (9, 10)}
    alone = {seed: m0.outcome(data=rows[seed], ranks=2) for seed in rows}

    def main(comm):
        with (
            prepare(made, plan, comm=comm, fill=synthetic(1, tables(m0.geometry()))) as one,
            prepare(made, plan, comm=comm, fill=synthetic(1, tables(m0.geometry()))) as two,
        ):
            parts = {9: [], 10: []}
            for at in range(0, 64, 16):
                for seed, session in ((9, one), (10, two)):
                    parts[seed].append(session.prefill(rows[seed][at : at + 16], at, copy=True))
            return {seed: torch.cat(found) for seed, found in parts.items()}

    for schedule in range(3):
        for found in run_local(2, main, seed=schedule):
            assert all(m0.same(found[seed], alone[seed].output) for seed in rows)


@pytest.mark.parametrize("last", ["index", "latent"])
def test_3_02_a_write_that_is_dropped_shows(m0, last: str) -> None:
    """A gather that skips the last four tokens, as a guard would: poison shows it, whatever the pattern is."""

    def short(run, call, chunk):
        if call.name == f"gather_{last}" and chunk.rows == 15:
            chunk = dataclasses.replace(chunk, rows=chunk.rows - 4)
        run(call, chunk)

    def main(session):
        found = []
        for pattern in ("Pn", "Ph", "Pa"):
            m0.prefill(session, (16,))
            poison(session.arena, pattern, visible=31, seed=1)
            found.append(session.prefill(m0.hidden()[16:31], 16, copy=True))
        return found

    right = m0.outcome((16, 15)).output[16:]
    (found,) = m0.run(main, more=m0.altered(m0.program(), "gather_history", short), reuse="off")
    assert not any(m0.same(output, right) for output in found)


def test_3_04_every_active_row_is_written_whole(m0) -> None:
    """Rows with fewer visible tokens than top-k, in poisoned memory: ids are padded with -1 and the count is right."""

    def main(session):
        fill_words(session, 0x7F7F7F7F)
        seen = []
        look = {"exchange_ids": lambda step, call, chunk: seen.extend((call.view("ids").clone(), call.view("counts").clone()))}
        session.prefill(m0.hidden(11), 0, hooks=m0.Watch(after=look))
        return seen

    for ids, counts in m0.run(main, ranks=2):
        assert counts.tolist() == [min(8, row + 1) for row in range(11)] + [0] * 5
        for row in range(16):
            kept = int(counts[row])
            assert ids[row, kept:].eq(-1).all()
            assert kept == 0 or ids[row, :kept].tolist() == sorted(set(ids[row, :kept].tolist()))
            assert ((ids[row, :kept] >= 0) & (ids[row, :kept] <= row)).all()


def test_3_05_outputs_have_planned_places_that_never_move(m0) -> None:
    def main(session):
        seen = set()
        look = {"sparse_attend": lambda step, call, chunk: seen.add(call.view("ids").data_ptr())}
        shapes = ((0, 16), (16, 3), (48, 16), (0, 1))
        places = {session.prefill(m0.hidden(rows), at, hooks=m0.Watch(before=look)).data_ptr() for at, rows in shapes}
        return places == {session.arena.address("output")}, seen == {session.arena.address("ids")}

    assert m0.run(main) == [(True, True)]


def test_3_07_no_shape_needs_more_scratch_than_planned(m0) -> None:
    """Every row count and many histories, not only the largest: the workspace of a shape need not grow with the shape."""
    used: dict[str, set[int]] = {}

    def note(step, call, chunk):
        used.setdefault(step.name, set()).add(call.scratch.used)
        assert call.scratch.used <= step.scratch

    def main(session):
        for rows in range(17):
            for history in (0, 1, 7, 8, 48):
                session.prefill(m0.hidden(rows), history, hooks=m0.Watch(after={"*": note}))

    m0.run(main)
    assert set(used) == {step.name for step in m0.program().steps}


def test_3_08_a_kept_result_is_a_copy_and_a_view_says_so(m0) -> None:
    def main(session):
        kept, view = session.prefill(m0.hidden(16), 0, copy=True), session.prefill(m0.hidden(16), 0)
        assert m0.same(kept, view)
        session.prefill(m0.hidden(16, seed=4), 0)
        short = session.prefill(m0.hidden(3), 0)
        return m0.same(kept[:3], short), m0.same(kept, view), tuple(short.shape)

    assert m0.run(main) == [(True, False, (3, 32))]


@pytest.mark.parametrize("reuse", ["on", "off"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_3_10_poison_before_every_replay_changes_nothing(m0, reuse: str, ranks: int) -> None:
    right = m0.outcome(ranks=ranks)

    def main(session):
        spoil = [lambda s, at, n, p=p: poison(s.arena, p, visible=at + n, seed=at) for p in PATTERNS]
        spoil += [lambda s, at, n, w=w: fill_words(s, w) for w in WORDS.values()]
        return [m0.whole(session, before=before) for before in spoil]

    for found in m0.run(main, reuse=reuse, ranks=ranks):
        assert len(found) == len(PATTERNS) + len(WORDS)
        assert all(outcome.same(right) for outcome in found)


#: what a step leaves behind when it does nothing, and where a caller sees it
SEEN = {
    "bind_inputs": "output",
    "query_latent": "output",
    "attention_query": "output",
    "append_latent": "output",
    "index_query": "output",
    "append_index": "ids",
    "gather_history": "output",
    "index_select": "ids",
    "exchange_ids": "ids",
    "sparse_attend": "output",
    "project_output": "output",
    "reduce_output": "output",
    "barrier": "signals",
}


@pytest.mark.parametrize("op", SEEN)
def test_3_11_a_step_that_does_nothing_fails(m0, op: str) -> None:
    """Each op in turn returns at once in the second of two replays: the poisoned bytes it should have replaced are seen."""

    def idle(run, call, chunk):
        if chunk.history == 0:
            run(call, chunk)

    def main(session):
        session.prefill(m0.hidden(16), 0)
        at_first = session.arena.segment("signal").clone()
        fill_words(session, WORDS["quiet NaN"])
        found = m0.prefill(session, (16,), start=16)
        moved = not m0.same(at_first, session.arena.segment("signal"))
        return {"output": found.output, "ids": found.ids, "signals": moved}

    (right,) = m0.run(main)
    try:
        (wrong,) = m0.run(main, more=m0.altered(m0.program(), op, idle))
    except RankError:
        return  # an id out of range stopped the run: seen as well
    what = SEEN[op]
    assert (wrong[what] != right[what]) if what == "signals" else not m0.same(wrong[what], right[what])


def test_3_11_a_replay_that_does_nothing_fails(m0) -> None:
    """The output of the replay before is still there when all steps are skipped; cleared first, it is no result."""

    def main(session):
        first = session.prefill(m0.hidden(16), 0, copy=True)
        fill_words(session, 0x7FC07FC0)
        session.bound = ()
        return first, session.prefill(m0.hidden(16), 0, copy=True)

    ((first, second),) = m0.run(main)
    assert not m0.same(first, second)
    assert second.isnan().all()


def test_3_13_staging_has_one_user_at_a_time(m0) -> None:
    """Two gathers that could run at once on the one staging buffer are refused, though their histories lie apart."""
    made = m0.program(ranks=2)
    loose = on_queue(made, "gather_latent", after=("append_latent",))
    plan = dataclasses.replace(place(made, "off"), program_digest=loose.digest)
    with pytest.raises(PlanRefused, match="staging"):
        check(loose, plan)


@pytest.mark.parametrize("ranks", [2, 4])
def test_3_14_queued_replays_with_an_odd_number_of_collectives(m0, ranks: int) -> None:
    """Three replays in a row, staging spoilt in between, under several schedules: no slot or generation is left behind."""
    right = m0.outcome((16, 16, 16), ranks=ranks)
    for schedule in range(3):
        setup = m0.Setup(seed=schedule, sizes={"ranks": ranks})

        def main(session):
            results = []
            for _ in range(3):
                results.append(m0.whole(session, (16, 16, 16)))
                session.arena.segment("staging").fill_(0x7F)
            return results

        for found in setup.run(main):
            assert all(outcome.same(right) for outcome in found)
        labels = [label for rank, call, label in setup.trace if rank == 0 and call == "exchange"]
        assert len(labels) % 2 == 1 or len(set(labels)) > 1


def test_3_16_counters_do_not_accumulate_over_replays(m0) -> None:
    """NaN scores are counted per replay: one with a broken key counts them, the next one counts none."""

    def main(session):
        counts = []
        watch = m0.Watch(
            after={"index_select": lambda step, call, chunk: counts.append(int(call.view("local_counts", "nans").sum()))}
        )
        rows = m0.hidden(16)
        for broken in (False, True, True, False):
            spoilt = rows.clone()
            if broken:
                spoilt[2] = torch.nan
            session.prefill(spoilt, 0, hooks=watch)
        return counts

    ((clean, once, again, after),) = m0.run(main)
    assert clean == after == 0
    assert once == again > 0


def test_3_17_short_rows_do_not_wobble_in_dirty_memory(m0) -> None:
    """Rows that see 1 to 12 tokens, twenty replays, other leftovers each time: bitwise the same."""
    right = m0.outcome((12,))

    def main(session):
        found = []
        for turn in range(20):
            fill_words(session, int(torch.randint(-(2**31), 2**31, (1,), generator=torch.Generator().manual_seed(turn))))
            found.append(m0.whole(session, (12,)))
        return found

    assert all(outcome.same(right) for outcome in m0.run(main)[0])


def test_3_19_the_checker_finds_what_a_planner_may_forget(m0) -> None:
    """An output laid on bytes that are still read, a scratch on its own step's operand, an input on a temporary: each refused."""
    made = m0.program()
    plan = place(made)
    at = plan.by_name

    def moved(name: str, onto: str):
        places = tuple(dataclasses.replace(p, offset=at[onto].offset) if p.buffer == name else p for p in plan.places)
        return dataclasses.replace(plan, places=places)

    scratch = next(s.scratch_name for s in made.steps if s.name == "sparse_attend")
    for name, onto in (
        ("output", "partial"),
        ("ids", "latent_history"),
        ("context", "query"),
        (scratch, "latent_history"),
        ("rope", "hidden"),
    ):
        with pytest.raises(PlanRefused, match=r"unsafe plan|segment"):
            check(made, moved(name, onto))


def test_3_20_the_callers_rows_are_read_once(m0) -> None:
    """A scheduler that overwrites its input buffer as soon as the call has begun changes nothing."""
    right = m0.outcome((16,)).output

    def main(session):
        rows = m0.hidden(16)
        return session.prefill(
            rows, 0, copy=True, hooks=m0.Watch(after={"bind_inputs": lambda step, call, chunk: rows.fill_(torch.nan)})
        )

    assert m0.same(m0.run(main)[0], right)


def test_3_22_a_shared_layer_without_the_selection_before_it_is_refused(m0) -> None:
    made = m0.geometry(schedule=("full", "shared"))

    def main(session):
        rows = m0.hidden(4)
        with pytest.raises(UserError, match="ids"):
            session.prefill(rows, 0)
        ids, counts = torch.full((4, 8), -1, dtype=torch.int32), torch.ones(4, dtype=torch.int32)
        with pytest.raises(UserError, match="row 0"):
            session.prefill(rows, 0, ids=ids, counts=counts)
        ids[:, 0] = 0
        late = ids.clone()
        late[1, 0] = 2  # the token behind the row: the previous position's row used by mistake
        with pytest.raises(UserError, match="row 1"):
            session.prefill(rows, 0, ids=late, counts=counts)
        return session.prefill(rows, 0, ids=ids, counts=counts).shape

    assert m0.run(main, made=made, layer=1) == [(4, 32)]


def test_3_23_two_prepared_sessions_share_no_byte(m0) -> None:
    """What one session replays cannot lie on what another one is using: every session maps its own memory."""
    made = m0.program()

    def main(comm):
        fill = synthetic(1, tables(m0.geometry()))
        with prepare(made, place(made), comm=comm, fill=fill) as one, prepare(made, place(made), comm=comm, fill=fill) as two:
            spans = sorted(one.arena.ranges() + two.arena.ranges())
            apart = all(first[1] <= second[0] for first, second in itertools.pairwise(spans))
            right = m0.whole(one)
            fill_words(two, WORDS["bytes 7F"])
            return apart, m0.whole(one).same(right), m0.whole(two).same(right)

    assert run_local(1, main) == [(True, True, True)]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_canaries_around_every_view_survive(m0, ranks: int) -> None:
    """The matrix row: no step writes beside what it declares, at the row counts and histories of the matrix."""

    def main(session):
        canaries, watcher = SlackCanaries(session.arena, 1), WriteWatcher(session.arena)
        for start in (0, 16, 48):
            for rows in (16, 15, 3, 1, 0, 16):
                m0.prefill(session, (rows,), start=start, hooks=watcher)
        return [str(v) for v in watcher.violations] + canaries.damage(), watcher.checked > 0

    assert m0.run(main, ranks=ranks) == [([], True)] * ranks


def test_latent_first_is_rejected(m0) -> None:
    """The matrix row: the other order of the two phases is rejected with this plan, and gets a plan without the overlap."""
    made = m0.program(ranks=2)
    by = {s.name: s for s in made.steps}
    order = [n for n in by if n != "gather_latent"]
    order.insert(order.index("gather_index"), "gather_latent")
    first = made.with_steps(tuple(by[name] for name in order))
    with pytest.raises(PlanRefused, match="latent_history"):
        check(first, place(made))
    other = place(first).by_name
    one, two = other["index_history"], other["latent_history"]
    assert one.stop <= two.offset or two.stop <= one.offset
