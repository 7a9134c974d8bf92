"""The comparison with other engines as a person reads it: one row per engine, then every cell with formula, file and reason."""

import argparse
import sys

from rich.console import Console
from rich.table import Table

from palimpsest.core.spec import Limits
from palimpsest.core.units import format_bytes, format_count, parse_bytes
from palimpsest.plan.engines_cell import MIB, SLOTS, Cell, Deployment, EngineBill

#: columns when the output is not a terminal
WIDTH = 100


def add_compare_arguments(parser: argparse.ArgumentParser) -> None:
    """``--compare`` and what some engines' formulas need to know, for a verb that plans."""
    parser.add_argument(
        "--compare", action="store_true", help="what vLLM, SGLang, TensorRT-LLM, lmdeploy and llama.cpp would take"
    )
    parser.add_argument("--device-memory", metavar="SIZE", help="with --compare: memory of one device, for SGLang's score budget")
    parser.add_argument("--free-memory", metavar="SIZE", help="with --compare: what is free on it when the first prefill runs")


def deployment_of(args: argparse.Namespace) -> Deployment:
    """The deployment that ``add_compare_arguments`` read. Raises BadConfig."""
    device, free = args.device_memory, args.free_memory
    return Deployment(
        device_bytes=parse_bytes(device, "--device-memory") if device else None,
        free_bytes=parse_bytes(free, "--free-memory") if free else None,
    )


def render_compare(bills: tuple[EngineBill, ...], name: str, limits: Limits) -> None:
    """Print the comparison to stdout; ``bills`` comes from ``plan.engines.compare_rows``."""
    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    console.print(
        f"What each engine allocates for {name}, MiB: {format_count(limits.tokens)} tokens, {limits.rows:,} rows, one of "
        f"{limits.ranks} ranks",
        style="bold",
        markup=False,
    )
    console.print(_summary(bills))
    console.print(
        "~ hidden: a kernel or the caching allocator takes it unseen.  ? not computable: the reason is below.\n", markup=False
    )
    for bill in bills:
        console.print(f"{bill.engine} {bill.version}", style="bold", markup=False)
        console.print(f"  histories share bytes: {bill.overlap}", markup=False)
        for cell in bill.cells:
            for line in _cell(cell):
                console.print(line, markup=False, soft_wrap=True)
        console.print()


def _summary(bills: tuple[EngineBill, ...]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("engine", no_wrap=True)
    for slot in SLOTS:
        table.add_column(slot, justify="right", no_wrap=True)
    for bill in bills:
        table.add_row(
            f"{bill.engine} {bill.version}" if bill.engine != "ours" else "ours", *(_short(bill.cell(s)) for s in SLOTS)
        )
    return table


def _short(cell: Cell) -> str:
    if cell.nbytes is None:
        return "?"
    size = cell.nbytes / MIB
    text = f"{size:,.0f}" if size == int(size) or size >= 1000 else f"{size:,.1f}"
    return f"~{text}" if cell.kind == "hidden" else text


def _cell(cell: Cell) -> list[str]:
    """Slot, number, kind and formula; then symbols, file and note."""
    if cell.nbytes is None:
        return [f"  {cell.slot:<14} not computable: {cell.note}", *([f"{'':17}{cell.source}"] if cell.source else [])]
    lines = [f"  {cell.slot:<14} {format_bytes(cell.nbytes)} = {cell.nbytes:,} B, {cell.kind}: {cell.formula}"]
    if cell.symbols:
        lines.append(f"{'':17}{', '.join(f'{name} = {value:,}' for name, value in cell.symbols)}")
    lines.append(f"{'':17}{cell.source}")
    if cell.note:
        lines.append(f"{'':17}{cell.note}")
    return lines
