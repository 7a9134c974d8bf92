"""A qualification as one HTML file: no network, no script, light and dark, made from the evidence folder at any time.

The folder is read by the independent reader first, and the verdict on the page is the one it derived. Everything in a record
may come from strangers: the template engine escapes every value, and the page's own policy forbids scripts and requests. jinja2
is the optional extra ``report``.
"""

import importlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from palimpsest.core.errors import BadConfig, Unavailable
from palimpsest.core.units import format_bytes, format_count
from palimpsest.prove.gates import GATES, VERDICTS
from palimpsest.prove.verify import Verified, verify
from palimpsest.report.picture import COLOURS, replace_file
from palimpsest.report.qualify_text import headline

Tree = dict[str, Any]

#: rows of a long table that the page shows; the files hold all of them
MOST_ROWS = 200
#: the drawing, in its own units: width, height, left margin, space above and below the bars
_WIDTH, _HEIGHT, _LEFT, _ABOVE, _BELOW = 1180, 236, 76, 22, 8
_HISTORIES = ("index_history", "latent_history")
_MARKS = {"PASS": "\u00b7", "INCONCLUSIVE": "?", "FAIL": "F", "ERROR": "E"}


def write_report(folder: Path, path: Path) -> Path:
    """Write the report of an evidence folder to ``path``, all or nothing; returns the path.

    Raises EvidenceError when the folder does not verify, Unavailable without the ``report`` extra, BadConfig when the target's
    folder is missing.
    """
    ready(path)
    found = verify(folder)
    record = json.loads((folder / "record.json").read_text())
    flags = _lines(folder / "flags.jsonl")
    ties = _lines(folder / "ties.jsonl")
    return replace_file(path, render(found, record, flags, ties, folder.name).encode())


def ready(path: Path) -> None:
    """Raise what ``write_report`` would raise for want of a library or a folder, before an hour of work."""
    _library()
    if not path.absolute().parent.is_dir():
        raise BadConfig(f"folder {str(path.parent)!r} does not exist; make it first")


def _library() -> Any:
    try:
        return importlib.import_module("jinja2")
    except ModuleNotFoundError:
        raise Unavailable(
            "the HTML report needs jinja2, which is not installed; pip install 'palimpsest[report]' (or leave out --html)"
        ) from None


def render(found: Verified, record: Tree, flags: list[Tree], ties: list[Tree], folder: str) -> str:
    """The page's text, from what the reader found and the values of record.json, flags.jsonl and ties.jsonl; ``folder`` is
    shown.
    """
    jinja2 = _library()
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("palimpsest.report", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"bytes": format_bytes, "count": format_count}
    text: str = environment.get_template("qualify.html.j2").render(_page(found, record, flags, ties, folder))
    return text


def _lines(path: Path) -> list[Tree]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _page(found: Verified, record: Tree, flags: list[Tree], ties: list[Tree], folder: str) -> Tree:
    """Everything the template shows."""
    gates = [g for g in GATES if any(f["gate"] == g for f in flags)]
    bad = sorted((f for f in flags if f["verdict"] != "PASS"), key=lambda f: -VERDICTS.index(f["verdict"]))
    return {
        "r": record,
        "found": found,
        "headline": headline(record),
        "folder": folder,
        "marks": _MARKS,
        "gates": gates,
        "about": {g: GATES[g] for g in GATES},
        "rows": _rows(record, flags, gates),
        "tally": _tally(flags),
        "failures": bad[:MOST_ROWS],
        "failed": len(bad),
        "panels": [] if record["failure"] else _panels(record),
        "legend": _legend(),
        "allocation": [] if record["failure"] else _allocation(record),
        "ties": [_tie(line) for line in ties[:MOST_ROWS]],
        "tie_count": len(ties),
        "selection": _figures(record["selection"], _SELECTION),
        "output": _figures(record["output"], _OUTPUT),
        "measured": _measured(record),
        "times": _times(record),
        "most": MOST_ROWS,
    }


def _tally(flags: list[Tree]) -> dict[str, int]:
    return {verdict: sum(f["verdict"] == verdict for f in flags) for verdict in VERDICTS}


@dataclass(frozen=True)
class Square:
    """One verdict of the matrix: the worst of ``cells``; None where there is nothing to check."""

    verdict: str | None
    title: str


def _square(cells: list[Tree], what: str) -> Square:
    if not cells:
        return Square(None, "")
    worst = max(cells, key=lambda f: VERDICTS.index(f["verdict"]))
    gate = GATES[worst["gate"]]
    checked, expected = sum(f["n_checked"] for f in cells), sum(f["n_expected"] for f in cells)
    text = f"{what} {gate.id} {worst['verdict']}: {checked:,} of {expected:,} {gate.unit}. {gate.proves}"
    if worst["first_failure"]:
        text += f". First failure, rank {worst['rank']}: {worst['first_failure']}"
    return Square(worst["verdict"], text)


def _rows(record: Tree, flags: list[Tree], gates: list[str]) -> list[Tree]:
    """One row a case, its squares over all ranks, and one line of squares a rank."""
    index: dict[tuple[str, str], list[Tree]] = {}
    for f in flags:
        index.setdefault((f["case"], f["gate"]), []).append(f)
    names = {"seal": "once, at the seal"} | {case["id"]: case["name"] for case in record["cases"]}
    ranks = range(record["limits"]["ranks"])
    made = []
    for case, name in names.items():
        cells = {gate: index.get((case, gate), []) for gate in gates}
        by_rank = [
            (rank, [_square([f for f in cells[gate] if f["rank"] == rank], f"{case} rank {rank}") for gate in gates])
            for rank in ranks
        ]
        whole = [_square(cells[gate], case) for gate in gates]
        verdict = max((s.verdict for s in whole if s.verdict), key=VERDICTS.index, default="ERROR")
        made.append(
            {
                "id": case,
                "name": name,
                "whole": whole,
                "ranks": by_rank,
                "verdict": verdict,
                "about": _about(record, case),
                "open": False,
            }
        )
    # the first case that did not pass shows its ranks at once
    for row in [row for row in made if row["verdict"] != "PASS"][:1]:
        row["open"] = True
    return made


def _about(record: Tree, case: str) -> str:
    for found in record["cases"]:
        if found["id"] == case:
            steps = ", ".join(f"{s['rows']:,} rows after {s['history']:,} tokens ({s['regime']})" for s in found["steps"])
            return f"{steps}; poison {', '.join(found['poison'])}"
    return "plans, addresses, mappings and source, checked once per rank"


def _tone(name: str) -> str:
    tones = list(COLOURS)
    known = {_HISTORIES[0]: tones[0], _HISTORIES[1]: tones[1], "hidden": tones[2], "output": tones[2]}
    return tones[4] if name.endswith(".scratch") else known.get(name, tones[3])


def _legend() -> list[tuple[str, str]]:
    names = ("index history", "latent history", "inputs and outputs", "rows between steps", "scratch of one step")
    return [(fill, name) for (fill, _), name in zip(COLOURS.values(), names, strict=True)]


def _panels(record: Tree) -> list[Tree]:
    """The reusable segment of each arrangement as rectangles: steps across, bytes up."""
    steps = record["steps"]
    top = max(plan["segments"].get("reusable", 0) for plan in record["plan"].values()) or 1
    wide, high = (_WIDTH - _LEFT) / (len(steps) + 2), _HEIGHT - _ABOVE - _BELOW
    made = []
    for name, said in (("base", "histories apart"), ("alias", "index history on the head of the latent history")):
        plan = record["plan"][name]
        rects = []
        # the large ones first, so that they do not hide the small ones; the histories last
        for buffer, view in sorted(plan["views"].items(), key=lambda item: (item[0] in _HISTORIES, -item[1]["bytes"])):
            if view["segment"] == "reusable":
                rects.append(_rect(buffer, view, steps, wide, high / top))
        peak = plan["segments"].get("reusable", 0)
        ticks = [(_HEIGHT - _BELOW - high * part / 4, format_bytes(top * part // 4)) for part in range(5)]
        made.append(
            {
                "name": name,
                "said": said,
                "rects": rects,
                "peak": peak,
                "line": _HEIGHT - _BELOW - high * peak / top,
                "ticks": ticks,
            }
        )
    names = [(_LEFT + wide * (i + 1) + wide / 2, step) for i, step in enumerate(steps)]
    return [panel | {"width": _WIDTH, "height": _HEIGHT, "left": _LEFT, "steps": names} for panel in made]


def _rect(buffer: str, view: Tree, steps: list[str], wide: float, scale: float) -> Tree:
    """One buffer. ``wide``: units of a step; ``scale``: units of a byte."""
    first, last = view["steps"]
    w, h = wide * (last - first + 1), max(5.0 if buffer in _HISTORIES else 1.0, scale * view["bytes"])
    fill, ink = COLOURS[_tone(buffer)]
    label = f"{buffer} {format_bytes(view['bytes'])}"
    alive = f"{_step(steps, first)} to {_step(steps, last)}"
    fits = h >= 13 and w >= 6.4 * len(label)
    return {
        "x": _LEFT + wide * first,
        "y": _HEIGHT - _BELOW - scale * view["offset"] - h,
        "w": w,
        "h": h,
        "fill": fill,
        "ink": ink,
        "label": label if fits else "",
        "beside": label if buffer in _HISTORIES and not fits else "",
        "title": f"{buffer}: {view['bytes']:,} B at offset {view['offset']:,}, alive {alive}",
    }


def _step(steps: list[str], number: int) -> str:
    return "the start" if number == 0 else "the end" if number > len(steps) else steps[number - 1]


def _allocation(record: Tree) -> list[tuple[str, int, int, int | None]]:
    """(what, base, alias, base minus alias)"""
    found, where = record["allocation"], record["bytes"]
    mapped = sum(found["mapped_base"].values()), sum(found["mapped_alias"].values())
    return [
        ("index history at offset", where["base_index_offset"], where["alias_index_offset"], None),
        ("latent history at offset", where["alias_latent_offset"], where["alias_latent_offset"], None),
        ("logical bytes", found["logical_base"], found["logical_alias"], found["logical_difference"]),
        ("mapped bytes", *mapped, mapped[0] - mapped[1]),
        ("proportional set size", found["pss_base"], found["pss_alias"], found["pss_base"] - found["pss_alias"]),
    ]


def _tie(line: Tree) -> Tree:
    """A certificate as one row."""
    c = line["certificate"]
    return {
        "case": line["case"],
        "replay": line["replay"],
        "row": c["row"],
        "rank": c["rank"],
        "between": " and ".join(line["between"]),
        "visible": c["visible"],
        "above": c["above"],
        "equal": c["equal"],
        "needed": c["needed"],
        "ids": len(c["members"]) // 2,
        "score": f"{c['kth']['mantissa']} \u00b7 2^{c['kth']['exponent']}",
        "classes": ", ".join(sorted({m["class"] for m in c["members"]})),
    }


#: key of record.output -> what a reader calls it
_OUTPUT = {
    "tail_rows": "rows equal to the recorded tail, byte for byte",
    "oracle_coordinates": "coordinates inside the oracle's bound",
    "worst_over_bound": "largest difference over its bound",
}


#: the same for record.selection
_SELECTION = {
    "rows_compared": "rows compared between the arrangements",
    "rows_changed": "rows whose ids differ between them",
    "exact_tie": "ids that differ, proved exact ties",
    "rounded_tie": "ids that differ, ties of rounded scores",
    "rows_reordered": "rows where a foreign selector chose other ties than the lowest ids",
    "rows_selecting": "rows with more tokens than they may select",
    "exact_scores": "scores checked against exact ones",
    "lattice_rows": "rows whose scores must be exact",
}


def _figures(found: Tree, names: Mapping[str, str]) -> list[tuple[str, str]]:
    """(what, value): the named ones in the order of ``names``, then what a later version added."""
    order = [name for name in names if name in found] + sorted(name for name in found if name not in names)
    return [(names.get(name, name.replace("_", " ")), _shown(found[name])) for name in order]


def _shown(value: Any) -> str:
    if isinstance(value, str) and value.startswith(("0x", "-0x")):
        return f"{float.fromhex(value):.4g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return "none" if value is None else str(value)


def _measured(record: Tree) -> list[list[str]]:
    """Per case: tie density, overlap of neighbouring rows, oracle power."""
    rows = []
    for case in record["cases"]:
        d, p = record["density"].get(case["id"], {}), record["power"].get(case["id"], {})
        if d.get("rows"):
            counts = [f"{d[name]:,}" for name in ("selecting", "tied", "zero_tied", "members", "needed")]
            shares = [(d["shared"], d["of"]), (p["O2"], p["tried"]), (p["O3"], p["tried"]), (p["unique"], p["coordinates"])]
            rows.append([case["id"], *counts, *(f"{100 * part / whole:.1f} %" if whole else "-" for part, whole in shares)])
    return rows


def _times(record: Tree) -> list[tuple[str, float, float]]:
    """(case, seconds, share of the longest in percent)"""
    cases = {case["id"] for case in record["cases"]}
    spent = {name: ns / 1e9 for name, ns in record["elapsed_ns"].items() if name in cases}
    longest = max(_positive(spent.values()), default=1.0)
    return [(name, seconds, 100 * seconds / longest) for name, seconds in sorted(spent.items())]


def _positive(values: Iterable[float]) -> list[float]:
    return [value for value in values if value > 0]
