"""Mutants of attention and output, of the case's data, and of the qualifier's own parts; and the table of all actions.

Plans and tools run no layer: their actions return flag lines of a sheet of their own.
"""

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from palimpsest.core.errors import BadCheckpoint, BadConfig
from palimpsest.core.units import align_up
from palimpsest.kernels.call import Call, Chunk, Implementation
from palimpsest.plan.plan import Place, Plan, Segment
from palimpsest.prove import capacity, events, extras, fill, gates_storage, licence, rank_main, roundtrip
from palimpsest.prove import mutations as m
from palimpsest.prove.data import Data
from palimpsest.prove.enclosure import enclose
from palimpsest.prove.exact import decode_activation
from palimpsest.prove.gates import SEAL, Sheet
from palimpsest.prove.mutants import Mutant
from palimpsest.prove.oracle import LatentFormat, attend, decode_latent
from palimpsest.prove.rank_setup import Setup

Flags = list[dict[str, Any]]


def operands(change: Callable[[Call, Chunk], dict[str, torch.Tensor]]) -> m.Action:
    """Attention on changed operands: role -> what it reads in the place of the planned tensor."""

    def action(mutant: Mutant) -> m.Injection:
        def other(arrangement: str, op: str, run: Implementation, call: Call, chunk: Chunk) -> None:
            views = {**call.views, **{role: {role: tensor} for role, tensor in change(call, chunk).items()}}
            run(Call(call.name, call.params, views, call.raws, call.scratch, call.comm), chunk)

        return m.Injection(wrap=m.instead(mutant, "sparse_attend", other))

    return action


def turned(call: Call, chunk: Chunk) -> dict[str, torch.Tensor]:
    ids, counts = call.view("ids").clone(), call.view("counts")
    for row in range(chunk.rows):
        ids[row, : counts[row]] = ids[row, : counts[row]].flip(0)
    return {"ids": ids}


def neighbour(call: Call, chunk: Chunk) -> dict[str, torch.Tensor]:
    query = call.view("query").clone()
    query[:, 0].copy_(call.view("query")[:, -1])
    return {"query": query}


def ignored(part: int) -> Callable[[Call, Chunk], dict[str, torch.Tensor]]:
    """The last of the ids, or 1 / ``part`` of them, are not read."""

    def change(call: Call, chunk: Chunk) -> dict[str, torch.Tensor]:
        ids, counts = call.view("ids").clone(), call.view("counts").clone()
        for row in range(chunk.rows):
            held = int(counts[row])
            left = max(1, held - (held // part if part else 1))
            ids[row, left:] = -1
            counts[row] = left
        return {"ids": ids, "counts": counts}

    return change


def truncated(mutant: Mutant) -> m.Injection:
    """The engine's attention with the last bits of the probabilities cut: those that bf16 has not, or ``argument`` of them."""
    mask = np.uint32(0xFFFFFFFF << int(mutant.argument or "16") & 0xFFFFFFFF)

    def other(arrangement: str, op: str, run: Implementation, call: Call, chunk: Chunk) -> None:
        p, context = call.params, call.view("context").numpy()
        layout = LatentFormat(p["format"], p["kv_lora"], p["rope_dims"], p["latent_scale"])
        for row, (records, query) in enumerate(_operands(call, chunk)):
            keys, _ = decode_latent(records, layout)
            logits = (p["softmax_scale"] * (query @ keys.T)).astype(np.float32)
            made = np.exp((logits - logits.max(axis=1, keepdims=True)).astype(np.float64)).astype(np.float32)
            cut = (made.view(np.uint32) & mask).view(np.float32)
            context[row] = (cut @ keys[:, : p["kv_lora"]].astype(np.float32)) / made.sum(axis=1, keepdims=True)

    return m.Injection(wrap=m.instead(mutant, "sparse_attend", other))


def shifted_rows(mutant: Mutant) -> m.Injection:
    def other(arrangement: str, op: str, run: Implementation, call: Call, chunk: Chunk) -> None:
        run(call, chunk)
        rows = call.view("context")[: chunk.rows]
        rows.copy_(rows.roll(1, dims=0))

    return m.Injection(wrap=m.instead(mutant, "sparse_attend", other))


def drifting(mutant: Mutant) -> m.Injection:
    made = m.Injection(state={"turn": 0})

    def other(arrangement: str, op: str, run: Implementation, call: Call, chunk: Chunk) -> None:
        run(call, chunk)
        made.state["turn"] += 1
        call.view("context")[0, 0, :1].fill_(made.state["turn"])

    made.wrap = m.instead(mutant, "sparse_attend", other)
    return made


def blind(mutant: Mutant) -> m.Injection:
    def other(arrangement: str, op: str, run: Implementation, call: Call, chunk: Chunk) -> None:
        call.view("context")[: chunk.rows].fill_(1)

    return m.Injection(wrap=m.instead(mutant, "sparse_attend", other))


def not_finite(mutant: Mutant) -> m.Injection:
    def other(arrangement: str, op: str, run: Implementation, call: Call, chunk: Chunk) -> None:
        run(call, chunk)
        call.view("partial")[0, :1].fill_(torch.inf)

    return m.Injection(wrap=m.instead(mutant, "project_output", other))


def nudged(mutant: Mutant) -> m.Injection:
    """In every row one coordinate lies where the worst-case bound still allows it and the recorded order does not."""
    made = m.Injection()

    def other(arrangement: str, op: str, run: Implementation, call: Call, chunk: Chunk) -> None:
        run(call, chunk)
        f = made.state["facts"]
        for row, (keys, query) in enumerate(_operands(call, chunk)):
            truth = attend(keys, query, f.layout, softmax_scale=f.softmax_scale, arithmetic=f.model)
            enclosure = enclose(keys, query, f.layout, softmax_scale=f.softmax_scale, model=f.model)
            room = truth.context + truth.bound - enclosure.high
            at = np.unravel_index(np.argmax(room / truth.bound), room.shape)
            call.view("context").numpy()[row][at] = enclosure.high[at] + room[at] / 2

    made.made = lambda qualifier: made.state.update(facts=qualifier.setup.output_facts)
    made.wrap = m.instead(mutant, "sparse_attend", other)
    return made


def _operands(call: Call, chunk: Chunk) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Per row: latent records of its ids in their order, and the exact query [heads, dim]."""
    ids, counts, queries = call.view("ids").numpy(), call.view("counts").numpy(), call.view("query")
    history = m.bits(call.view("latent_history")).view(len(call.view("latent_history")), -1).numpy()
    for row in range(chunk.rows):
        raw = m.bits(queries[row].contiguous()).numpy().reshape(len(queries[row]), -1)
        yield np.ascontiguousarray(history[ids[row, : counts[row]]]), decode_activation(raw, call.params["activation"])


def scaled_weights(call: Call, chunk: Chunk) -> None:
    call.view("head_weights").mul_(8)


# -- data and parts of the qualifier


def patched(*wanted: tuple[Any, str, Callable[[Any], Any]]) -> m.Action:
    """Replace attributes while the run lasts: (object, attribute, right one -> wrong one)."""
    return lambda mutant: m.Injection(patches=[(thing, name, make(getattr(thing, name))) for thing, name, make in wanted])


def _copied(right: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A worker that gives the index views an allocation of their own."""

    def ask(asked: Any) -> Any:
        arenas = {**asked["arenas"], "copy": asked["arenas"]["staging"]}
        moved = {**asked["views"]["index_history"], "arena": "copy", "offset": 0}
        return right({**asked, "arenas": arenas, "views": {**asked["views"], "index_history": moved}})

    return ask


def _without_beacons(right: Callable[..., Any]) -> Callable[..., Any]:
    def keys(self: Data, rng: Any, block: int) -> Any:
        made = right(self, rng, block)
        made[np.isin(block * len(made) + np.arange(len(made)), self.case.planted)] = 0
        return made

    return keys


def _other_fill(right: Callable[..., None]) -> Callable[..., None]:
    """One byte of the aliased arrangement's index history before the replay."""

    def filled(self: fill.Caches, data: Data, history: int) -> None:
        right(self, data, history)
        if self.arena.plan.reuse == "on" and history and not self.rank:
            m.flip(self.arena.view("latent_cache"), 0)

    return filled


def _invisible(right: Callable[..., None]) -> Callable[..., None]:
    """Pages past every chunk of the case."""

    def filled(self: fill.Caches, data: Data, history: int) -> None:
        right(self, data, history)
        for cache in ("index_cache", "latent_cache"):
            self.arena.view(cache)[-1].fill_(0x11)

    return filled


def _no_saving(right: Callable[..., Plan]) -> Callable[..., Plan]:
    return lambda program, reuse: right(program, "on" if program.limits.tokens == capacity.LENGTHS[1] else reuse)


def unchecked(mutant: Mutant) -> m.Injection:
    """Rank 1 keeps no count and says PASS."""

    def made(qualifier: Any) -> None:
        if qualifier.rank != 1:
            return
        qualifier._judge_alone = lambda *_: None
        for name, sheet in qualifier.sheets.items():
            if name != SEAL:
                sheet.cells = _Unclosed()

    return m.Injection(made=made)


class _Unclosed(dict[str, Any]):
    """Cells that never compare their counts."""

    def setdefault(self, key: str, default: Any = None) -> Any:
        default.close = lambda: None
        return super().setdefault(key, default)


# -- plans


def moved_plan(change: Callable[[dict[str, Place], dict[str, int]], None]) -> Callable[[Setup], Flags]:
    """The seal's integer gates on an aliased plan that somebody changed: places by name, segment sizes by kind."""

    def flags(setup: Setup) -> Flags:
        plan = setup.plans["alias"]
        places, sizes = dict(plan.by_name), {s.kind: s.nbytes for s in plan.segments}
        change(places, sizes)
        wrong = dataclasses.replace(plan, places=tuple(places.values()), segments=tuple(Segment(k, n) for k, n in sizes.items()))
        sheet, base = Sheet(SEAL, 0), setup.plans["base"]
        gates_storage.seal_plan(sheet, base, setup.program, "base")
        gates_storage.seal_plan(sheet, wrong, setup.program, "alias")
        requested = {"base": base.total, "alias": wrong.total}
        gates_storage.saving(sheet, base, wrong, requested=requested, record=setup.record_bytes["index_cache"])
        return close(sheet)

    return flags


def close(sheet: Sheet) -> Flags:
    """The flag lines of a sheet whose expectation is what was checked."""
    for cell in sheet.cells.values():
        cell.n_expected = cell.n_checked
    return sheet.close()


def _move(name: str, **changes: Callable[[Place, dict[str, int]], Any]) -> Callable[[dict[str, Place], dict[str, int]], None]:
    def change(places: dict[str, Place], sizes: dict[str, int]) -> None:
        place = places[name]
        places[name] = dataclasses.replace(place, **{key: value(place, sizes) for key, value in changes.items()})

    return change


def _alias_lost(places: dict[str, Place], sizes: dict[str, int]) -> None:
    index = places["index_history"]
    places["index_history"] = dataclasses.replace(index, offset=align_up(sizes["reusable"], index.align))
    sizes["reusable"] = places["index_history"].stop


def _on_latent(places: dict[str, Place], sizes: dict[str, int]) -> None:
    latent = places["latent_history"]
    small = dataclasses.replace(places["signals"], kind="reusable", offset=latent.stop - places["signals"].align)
    places["signals"] = small


def reordered(setup: Setup) -> Flags:
    """S7's static part on a program whose latent gather comes before the selection."""
    steps = list(setup.program.steps)
    at = {step.name: i for i, step in enumerate(steps)}
    early = steps.pop(at["gather_latent"])
    steps.insert(at["index_select"], early)
    sheet, program = Sheet(SEAL, 0), dataclasses.replace(setup.program, steps=tuple(steps))
    events.static(sheet, program, events.Schedule.of(program, setup.plans["alias"]), "alias")
    return close(sheet)


PLANS: dict[str, Callable[[Setup], Flags]] = {
    "reordered": reordered,
    "offset_by_one": moved_plan(_move("index_history", offset=lambda p, s: p.offset + 1)),
    "shorter_alias": moved_plan(_move("index_history", nbytes=lambda p, s: p.nbytes // 132 * 131)),
    "alias_lost": moved_plan(_alias_lost),
    "staging_on_latent": moved_plan(_on_latent),
    "outside_segment": moved_plan(_move("query", offset=lambda p, s: align_up(s["reusable"] - p.nbytes + 1, p.align))),
}

# -- tools


def refused(spoil: Callable[[Path], None]) -> Callable[[Setup, Path], Flags]:
    """A copy of the checkpoint, spoiled; whether its reader refuses it."""

    def flags(setup: Setup, place: Path) -> Flags:
        model = place / "spoiled"
        shutil.copytree(setup.checkpoint.root, model)
        spoil(next(p for p in sorted(model.iterdir()) if p.suffix == ".safetensors"))
        try:
            Setup(dataclasses.replace(setup.job, model=str(model)))
        except (BadCheckpoint, BadConfig) as error:
            return [{"gate": "parser", "verdict": "FAIL", "first_failure": str(error)}]
        return [{"gate": "parser", "verdict": "PASS", "first_failure": None}]

    return flags


def _lying(shard: Path) -> None:
    """The first tensor's end is one byte further than it is."""
    raw = shard.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    name = next(n for n in header if n != "__metadata__")
    header[name]["data_offsets"][1] += 1
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    shard.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + size :])


def _short(shard: Path) -> None:
    shard.write_bytes(shard.read_bytes()[:-1])


def other_licence(setup: Setup, place: Path) -> Flags:
    """A kill matrix that passed, for another source."""
    raw = json.dumps({"schema": licence.SCHEMA, "verdict": "PASS", "package_digest": "0" * 64, "mutants": []}).encode()
    sheet = Sheet(SEAL, 0)
    sheet.cell("V4").check(licence.Licence.of(raw, "1" * 64) is not None, 1, "no self-test of this source licenses it")
    return close(sheet)


def planted_tolerance(setup: Setup, place: Path) -> Flags:
    folder = place / "source"
    folder.mkdir()
    (folder / "gate.py").write_text("import numpy as np\n\n\ndef good(a, b):\n    return np.allclose(a, b)\n")
    sheet = Sheet(SEAL, 0)
    gates_storage.lint(sheet, folder, 0, 1)
    return close(sheet)


TOOLS: dict[str, Callable[[Setup, Path], Flags]] = {
    "lying_header": refused(_lying),
    "short_shard": refused(_short),
    "other_licence": other_licence,
    "planted_tolerance": planted_tolerance,
}

ACTIONS: dict[str, m.Action] = {
    "healthy": m.healthy,
    "latent_first": m.latent_first,
    "no_barrier": m.no_barrier,
    "no_barrier_late": m.no_barrier_late,
    "stale_signal": m.stale_signal,
    "index_bytes_stay": m.index_bytes_stay,
    "staging_inside": m.staging_inside,
    "extra_mapping": m.extra_mapping,
    "own_bytes": m.own_bytes,
    "other_addresses": m.other_addresses,
    "lazy_workspace": m.lazy_workspace,
    "leak": m.leak,
    "stale_ids": m.stale_ids,
    "other_weight": m.other_weight,
    "forged_tie": m.forged_tie,
    "negative_zeros": m.negative_zeros,
    "scales_up": m.after("gather_history", m.scales_up, step="gather_index"),
    "scales_down": m.after("gather_history", m.scales_down, step="gather_index"),
    "skip_last": m.after("gather_history", m.skip_last, step="gather_index"),
    "nan_left": m.after("gather_history", m.skip_last, step="gather_index"),
    "swapped_pages": m.after("gather_history", m.swapped_pages, step="gather_index"),
    "tie_flood": m.after("gather_history", m.tie_flood, step="gather_index"),
    "past_visible": m.after("gather_history", m.past_visible, step="gather_index"),
    "into_slack": m.on_arena("gather_history", m.into_slack, step="gather_latent"),
    "index_cache_bit": m.on_arena("exchange_ids", m.index_cache_bit),
    "latent_cache_bit": m.after("gather_history", lambda c, k: m.flip(c.view("cache")), step="gather_latent", before=True),
    "stale_pointer": m.on_arena("reduce_output", m.stale_pointer),
    "weight_bit": m.on_arena("reduce_output", m.weight_bit),
    "temporary": m.after("project_output", m.temporary),
    "other_query": m.after("attention_query", m.other_query),
    "other_index_query": m.after("index_query", m.other_index_query),
    "permuted_weights": m.after("index_query", m.permuted_weights),
    "scaled_weights": m.after("index_query", scaled_weights),
    "visible_more": m.visible(1),
    "visible_less": m.visible(-1),
    "drop_best": m.reselected(m._best),
    "next_below": m.reselected(m._next),
    "duplicate_id": m.after("index_select", m.duplicate_id),
    "shifted_ids": m.after("exchange_ids", m.shifted_ids),
    "unpadded": m.after("exchange_ids", m.unpadded),
    "wrong_id": m.after("index_select", m.wrong_id),
    "turned_ids": operands(turned),
    "neighbour": operands(neighbour),
    "ignore_half": operands(ignored(2)),
    "ignore_one": operands(ignored(0)),
    "truncated": truncated,
    "shifted_rows": shifted_rows,
    "drifting": drifting,
    "nudged": nudged,
    "blind": blind,
    "not_finite": not_finite,
    "foreign": m.healthy,
    "unchecked": unchecked,
    "copied_views": patched((roundtrip, "ask", _copied)),
    "no_cap": patched((capacity.Cap, "tighten", lambda right: lambda self: None)),
    "no_saving": patched((extras, "place", _no_saving)),
    "no_ties": patched((Data, "zero_row", lambda right: lambda self, step: None)),
    "no_beacons": patched((Data, "_lattice_keys", _without_beacons)),
    "no_poison": patched((rank_main, "poison", lambda right: lambda *_, **__: 0)),
    "other_fill": patched((fill.Caches, "fill", _other_fill)),
    "invisible_bytes": patched((fill.Caches, "fill", _invisible)),
}
