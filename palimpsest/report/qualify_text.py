"""A qualification as a person reads it: verdict, claim, case x gate matrix, where the bytes were, allocation, ties, times.

Works on the value of record.json and the lines of flags.jsonl; computes nothing that decides anything.
"""

import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from palimpsest.core.units import format_bytes, format_count

WIDTH = 120
_ORDER = ("PASS", "INCONCLUSIVE", "FAIL", "ERROR")
_MARK = {"PASS": ".", "INCONCLUSIVE": "?", "FAIL": "F", "ERROR": "E"}
_STYLE = {"PASS": "green", "INCONCLUSIVE": "yellow", "FAIL": "red", "ERROR": "bold red"}

Tree = dict[str, Any]


def console_of(stream: Any) -> Console:
    """A console on ``stream``: its own width on a terminal, a fixed one elsewhere."""
    return Console(file=stream, width=None if stream.isatty() else WIDTH, highlight=False, soft_wrap=False)


def show(record: Tree, flags: list[Tree], folder: str) -> None:
    """Print the report to stdout."""
    console = console_of(sys.stdout)
    _head(console, record)
    _kernels(console, record)
    _once(console, record, flags)
    console.print(_matrix(record, flags))
    console.print("cases: " + ", ".join(f"{c['id']} {c['name']}" for c in record["cases"]), style="dim", markup=False)
    console.print(f"{_MARK['PASS']} pass   ? inconclusive   F fail   E error   blank: nothing to check there\n", style="dim")
    _failures(console, flags)
    if not record["failure"]:
        _bytes(console, record)
        _selection(console, record)
        _measured(console, record)
    _licence(console, record)
    for text in record["non_claims"]:
        console.print(text, style="dim", markup=False)
    console.print(f"time {record['elapsed_ns']['total'] / 1e9:.1f} s{_phases(record)}; evidence {folder}", markup=False)
    console.print(f"check it: palimpsest verify {folder}\n", markup=False)
    console.print(headline(record), style=_STYLE[record["gates_verdict"]])


def _phases(record: Tree) -> str:
    """What the ranks spent it on: the longest rank's seconds in each phase, the cases' own added up."""
    spent: dict[str, int] = {}
    cases = {case["id"] for case in record["cases"]}
    for name, ns in record["elapsed_ns"].items():
        first, _, phase = name.partition(" ")
        if name != "total" and (phase or first not in cases):
            spent[phase or first] = spent.get(phase or first, 0) + ns
    shown = ", ".join(f"{name} {ns / 1e9:.0f}" for name, ns in sorted(spent.items(), key=lambda item: -item[1]) if ns >= 5e8)
    return f" ({shown})" if shown else ""


def headline(record: Tree) -> str:
    """The verdict in one line."""
    gates = record["gates_verdict"]
    if gates == "PASS" and record["verdict"] != gates:
        return f"PASS (uncommitted source: recorded as {record['verdict']})"
    return f"{gates}: {record['failure']}" if record["failure"] else gates


def _head(console: Console, record: Tree) -> None:
    limits, point = record["limits"], record["checkpoint"]
    made = ", a synthetic checkpoint made for this run" if point["synthetic"] else ""
    console.print(f"{point['name']} layer {point['layer']}{made}", style="bold", markup=False)
    console.print(
        f"profile {record['profile']}: {format_count(limits['tokens'])} tokens, {limits['rows']} rows, {limits['ranks']} ranks, "
        f"page {limits['page']}; "
        f"engine {record['engine']} ({record['numerics']['name']}); seed {record['seeds']['master']}",
        markup=False,
    )
    sparse = record["sparse"]
    console.print(f"sparse path executed on layers {sparse['layers']}, rows selecting: {sparse['rows_selecting']}", markup=False)
    console.print(f"claim: {record['claim']}\n", markup=False)


def _once(console: Console, record: Tree, flags: list[Tree]) -> None:
    """Gates proved once, when both arrangements are prepared and by replays of their own: worst verdict over the ranks."""
    worst: dict[str, str] = {}
    for f in flags:
        if f["case"] == "seal":
            worst[f["gate"]] = max(worst.get(f["gate"], "PASS"), f["verdict"], key=_ORDER.index)
    for verdict in reversed(_ORDER):
        found = [gate for gate in record["gates"] if worst.get(gate) == verdict]
        if found:
            console.print(f"once, {verdict}: {' '.join(found)}", style=_STYLE[verdict], markup=False)


def _matrix(record: Tree, flags: list[Tree]) -> Table:
    """Worst verdict over the ranks of each case and gate."""
    gates = [g for g in record["gates"] if any(f["gate"] == g and f["case"] != "seal" for f in flags)]
    worst: dict[tuple[str, str], str] = {}
    for f in flags:
        key = f["case"], f["gate"]
        worst[key] = max(worst.get(key, "PASS"), f["verdict"], key=_ORDER.index)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("case", no_wrap=True)
    for gate in gates:
        table.add_column(gate, justify="center", no_wrap=True)
    for case in (c["id"] for c in record["cases"]):
        marks = [(worst.get((case, gate)), gate) for gate in gates]
        table.add_row(case, *(f"[{_STYLE[v]}]{_MARK[v]}[/]" if v else "" for v, _ in marks))
    return table


def _failures(console: Console, flags: list[Tree]) -> None:
    """The first failures, worst first."""
    bad = sorted((f for f in flags if f["verdict"] != "PASS"), key=lambda f: -_ORDER.index(f["verdict"]))
    for f in bad[:12]:
        console.print(
            f"{f['verdict']} {f['case']}/rank{f['rank']}/{f['gate']}: {f['first_failure']}",
            style=_STYLE[f["verdict"]],
            markup=False,
        )
    if len(bad) > 12:
        console.print(f"... and {len(bad) - 12} more cells that did not pass; see flags.jsonl", markup=False)


def _bytes(console: Console, record: Tree) -> None:
    """Where the histories were, and both kinds of bytes in both arrangements."""
    where, found = record["bytes"], record["allocation"]
    table = Table(
        title="bytes of one rank", title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0)
    )
    for column in ("", "base (histories apart)", "alias (index history on the latent one)", "difference"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    rows = (
        ("index history at offset", where["base_index_offset"], where["alias_index_offset"], None),
        ("latent history at offset", where["alias_latent_offset"], where["alias_latent_offset"], None),
        ("logical bytes", found["logical_base"], found["logical_alias"], found["logical_difference"]),
        ("mapped bytes", sum(found["mapped_base"].values()), sum(found["mapped_alias"].values()), None),
        ("proportional set size", found["pss_base"], found["pss_alias"], None),
    )
    for name, base, alias, difference in rows:
        moved = base - alias if difference is None and "offset" not in name else difference
        table.add_row(name, f"{base:,}", f"{alias:,}", "" if moved is None else f"{moved:,}")
    console.print(table)
    index, tokens = where["index_history"], record["limits"]["tokens"]
    console.print(
        f"index history {index:,} B = {index // tokens} x {tokens:,} tokens ({format_bytes(index)}); saved exactly that\n",
        markup=False,
    )


def _kernels(console: Console, record: Tree) -> None:
    """Which kernels came from outside, and who judged them."""
    for kernel in record["kernels"]:
        extra, without = ", ".join(kernel["gates_extra"]), ", ".join(kernel["gates_without"])
        judged = f"judged by {extra or 'the usual gates'}" + (f" instead of {without}" if without else "")
        console.print(f"{kernel['op']} was {kernel['name']} ({kernel['form']} form): {judged}", markup=False)


def _selection(console: Console, record: Tree) -> None:
    chosen, output = record["selection"], record["output"]
    console.print(
        f"selection: {chosen['rows_compared']:,} rows compared, {chosen['rows_changed']} changed, {chosen['exact_tie']} exact "
        f"and {chosen['rounded_tie']} rounded ties certified; {chosen['exact_scores']:,} scores and "
        f"{chosen['lattice_rows']:,} lattice rows checked "
        "against exact arithmetic",
        markup=False,
    )
    worst = output["worst_over_bound"]
    shown = "none" if worst is None else f"{float.fromhex(worst):.3f}"
    console.print(
        f"output: {output['tail_rows']:,} rows equal the recorded tail; {output['oracle_coordinates']:,} coordinates within the "
        "oracle's bound, "
        f"largest difference over bound {shown}",
        markup=False,
    )


def _measured(console: Console, record: Tree) -> None:
    """Tie density, overlap of neighbouring rows, and oracle power: measured by case, deciding nothing."""
    table = Table(title="measured", title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    columns = (
        "case",
        "rows selecting",
        "tied at the cutoff",
        "of these at zero",
        "ids in these ties",
        "needed",
        "neighbours share",
        "oracle A sees",
        "oracle B sees",
        "one bf16 value",
    )
    for column in columns:
        table.add_column(column, justify="left" if column == "case" else "right")
    for case in record["cases"]:
        d, p = record["density"].get(case["id"], {}), record["power"].get(case["id"], {})
        if not d.get("rows"):
            continue
        table.add_row(
            case["id"],
            f"{d['selecting']:,}",
            f"{d['tied']:,}",
            f"{d['zero_tied']:,}",
            f"{d['members']:,}",
            f"{d['needed']:,}",
            _share(d["shared"], d["of"]),
            _share(p["O2"], p["tried"]),
            _share(p["O3"], p["tried"]),
            _share(p["unique"], p["coordinates"]),
        )
    console.print(table)
    console.print(
        "neighbours: ids a row shares with the row before it; oracles: single wrong records that would be betrayed for certain\n",
        style="dim",
        markup=False,
    )


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def _licence(console: Console, record: Tree) -> None:
    if record["self_test"] is None:
        console.print(
            "not licensed on this machine: no self-test of this source was found; run: palimpsest qualify --self-test",
            style="yellow",
            markup=False,
        )
    else:
        console.print(f"licensed by self-test {record['self_test'][:16]}", markup=False)
    absent = [gate for gate in record["gates_absent"] if gate != "V4"]
    if absent:
        console.print(f"gates absent: {', '.join(absent)}", markup=False)


def show_verified(found: Any, folder: str) -> None:
    """Print what ``verify`` derived."""
    console = console_of(sys.stdout)
    console.print(
        f"{folder}: run {found.run_id}, {found.cells} cells, {found.certificates} tie certificates replayed", markup=False
    )
    console.print(f"plan {found.plan_digest}", markup=False)
    console.print(f"gates absent: {', '.join(found.gates_absent)}", markup=False)
    for text in found.failures[:12]:
        console.print(text, style="red", markup=False)
    capped = " (uncommitted source)" if found.verdict != found.gates_verdict else ""
    console.print(f"verdict re-derived: {found.verdict}{capped}; all cells: {found.gates_verdict}", style=_STYLE[found.verdict])
