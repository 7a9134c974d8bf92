"""An explanation as a person reads it: the peak and who is alive there, then every reuse with its order and its bytes."""

import sys

from rich.console import Console
from rich.table import Table

from palimpsest.core.units import format_bytes
from palimpsest.plan.explain import Explanation, Reuse
from palimpsest.plan.fold import role_of

#: columns when the output is not a terminal
WIDTH = 100
#: groups of reuses shown
MOST = 12


def show(found: Explanation, base: Explanation) -> None:
    """Print ``found`` (reuse on) to stdout; ``base`` is the same program with ``--reuse off``."""
    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    for line in _peak(found):
        console.print(line, markup=False)
    console.print(f"\nAlive at {found.peak_step}", style="bold", markup=False)
    console.print(_alive(found))
    console.print("\nThe next busiest steps: what the peak could fall to at best", style="bold", markup=False)
    console.print(_runners_up(found))
    for line in _saved(found, base):
        console.print(line, markup=False)
    groups = _groups(found)
    for group in groups[:MOST]:
        for line in _reuse(group):
            console.print(line, markup=False, soft_wrap=True)
    rest = [reuse for group in groups[MOST:] for reuse in group]
    if rest:
        saved = format_bytes(sum(reuse.saved for reuse in rest))
        console.print(f"  and {len(rest):,} smaller ones: {saved} (--json lists all)", markup=False)


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


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in columns:
        table.add_column(
            name.lstrip(">"), justify="right" if name.startswith(">") else "left", no_wrap=name != "why", overflow="fold"
        )
    return table


def _alive(found: Explanation) -> Table:
    table = _table("buffer", ">bytes", ">share", "why")
    for a in found.alive:
        table.add_row(a.buffer, f"{a.nbytes:,}", f"{100 * a.nbytes / max(found.lower_bound, 1):.1f}%", a.why)
    return table


def _runners_up(found: Explanation) -> Table:
    table = _table("step", "phase", ">bytes alive", ">below the peak")
    for load in found.runners_up:
        table.add_row(load.step, load.phase, f"{load.nbytes:,}", f"{found.lower_bound - load.nbytes:,}")
    return table


def _saved(found: Explanation, base: Explanation) -> list[str]:
    return [
        "",
        f"Reuse saves {found.saved:,} B ({format_bytes(found.saved)}): {format_bytes(found.slots)} of buffers lie on "
        f"{format_bytes(found.peak)}.",
        f"Sharing the histories saves {base.peak - found.peak:,} B ({format_bytes(base.peak - found.peak)}): with --reuse off "
        f"the segment is {format_bytes(base.peak)}.",
    ]


def _groups(found: Explanation) -> list[list[Reuse]]:
    """Reuses of the same roles and bytes in different layers together; most saved bytes first."""
    groups: dict[tuple[str, str, int, int], list[Reuse]] = {}
    for reuse in found.reuses:
        groups.setdefault((role_of(reuse.early), role_of(reuse.late), reuse.start, reuse.saved), []).append(reuse)
    return sorted(groups.values(), key=lambda g: (-len(g) * g[0].saved, g[0].late, g[0].early))


def _reuse(group: list[Reuse]) -> list[str]:
    reuse, times = group[0], f" ({len(group)} times like this)" if len(group) > 1 else ""
    lines = [f"  {format_bytes(reuse.saved):>10}  {reuse.late} on {reuse.early}, bytes [{reuse.start:,}, {reuse.stop:,}){times}"]
    if reuse.chain:
        fences = [name for name in reuse.fences if name not in reuse.chain]
        meet = f"; all ranks meet at {', '.join(fences)}" if fences else ""
        lines.append(f"{'':14}{' -> '.join(reuse.chain)}{meet}")
    return lines
