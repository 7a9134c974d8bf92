"""A plan as a person reads it: histories before and after reuse, every slot with its formula, segments, and what binds."""

import sys

from rich.console import Console
from rich.table import Table

from palimpsest.core.geometry import Geometry
from palimpsest.core.spec import Program
from palimpsest.core.units import format_bytes, format_count
from palimpsest.plan.account import Account, Comparison, Slot
from palimpsest.plan.plan import Plan

#: columns when the output is not a terminal
WIDTH = 100


def show(geometry: Geometry, program: Program, plans: dict[str, Plan], bill: Comparison, reuse: str) -> None:
    """Print the report of both arrangements to stdout; ``reuse`` says which one was asked for."""
    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False, soft_wrap=False)
    _head(console, program)
    if program.histories:
        console.print(_histories(program, plans, bill))
    console.print(_reusable(program, bill))
    console.print(_others(bill.on))
    console.print(_segments(bill))
    console.print(_worths(bill.on))
    for line in _lines(geometry, program, plans[reuse], bill):
        console.print(line, markup=False)


def exact(count: int) -> str:
    """``138412032`` -> ``"138,412,032 B (132 MiB)"``."""
    short = format_bytes(count)
    return f"{count:,} B" if short == f"{count} B" else f"{count:,} B ({short})"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in columns:
        table.add_column(name.lstrip(">"), justify="right" if name.startswith(">") else "left", no_wrap=True, overflow="ellipsis")
    return table


def _head(console: Console, program: Program) -> None:
    limits, facts = program.limits, dict(program.facts)
    console.print(
        f"{program.name}: prefill of one {facts.get('kind', '')} layer, memory of one of {limits.ranks} ranks",
        style="bold",
        markup=False,
    )
    console.print(
        f"context {format_count(limits.tokens)} = {limits.tokens:,} tokens, {limits.rows:,} rows, page {limits.page}, top-k "
        f"{facts.get('topk')}",
        markup=False,
    )
    console.print(
        f"records: index {facts.get('index_format')} {facts.get('index_record_bytes')} B/token, latent "
        f"{facts.get('latent_format')} "
        f"{facts.get('latent_record_bytes')} B/token; activations {facts.get('activation')}, weights {facts.get('weights')}\n",
        markup=False,
    )


def _histories(program: Program, plans: dict[str, Plan], bill: Comparison) -> Table:
    on, off = plans["on"], plans["off"]
    early, late = program.histories
    table = _table("Histories, before and after reuse", "", ">size", ">bytes", ">before: offset", ">after: offset")
    for name in (early, late):
        size = on.by_name[name].nbytes
        table.add_row(name, format_bytes(size), f"{size:,}", f"{off.by_name[name].offset:,}", f"{on.by_name[name].offset:,}")
    apart = on.by_name[early].nbytes + on.by_name[late].nbytes
    together = apart - bill.saved_logical
    table.add_row(
        "bytes of both", f"{format_bytes(apart)} -> {format_bytes(together)}", "", f"{apart:,} B", f"{together:,} B", style="bold"
    )
    table.add_row("")
    return table


def _alive(program: Program, slot: Slot) -> str:
    phase = {step.name: step.phase for step in program.steps} | {"start": "in", "end": "out"}
    first, last = phase[slot.first], phase[slot.last]
    return first if first == last else f"{first}-{last}"


def _reusable(program: Program, bill: Comparison) -> Table:
    table = _table(
        "Reusable segment (bytes may be shared; * is alive at the peak)",
        "slot", "formula", ">bytes", ">before: at", ">after: at", "alive",
    )  # fmt: skip
    before = {slot.buffer: slot.offset for slot in bill.off.slots}
    for slot in sorted((s for s in bill.on.slots if s.kind == "reusable"), key=lambda s: (-s.nbytes, s.buffer)):
        name = f"{'*' if slot.at_peak else ' '} {slot.buffer}"
        formula = "of its op" if slot.buffer.endswith(".scratch") else slot.formula
        table.add_row(name, formula, f"{slot.nbytes:,}", f"{before[slot.buffer]:,}", f"{slot.offset:,}", _alive(program, slot))
    table.add_row("")
    return table


def _others(bill: Account) -> Table:
    table = _table("Slots that share nothing (the same in both arrangements)", "slot", "kind", "formula", ">bytes", ">B/token")
    for slot in bill.slots:
        if slot.kind != "reusable":
            table.add_row(slot.buffer, slot.kind, slot.formula, f"{slot.nbytes:,}", _decimal(slot.per_token))
    table.add_row("")
    return table


def _decimal(fraction: str) -> str:
    over, _, under = fraction.partition("/")
    return over if not under else f"{int(over) / int(under):.2f}"


def _segments(bill: Comparison) -> Table:
    table = _table(
        f"Segments, bytes per rank (logical: asked for; mapped: whole granules of {format_bytes(bill.on.granularity)})",
        "segment", ">logical before", ">logical after", ">mapped before", ">mapped after", ">logical, all ranks",
    )  # fmt: skip
    before = {total.kind: total for total in bill.off.totals}
    for total in bill.on.totals:
        old = before[total.kind]
        numbers = (old.logical, total.logical, old.mapped, total.mapped, total.logical * bill.on.ranks)
        table.add_row(total.kind, *(f"{n:,}" for n in numbers))
    numbers = (bill.off.logical, bill.on.logical, bill.off.mapped, bill.on.mapped, bill.on.logical_all_ranks)
    table.add_row("total", *(f"{n:,}" for n in numbers), style="bold")
    table.add_row("")
    return table


def _lines(geometry: Geometry, program: Program, chosen: Plan, bill: Comparison) -> list[str]:
    on, ranks = bill.on, bill.on.ranks
    lines = [
        f"saved logical:   {exact(bill.saved_logical)} per rank, {exact(bill.saved_logical * ranks)} over {ranks} ranks",
        f"saved mapped:    {exact(bill.saved_mapped)} per rank, counted from the mapped segments alone",
        f"no sharing:      {exact(on.apart)} per rank if every slot had bytes of its own",
        f"peak:            {exact(on.peak)} of reusable bytes, at {on.peak_step}",
        f"lower bound:     {exact(on.lower_bound)}, ratio {on.peak / max(on.lower_bound, 1):.4f}",
        f"growth:          {_decimal(on.per_token)} B per context token per rank, above a fixed {exact(on.fixed)}",
        _sparse(geometry),
    ]
    caches = _caches(geometry, program)
    if caches:
        lines.append(f"all their caches: {exact(caches)} per rank, {exact(caches * ranks)} over {ranks} ranks")
    ordered = [o for o in chosen.overlaps if {o.early, o.late} == set(program.histories)]
    fences = ", ".join(step.name for step in program.steps if step.scope == "all")
    for o in ordered:
        lines.append(f"reuse:           {o.early} on bytes [{o.start:,}, {o.stop:,}) of {o.late}:")
        lines.append(f"                 {o.ordered_by}; all ranks meet at {fences or 'no barrier'}")
    lines.append(f"plan digest:     {chosen.digest}")
    lines.append(
        f"                 reuse {chosen.reuse}, {chosen.placer}, {len(chosen.overlaps)} overlaps, accepted by the checker"
    )
    return lines


def _worths(bill: Account) -> Table:
    """What the largest buffers are worth to somebody who could remove them."""
    table = _table(f"Binding: {bill.peak_step} is the peak of the reusable segment", "without", ">saves", "because")
    for slot in sorted((s for s in bill.slots if s.kind == "reusable"), key=lambda s: (-s.nbytes, s.buffer))[:6]:
        table.add_row(slot.buffer, f"{slot.worth:,} B", slot.why)
    table.add_row("")
    return table


def _sparse(geometry: Geometry) -> str:
    layers, full = geometry.sparse_layers, len(geometry.full_layers)
    runs: list[list[int]] = []
    for layer in layers:
        if runs and runs[-1][-1] == layer - 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    names = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    shown = ", ".join(names if len(names) <= 6 else [*names[:4], "...", *names[-2:]])
    return f"sparse layers:   {len(layers)} of {geometry.layers}: {shown} ({full} with an indexer, {len(layers) - full} keep ids)"


def _caches(geometry: Geometry, program: Program) -> int:
    """Bytes of one rank's caches over all sparse layers; 0 when this layer does not have both kinds."""
    found = {b.name: b.nbytes for b in program.buffers if b.kind == "persistent"}
    if set(found) != {"index_cache", "latent_cache"}:
        return 0
    return found["index_cache"] * len(geometry.full_layers) + found["latent_cache"] * len(geometry.sparse_layers)
