"""What the mutants do to a run: actions around single steps, on memory, on the qualifier's own parts.

An action makes an ``Injection`` for one run; it holds the run's state, so that two runs share nothing. Steps are wrapped
where they are bound; production code has no hook for it. Calls of the recorded tail have no planned bytes (``call.raws`` is
empty), which is how a mutant of the step alone tells them apart from one of the op itself.
"""

import mmap
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from palimpsest.kernels.call import Call, Chunk, Implementation
from palimpsest.prove.mutants import ALIAS, Mutant
from palimpsest.run.arena import Arena

#: (arrangement, op, implementation, call, chunk): runs the step, well or badly
Wrap = Callable[[str, str, Implementation, Call, Chunk], None]
Change = Callable[[Call, Chunk], object]


@dataclass
class Injection:
    """wrap: around every step; filled: called with every arena when it is filled; made: called with every rank's Qualifier;
    patches: (object, attribute, what takes its place while the run lasts); late: rank that the scheduler holds back;
    state: of this run; arenas: (arrangement, rank) -> arena
    """

    wrap: Wrap | None = None
    filled: Callable[[str, Arena, int], None] | None = None
    made: Callable[[Any], None] | None = None
    patches: list[tuple[Any, str, Any]] = field(default_factory=list)
    late: int | None = None
    state: dict[Any, Any] = field(default_factory=dict)
    arenas: dict[tuple[str, int], Arena] = field(default_factory=dict)


Action = Callable[[Mutant], Injection]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's bytes."""
    return tensor.view(-1).view(torch.uint8)


def flip(tensor: torch.Tensor, at: int = 0) -> None:
    """Turn one bit."""
    bits(tensor)[at : at + 1].bitwise_xor_(1)


def live(chunk: Chunk) -> bool:
    """Neither empty nor the warm replay, whose rows are zero."""
    return chunk.rows > 0 and (chunk.hidden is None or bool(bits(chunk.hidden).numpy().any()))


def unguarded(wrap: Wrap) -> Wrap:
    """Lets a mutant take memory, so that another gate than the allocation guard judges it."""

    def wrapped(arrangement: str, op: str, run: Implementation, call: Call, chunk: Chunk) -> None:
        with _disable_current_modes():
            wrap(arrangement, op, run, call, chunk)

    return wrapped


def changed(mutant: Mutant, op: str, change: Change, *, step: str = "", before: bool = False, tail: bool = False) -> Wrap:
    """``change(call, chunk)`` after (or before) ``op``, in the mutant's arrangements; ``tail``: in the recorded tail as well."""

    def wrap(arrangement: str, which: str, run: Implementation, call: Call, chunk: Chunk) -> None:
        wanted = which == op and step in ("", call.name) and (mutant.form != ALIAS or arrangement == "alias")
        wanted = wanted and live(chunk) and (tail or bool(call.raws))
        if wanted and before:
            change(call, chunk)
        run(call, chunk)
        if wanted and not before:
            change(call, chunk)

    return unguarded(wrap)


def instead(mutant: Mutant, op: str, other: Wrap, *, step: str = "") -> Wrap:
    """``other`` runs in the place of ``op``, in the mutant's arrangements; the recorded tail is wrong too in the common form."""

    def wrap(arrangement: str, which: str, run: Implementation, call: Call, chunk: Chunk) -> None:
        here = bool(call.raws) if mutant.form == ALIAS else True
        if which == op and step in ("", call.name) and live(chunk) and here and (mutant.form != ALIAS or arrangement == "alias"):
            other(arrangement, which, run, call, chunk)
        else:
            run(call, chunk)

    return unguarded(wrap)


def after(op: str, change: Change, *, step: str = "", before: bool = False) -> Action:
    """An action that changes what a step wrote."""
    return lambda mutant: Injection(wrap=changed(mutant, op, change, step=step, before=before))


# -- storage


def scales_up(call: Call, chunk: Chunk) -> None:
    scales = call.view("history", "scales").numpy()
    scales[: chunk.visible - 1] = scales[1 : chunk.visible].copy()


def scales_down(call: Call, chunk: Chunk) -> None:
    scales = call.view("history", "scales").numpy()
    scales[1 : chunk.visible] = scales[: chunk.visible - 1].copy()


def skip_last(call: Call, chunk: Chunk) -> None:
    """The last tokens keep what was there: poison."""
    call.view("history", "keys")[chunk.visible - 3 : chunk.visible].view(torch.uint8).fill_(0x7F)


def swapped_pages(call: Call, chunk: Chunk) -> None:
    page = call.params["page"]
    for plane in ("keys", "scales"):
        rows = bits(call.view("history", plane)).view(len(call.view("history", plane)), -1)
        first = rows[:page].clone()
        rows[:page].copy_(rows[page : 2 * page])
        rows[page : 2 * page].copy_(first)


def tie_flood(call: Call, chunk: Chunk) -> None:
    call.view("history", "scales")[: chunk.visible].zero_()


def latent_first(mutant: Mutant) -> Injection:
    """The latent gather runs inside the selection step, before the scores are made."""
    made = Injection()

    def wrap(arrangement: str, op: str, run: Implementation, call: Call, chunk: Chunk) -> None:
        if op == "gather_history" and call.name == "gather_latent":
            made.state[arrangement, call.comm.rank] = (run, call)
        if op == "index_select" and arrangement == "alias" and live(chunk):
            early, its = made.state[arrangement, call.comm.rank]
            early(its, chunk)
        run(call, chunk)

    made.wrap = unguarded(wrap)
    return made


def no_barrier(mutant: Mutant) -> Injection:
    def wrap(arrangement: str, op: str, run: Implementation, call: Call, chunk: Chunk) -> None:
        if op != "barrier":
            run(call, chunk)

    return Injection(wrap=wrap)


def no_barrier_late(mutant: Mutant) -> Injection:
    made = no_barrier(mutant)
    made.late = 1
    return made


def stale_signal(mutant: Mutant) -> Injection:
    def put_back(call: Call, chunk: Chunk) -> None:
        call.view("signals").sub_(1)

    return Injection(wrap=changed(mutant, "barrier", put_back))


def on_arena(op: str, change: Callable[[Arena, Call, Chunk], object], *, step: str = "", before: bool = False) -> Action:
    """An action of a step on any planned byte."""

    def action(mutant: Mutant) -> Injection:
        made = Injection()

        def found(call: Call, chunk: Chunk) -> None:
            change(arena_of(made, call), call, chunk)

        made.wrap = changed(mutant, op, found, step=step, before=before)
        return made

    return action


def arena_of(made: Injection, call: Call) -> Arena:
    """The arena that a call's buffers lie in."""
    address = next(iter(call.raws.values())).data_ptr()
    return next(a for a in made.arenas.values() if any(first <= address < end for first, end in a.ranges()))


def past_visible(call: Call, chunk: Chunk) -> None:
    """One index record behind the last token that anybody sees."""
    call.view("history", "keys")[chunk.visible : chunk.visible + 1].view(torch.uint8).bitwise_xor_(0x55)


def into_slack(arena: Arena, call: Call, chunk: Chunk) -> None:
    start, _ = next(span for span in reversed(arena.slack("reusable")) if span[0] < span[1])
    arena.segment("reusable")[start : start + 1].bitwise_xor_(0x55)


def index_cache_bit(arena: Arena, call: Call, chunk: Chunk) -> None:
    """A bit of a token that no row of this rank selected."""
    view, limits = arena.view("index_cache"), arena.plan.limits
    chosen = set(arena.view("local_ids").unique().tolist())
    mine = (t for t in range(chunk.history) if t // limits.page % limits.ranks == call.comm.rank and t not in chosen)
    token = next(mine)
    width = arena.view("index_history", "keys").shape[1]
    flip(view[token // limits.page // limits.ranks], token % limits.page * width)


def weight_bit(arena: Arena, call: Call, chunk: Chunk) -> None:
    flip(arena.view("w.index_w"))


def stale_pointer(arena: Arena, call: Call, chunk: Chunk) -> None:
    arena._raws["partial"] = arena._raws["partial"].clone()


def index_bytes_stay(mutant: Mutant) -> Injection:
    """Attention finds the index history's bytes where the first latent records should be."""
    made = Injection()

    def wrap(arrangement: str, op: str, run: Implementation, call: Call, chunk: Chunk) -> None:
        key = arrangement, call.comm.rank
        if op == "exchange_ids" and live(chunk):
            raw = arena_of(made, call).raw("index_history")
            made.state[key] = raw[raw.numel() // 4 : raw.numel() // 2].clone()
        if op != "sparse_attend" or not call.raws or key not in made.state or not live(chunk):
            run(call, chunk)
            return
        saved = made.state.pop(key)
        head = call.raws["latent_history"][len(saved) : 2 * len(saved)]
        kept = head.clone()
        head.copy_(saved)
        run(call, chunk)
        head.copy_(kept)

    made.wrap = unguarded(wrap)
    return made


def staging_inside(mutant: Mutant) -> Injection:
    def filled(arrangement: str, arena: Arena, rank: int) -> None:
        arena._raws["staging"] = arena.segment("reusable")[:64]

    return Injection(filled=filled)


def extra_mapping(mutant: Mutant) -> Injection:
    made = Injection()

    def filled(arrangement: str, arena: Arena, rank: int) -> None:
        if arrangement == "alias":
            made.state[rank] = arena.second_view("reusable")

    made.filled = filled
    return made


def own_bytes(mutant: Mutant) -> Injection:
    """The plan says that the histories share bytes, and the arena has a segment for the index history all the same."""
    from palimpsest.run.arena import Segment

    def filled(arrangement: str, arena: Arena, rank: int) -> None:
        if arrangement == "alias":
            arena.segments["index"] = Segment("index", arena.plan.by_name["index_history"].nbytes)

    return Injection(filled=filled)


def other_addresses(mutant: Mutant) -> Injection:
    made = Injection()

    def filled(arrangement: str, arena: Arena, rank: int) -> None:
        made.state[arrangement, rank] = mmap.mmap(-1, (3 + rank) << 20)

    made.filled = filled
    return made


# -- allocation


def temporary(call: Call, chunk: Chunk) -> None:
    call.view("partial").copy_(call.view("partial") + 0)


def lazy_workspace(mutant: Mutant) -> Injection:
    made = Injection()

    def take(call: Call, chunk: Chunk) -> None:
        made.state.setdefault(call.comm.rank, np.zeros(8 << 20, np.uint8))

    made.wrap = changed(mutant, "append_index", take)
    return made


def leak(mutant: Mutant) -> Injection:
    made = Injection(state={"lost": []})
    made.wrap = changed(mutant, "project_output", lambda c, k: made.state["lost"].append(bytearray(1024)))
    return made


# -- inputs


def other_query(call: Call, chunk: Chunk) -> None:
    call.view("query")[0].copy_(call.view("query")[1])


def other_index_query(call: Call, chunk: Chunk) -> None:
    bits(call.view("index_query")[0]).copy_(bits(call.view("index_query")[1]))


def permuted_weights(call: Call, chunk: Chunk) -> None:
    weights = call.view("head_weights")
    weights.copy_(weights.roll(1, dims=1))


def visible(more: int) -> Action:
    def action(mutant: Mutant) -> Injection:
        def other(arrangement: str, op: str, run: Implementation, call: Call, chunk: Chunk) -> None:
            run(call, Chunk(chunk.history + more, chunk.rows, chunk.hidden))

        return Injection(wrap=instead(mutant, "index_select", other))

    return action


# -- selection


def reselected(choose: Callable[[list[float], list[int]], tuple[int, int]], *, forge: bool = False) -> Action:
    """Row 2 of rank 0 loses one id and takes another, while the selection is made: (scores, chosen) -> (out, in)."""

    def action(mutant: Mutant) -> Injection:
        def other(arrangement: str, op: str, run: Implementation, call: Call, chunk: Chunk) -> None:
            watch, kept, row = call.tap, {}, 2 * (chunk.rows > 2)

            def tap(event: str, **data: Any) -> None:
                if event == "scores" and data["row"] == row:
                    kept[data["start"]] = data["scores"].tolist()
                if event == "selected" and row in data["rows"]:
                    ids, count = call.view("local_ids")[row], int(call.view("local_counts", "counts")[row])
                    chosen = ids[:count].tolist()
                    out, into = choose([s for start in sorted(kept) for s in kept[start]], chosen)
                    ids[:count].copy_(torch.tensor(sorted(set(chosen) - {out} | {into}), dtype=torch.int32))
                watch(event, **data)

            if call.comm.rank == 0 and call.watched:
                call.tap = tap
            run(call, chunk)

        return Injection(wrap=instead(mutant, "index_select", other))

    return action


def _best(scores: list[float], chosen: list[int]) -> tuple[int, int]:
    """Out with the best, in with the best that was not chosen."""
    taken = set(chosen)
    return max(chosen, key=scores.__getitem__), max((i for i in range(len(scores)) if i not in taken), key=scores.__getitem__)


def _next(scores: list[float], chosen: list[int]) -> tuple[int, int]:
    """Out with the last that was chosen, in with the next after it."""
    taken = set(chosen)
    return min(chosen, key=scores.__getitem__), max((i for i in range(len(scores)) if i not in taken), key=scores.__getitem__)


def _tied(scores: list[float], chosen: list[int]) -> tuple[int, int]:
    """One member of the cutoff's class for another."""
    taken, low = set(chosen), min(scores[i] for i in chosen)
    return max(i for i in chosen if scores[i] == low), next(
        i for i in reversed(range(len(scores))) if scores[i] == low and i not in taken
    )


def forged_tie(mutant: Mutant) -> Injection:
    """The aliased selection takes another member of a tie, which is fine; its certificate is over other records."""
    from palimpsest.prove.gates_select import Judge

    made = reselected(_tied)(mutant)
    right = Judge.record
    made.patches.append((Judge, "record", lambda self, token: right(self, token + 1)))
    return made


def duplicate_id(call: Call, chunk: Chunk) -> None:
    call.view("local_ids")[0, 1:2].copy_(call.view("local_ids")[0, 0:1])


def stale_ids(mutant: Mutant) -> Injection:
    """Rank 0 keeps the other rank's ids of the replay before."""
    made = Injection()

    def wrap(arrangement: str, op: str, run: Implementation, call: Call, chunk: Chunk) -> None:
        run(call, chunk)
        if op != "exchange_ids" or call.comm.rank or not live(chunk):
            return
        ids, half = call.view("ids"), len(call.view("ids")) // 2
        kept = made.state.get(arrangement)
        if chunk.rows > half:
            made.state[arrangement] = ids[half:].clone()
            if kept is not None:
                ids[half : chunk.rows].copy_(kept[: chunk.rows - half])

    made.wrap = unguarded(wrap)
    return made


def shifted_ids(call: Call, chunk: Chunk) -> None:
    half = len(call.view("ids")) // 2
    if call.comm.rank == 0 and chunk.rows > half + 1:
        call.view("ids")[half : chunk.rows].copy_(call.view("ids")[half : chunk.rows].roll(1, dims=0))


def unpadded(call: Call, chunk: Chunk) -> None:
    call.view("ids")[chunk.rows :].fill_(0)


def other_weight(mutant: Mutant) -> Injection:
    """Scores of one row are made with a head weight one larger; ``quiet``: of a row that is not audited."""
    from palimpsest.prove.cases import audited_rows

    made = Injection()

    def note(qualifier: Any) -> None:
        step = next(case for case in qualifier.setup.cases).steps[0]
        made.state["audited"] = {row for row, _ in audited_rows(qualifier.setup.profile, step, qualifier.setup.job.seed)}

    def other(arrangement: str, op: str, run: Implementation, call: Call, chunk: Chunk) -> None:
        weights = call.view("head_weights")
        start = call.comm.rank * len(weights)
        own = range(min(len(weights), max(0, chunk.rows - start)))
        slots = [s for s in own if start + s not in made.state["audited"]] if mutant.argument == "quiet" else list(own)[:1]
        kept = weights.clone()
        for slot in slots[:1]:
            weights[slot, :1].add_(1)
        run(call, chunk)
        weights.copy_(kept)

    made.made, made.wrap = note, instead(mutant, "index_select", other)
    return made


def wrong_id(call: Call, chunk: Chunk) -> None:
    """The first row takes the lowest id it did not select, and loses one it did."""
    ids, count = call.view("local_ids")[0], int(call.view("local_counts", "counts")[0])
    taken = set(ids[:count].tolist())
    free = next(i for i in range(chunk.history) if i not in taken)
    ids[:count].copy_(torch.tensor(sorted(taken - {max(taken)} | {free}), dtype=torch.int32))


def negative_zeros(mutant: Mutant) -> Injection:
    """The scores are shown with their zeros turned negative."""

    def other(arrangement: str, op: str, run: Implementation, call: Call, chunk: Chunk) -> None:
        watch = call.tap

        def tap(event: str, **data: Any) -> None:
            if event == "scores":
                shown = data["scores"].copy()
                shown[shown == 0] = -0.0
                data["scores"] = shown
            watch(event, **data)

        if call.watched:
            call.tap = tap
        run(call, chunk)

    return Injection(wrap=instead(mutant, "index_select", other))


def healthy(mutant: Mutant) -> Injection:
    return Injection()
