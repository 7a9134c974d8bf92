"""The answer of ``palimpsest fit`` as a person reads it: the number first, then what binds, then where the bytes go."""

import sys
from fractions import Fraction

from rich.console import Console
from rich.table import Table

from palimpsest.core.geometry import Geometry
from palimpsest.core.units import format_bytes, format_count
from palimpsest.plan.account import Role
from palimpsest.plan.fit import Fit
from palimpsest.plan.fold import role_of

WIDTH = 100
#: roles and buffers shown; the rest is summed
MOST = 12


def show(geometry: Geometry, fit: Fit, scope: str, enough: int = 0) -> None:
    """Print the answer to stdout; ``enough`` is a rank count that would fit, or 0."""
    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False, soft_wrap=False)
    for line in _answer(geometry, fit, scope):
        console.print(line, markup=False)
    if fit.fits:
        for line in _why(geometry, fit):
            console.print(line, markup=False)
        console.print()
        console.print(_slots(fit))
        ratio = fit.peak / max(fit.lower_bound, 1)
        console.print(f"\nworkspace peak: {_size(fit.peak)} at {fit.peak_step}, {ratio:.4f} of the lower bound", markup=False)
        console.print(f"placed by {fit.placer}, plan digest {fit.digest[:16]}", markup=False)
    else:
        if fit.cannot:
            total = sum(nbytes for _, nbytes in fit.cannot)
            console.print(
                f"the smallest set that cannot fit: {len(fit.cannot)} buffers, together {_size(total)}, all needed at once\n"
            )
            console.print(_cannot(fit))
        console.print(_next_step(fit, enough), markup=False)
    for note in fit.notes:
        console.print(f"note: {note}", markup=False)


def _size(count: int) -> str:
    return format_bytes(count)


def _answer(geometry: Geometry, fit: Fit, scope: str) -> list[str]:
    limits, budget = fit.limits, fit.budget
    ranks = f"{limits.ranks} rank{'s' if limits.ranks > 1 else ''}"
    reserve = f" less {_size(budget.reserve)} reserved" if budget.reserve else ""
    lines = [f"{geometry.name}, {scope}: {ranks} of {_size(budget.memory)}{reserve}", ""]
    if not fit.fits:
        return [
            *lines,
            f"does not fit: a context of {limits.tokens:,} tokens with chunks of {limits.rows:,} rows on {ranks} needs",
            f"{_size(fit.mapped)} per rank, {_size(-fit.spare)} more than the {_size(budget.usable)} there are",
        ]
    answers = {
        "context": f"context:  {limits.tokens:,} tokens ({format_count(limits.tokens)}), with chunks of {limits.rows:,} rows",
        "rows": f"rows:     {limits.rows:,} per chunk, with a context of {limits.tokens:,} tokens",
        "ranks": f"ranks:    {limits.ranks}, for a context of {limits.tokens:,} tokens and chunks of {limits.rows:,} rows",
    }
    return [*lines, answers[fit.asked]]


def _why(geometry: Geometry, fit: Fit) -> list[str]:
    limits, lines = fit.limits, []
    if limits.tokens > geometry.max_context:
        lines.append(f"          the model itself declares {geometry.max_context:,}; memory is not what limits it")
    lines.append(f"memory:   {_size(fit.mapped)} mapped per rank, {_size(fit.spare)} left")
    if fit.grows:
        total = sum((Fraction(g.each) for g in fit.grows), Fraction(0))
        first, unit = fit.grows[0], "token" if fit.asked == "context" else "row"
        lines.append(f"binding:  {first.role}, {_number(Fraction(first.each))} B per {unit} of {_number(total)} in all, per rank")
    if fit.capped:
        lines.append(f"limit:    {fit.capped}")
    elif fit.next_gib:
        now = limits.tokens if fit.asked == "context" else limits.rows
        what = "tokens" if fit.asked == "context" else "rows"
        lines.append(f"next GiB: {fit.next_gib:,} {what}, {fit.next_gib - now:,} more")
    return lines


def _number(value: Fraction) -> str:
    return f"{int(value):,}" if value.denominator == 1 else f"{float(value):,.2f}"


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=bool(columns))
    for name in columns:
        table.add_column(name.lstrip(">"), justify="right" if name.startswith(">") else "left", no_wrap=True, overflow="ellipsis")
    return table


def _slots(fit: Fit) -> Table:
    table = _table("where the bytes of one rank go (# is a layer)", "class", ">buffers", ">bytes held", ">")
    shown = [r for r in fit.slots if r.kind != "reusable"]
    rows: list[Role | tuple[str, str, int, int]] = [*shown[:MOST]]
    if rest := shown[MOST:]:
        rows.append((f"{len(rest)} smaller", "", sum(r.count for r in rest), sum(r.held for r in rest)))
    reusable = [r for r in fit.slots if r.kind == "reusable"]
    rows.append(("shared workspace", "reusable", sum(r.count for r in reusable), fit.peak))
    for row in rows:
        name, kind, count, held = (row.role, row.kind, row.count, row.held) if isinstance(row, Role) else row
        table.add_row(name, kind, f"{count:,}", f"{held:,}", _size(held))
    table.add_row("total, logical", "", "", f"{fit.logical:,}", _size(fit.logical))
    table.add_row("total, mapped", "", "", f"{fit.mapped:,}", _size(fit.mapped), style="bold")
    return table


def _cannot(fit: Fit) -> Table:
    """The set that cannot fit, by role."""
    table = _table("buffer (# is a layer)", ">how many", ">bytes", ">")
    by_role: dict[str, list[int]] = {}
    for name, nbytes in fit.cannot:
        by_role.setdefault(role_of(name), []).append(nbytes)
    count = {r.role: r.count for r in fit.slots}
    for role, sizes in sorted(by_role.items(), key=lambda item: -sum(item[1])):
        of = f"{len(sizes)} of {count[role]}" if role in count else f"{len(sizes)}"
        table.add_row(role, of, f"{sum(sizes):,}", _size(sum(sizes)))
    return table


def _next_step(fit: Fit, enough: int) -> str:
    if enough:
        return f"next step: --ranks {enough} is enough for this context and these rows"
    if fit.asked == "ranks":
        return "next step: fewer rows (--rows), a smaller weight format (--weights), or a shorter context"
    return "next step: fewer rows (--rows), a smaller weight format (--weights), or devices with more memory"
