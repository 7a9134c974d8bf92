"""An explanation as a person reads it: the peak and who is alive there, then every reuse with its order and its bytes."""

import sys

from rich.console import Console
from rich.table import Table

from palimpsest.core.units import format_bytes
from palimpsest.plan.explain import Explanation, Reuse

#: columns when the output is not a terminal
WIDTH = 100
#: reuses shown one by one
MOST = 12


def show(found: Explanation, base: Explanation) -> None:
    """Print ``found`` (reuse on) to stdout; ``base`` is the same program with ``--reuse off``."""
    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    for line in _peak(found):
        console.print(line, markup=False)
    console.print(_alive(found))
    console.print(_runners_up(found))
    for line in _saved(found, base):
        console.print(line, markup=False)
    for reuse in _largest(found):
        for line in _reuse(reuse):
            console.print(line, markup=False)
    rest = len(found.reuses) - MOST
    if rest > 0:
        saved = sum(r.saved for r in found.reuses) - sum(r.saved for r in _largest(found))
        console.print(f"  and {rest} smaller ones: {format_bytes(saved)} (--json lists all)", markup=False)


def _peak(found: Explanation) -> list[str]:
    where = f"{found.peak_step} ({found.peak_phase})" if found.peak_phase else found.peak_step
    lines = [
        f"{found.program}: the reusable segment is {found.peak:,} B ({format_bytes(found.peak)}) on each rank",
        f"because {where} needs {found.lower_bound:,} B ({format_bytes(found.lower_bound)}) alive at once.",
    ]
    over = found.peak - found.lower_bound
    if over:
        lines.append(f"Placement adds {over:,} B: {found.peak / max(found.lower_bound, 1):.4f} times that bound.")
    else:
        lines.append("No placement can be smaller: the peak equals the bytes alive there.")
    return lines


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in columns:
        table.add_column(name.lstrip(">"), justify="right" if name.startswith(">") else "left", no_wrap=name != "why", overflow="fold")
    return table


def _alive(found: Explanation) -> Table:
    table = _table(f"\nAlive at {found.peak_step}", "buffer", ">bytes", ">share", "why")
    for a in found.alive:
        table.add_row(a.buffer, f"{a.nbytes:,}", f"{100 * a.nbytes / max(found.lower_bound, 1):.1f}%", a.why)
    return table


def _runners_up(found: Explanation) -> Table:
    table = _table("\nThe next busiest steps: what the peak could fall to at best", "step", "phase", ">bytes alive", ">below the peak")
    for load in found.runners_up:
        table.add_row(load.step, load.phase, f"{load.nbytes:,}", f"{found.lower_bound - load.nbytes:,}")
    return table


def _saved(found: Explanation, base: Explanation) -> list[str]:
    return [
        "",
        f"Reuse saves {found.saved:,} B ({format_bytes(found.saved)}): {format_bytes(found.slots)} of buffers lie on "
        f"{format_bytes(found.peak)}.",
        f"Of it, sharing the histories saves {base.peak - found.peak:,} B ({format_bytes(base.peak - found.peak)}): with --reuse off the "
        f"segment is {format_bytes(base.peak)}.",
    ]


def _largest(found: Explanation) -> list[Reuse]:
    return sorted(found.reuses, key=lambda r: (-r.saved, r.late, r.early))[:MOST]


def _reuse(reuse: Reuse) -> list[str]:
    lines = [f"  {format_bytes(reuse.saved):>10}  {reuse.late} on {reuse.early}, bytes [{reuse.start:,}, {reuse.stop:,})"]
    if reuse.chain:
        fences = [name for name in reuse.fences if name not in reuse.chain]
        meet = f"; all ranks meet at {', '.join(fences)}" if fences else ""
        lines.append(f"{'':14}{' -> '.join(reuse.chain)}{meet}")
    return lines
