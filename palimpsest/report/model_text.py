"""The plan of a whole model as a person reads it: bytes by role, both arrangements, what the workspace peak is."""

import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from palimpsest.core.geometry import Geometry
from palimpsest.core.spec import Program
from palimpsest.core.units import format_bytes, format_count
from palimpsest.plan.account import Role
from palimpsest.plan.plan import Plan

WIDTH = 100
#: roles shown of each class; the rest is summed
MOST = 10


def show(
    geometry: Geometry, program: Program, plans: dict[str, Plan], roles: Sequence[Role], reuse: str, stored: Any = None
) -> None:
    """Print to stdout; ``stored`` is ``recipes.weights_from_headers`` of the checkpoint, or None when MODEL has no tensors."""
    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    limits, on, off = program.limits, plans["on"], plans["off"]
    console.print(
        f"{geometry.name}: prefill of all {geometry.layers} layers, memory of one of {limits.ranks} ranks", style="bold"
    )
    console.print(
        f"context {format_count(limits.tokens)} = {limits.tokens:,} tokens, {limits.rows:,} rows; {len(geometry.sparse_layers)} "
        f"sparse layers, {len(geometry.full_layers)} with an indexer; {len(program.all_buffers):,} buffers, "
        f"{len(program.steps):,} steps\n",
        markup=False,
    )
    for kind in ("weights", "persistent", "reusable"):
        console.print(_table(kind, [r for r in roles if r.kind == kind], plans[reuse]))
        console.print()
    console.print(f"workspace:    {on.peak:,} B ({format_bytes(on.peak)}) with reuse of histories, {off.peak:,} B without")
    console.print(f"lower bound:  {on.lower_bound:,} B, ratio {on.ratio:.4f}")
    console.print(f"total:        {plans[reuse].total:,} B ({format_bytes(plans[reuse].total)}) per rank")
    if stored is not None:
        console.print(
            f"checkpoint:   {stored.stored:,} B in its tensors; {stored.per_rank:,} B "
            f"({format_bytes(stored.per_rank)}) of them on one rank, "
            f"from the headers",
            markup=False,
        )
        for what in ("missing", "unknown"):
            if names := getattr(stored, what):
                console.print(f"              {len(names)} {what}, first {sorted(names)[0]}", markup=False)
    console.print(
        f"plan digest:  {plans[reuse].digest}\n              reuse {reuse}, {plans[reuse].placer}, accepted by the checker"
    )


def _table(kind: str, rows: Sequence[Role], plan: Plan) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name, right in (
        (f"{kind} (# is a layer)", False),
        ("formula", False),
        ("buffers", True),
        ("bytes held", True),
        ("", True),
    ):
        width = 40 if name == "formula" else None  # the bytes must stay whole at 100 columns
        table.add_column(name, justify="right" if right else "left", no_wrap=True, overflow="ellipsis", max_width=width)
    for row in rows[:MOST]:
        mark = "* " if row.at_peak and kind == "reusable" else "  "
        table.add_row(mark + row.role, row.formula, f"{row.count:,}", f"{row.held:,}", format_bytes(row.held))
    if rest := rows[MOST:]:
        table.add_row(f"  {len(rest)} smaller", "", f"{sum(r.count for r in rest):,}", "", "")
    size = plan.by_kind[kind].nbytes if kind in plan.by_kind else 0
    table.add_row(
        "  segment", "roles share bytes" if kind == "reusable" else "", "", f"{size:,}", format_bytes(size), style="bold"
    )
    return table
