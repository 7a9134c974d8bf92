"""The picture of a plan: offset against step, both arrangements one above the other, live bytes and lower bound beneath.

``write_html`` makes one file that needs no network (plotly draws it, its script is inside); ``write_image`` makes an SVG or PNG
for a slide (matplotlib). Both libraries are the optional extra ``report``. Names may come from strangers: every text is escaped.
"""

import html
import importlib
import json
import os
import tempfile
import textwrap
from pathlib import Path
from typing import Any

from palimpsest.core.errors import BadConfig, Unavailable
from palimpsest.core.spec import Program
from palimpsest.core.units import format_bytes
from palimpsest.plan.plan import Plan
from palimpsest.report.page import CONFIG, EDGES, PAGE, POST_SCRIPT, THEMES
from palimpsest.report.scene import MOST_LABELS, TONES, Panel, Rect, Scene, scene

MIB = 1 << 20
#: fill and text colour of each tone; readable on a light and on a dark page
COLOURS = {
    "early history": ("#e6761b", "#1a1205"),
    "late history": ("#2aa47f", "#04150f"),
    "inputs and outputs": ("#a79bd8", "#14102b"),
    "rows between steps": ("#a9cbe4", "#0d1b26"),
    "scratch of one step": ("#c9ccd1", "#17191c"),
}
PEAK, CURVE, BAND = "#d6403a", "#4c8eda", "rgba(128,134,144,0.10)"
#: most rectangles a browser still pans smoothly
MOST_RECTS = 20_000


def write_html(program: Program, on: Plan, off: Plan, path: str | Path) -> Path:
    """Write the interactive picture to ``path``, all or nothing; returns the path.

    Raises Unavailable without the ``report`` extra, BadConfig for a program too large to draw or a folder that is missing.
    """
    plotly = _library("plotly.io")
    seen = _drawable(program, on, off)
    body = plotly.to_html(
        _figure(seen), full_html=False, include_plotlyjs=True, div_id="picture", config=CONFIG, validate=False,
        post_script=POST_SCRIPT.replace("THEMES", json.dumps(THEMES)).replace("EDGES", json.dumps(EDGES)), default_height="100%",
    )  # fmt: skip
    text = PAGE.format(
        title=html.escape(seen.title), subtitle=html.escape(seen.subtitle), body=body, digest=html.escape(seen.digest),
        rows=_table(seen),
    )  # fmt: skip
    return replace_file(path, text.encode("utf-8"))


def write_image(program: Program, on: Plan, off: Plan, path: str | Path) -> Path:
    """Write the picture to ``path`` as SVG or PNG by its ending, all or nothing; returns the path.

    Raises Unavailable without the ``report`` extra, BadConfig for another ending.
    """
    kind = Path(path).suffix.lower().lstrip(".")
    if kind not in ("svg", "png"):
        raise BadConfig(f"picture {str(path)!r} ends in {Path(path).suffix!r}; it must end in .svg or .png (or use --html)")
    _library("matplotlib")
    from palimpsest.report.slide import draw

    return replace_file(path, draw(_drawable(program, on, off), kind, COLOURS))


def add_picture_arguments(parser: Any) -> None:
    """``--html``, ``--svg`` and ``--png`` for a verb that plans."""
    parser.add_argument("--html", metavar="FILE", help="write an interactive picture of both arrangements (one file, no network)")
    parser.add_argument("--svg", metavar="FILE", help="write the picture for a slide, as SVG")
    parser.add_argument("--png", metavar="FILE", help="write the picture for a slide, as PNG")


def write_pictures(args: Any, program: Program, on: Plan, off: Plan) -> list[Path]:
    """Write every picture that ``add_picture_arguments`` took a path for; returns the paths."""
    written = []
    for flag in ("svg", "png"):
        path = getattr(args, flag)
        if path and Path(path).suffix.lower() != f".{flag}":
            raise BadConfig(f"--{flag} {path!r} must end in .{flag}")
    if args.html:
        written.append(write_html(program, on, off, args.html))
    written += [write_image(program, on, off, path) for path in (args.svg, args.png) if path]
    return written


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        package = name.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        raise Unavailable(
            f"pictures need {package}, which is not installed; pip install 'palimpsest[report]' (or leave out --html, "
            f"--svg and --png)"
        ) from None


def _drawable(program: Program, on: Plan, off: Plan) -> Scene:
    seen = scene(program, on, off)
    count = sum(len(panel.rects) for panel in seen.panels)
    if count > MOST_RECTS:
        raise BadConfig(f"{program.name} has {count:,} rectangles; at most {MOST_RECTS:,} can be drawn: plan one layer (--layer)")
    return seen


def replace_file(path: str | Path, data: bytes) -> Path:
    """Write a file beside its place and rename it; returns the path. Raises BadConfig when the folder is missing."""
    target = Path(path)
    if not target.parent.is_dir():
        raise BadConfig(f"folder {str(target.parent)!r} does not exist; make it first")
    handle, name = tempfile.mkstemp(prefix=f".{target.name[:40]}.", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(name, 0o644)
        os.replace(name, target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return target


def _figure(seen: Scene) -> dict[str, Any]:
    """The plotly figure as plain data: y axes 1 to 3 are before, after, live; x axes 1 to 3 move together."""
    top = max(panel.peak for panel in seen.panels) / MIB
    traces: list[dict[str, Any]] = []
    for k, panel in enumerate(seen.panels):
        traces += _bars(seen, panel, f"{k + 1}", top=top * MIB)
    traces.append(_live(seen))
    edge = len(seen.steps) - 0.5
    shapes = [_band(i, first, last) for i, (_, first, last) in enumerate(seen.phases) if i % 2 == 0]
    shapes += [_line(f"x{k + 1}", f"y{k + 1}", edge, panel.peak / MIB, PEAK, "dash") for k, panel in enumerate(seen.panels)]
    shapes.append(_line("x3", "y3", edge, seen.lower_bound / MIB, PEAK, "dot"))
    if seen.shared:
        shapes.append(_line("x2", "y2", edge, seen.shared / MIB, COLOURS["early history"][0], "dot"))
    ticks = {
        "tickvals": [i for i, _ in seen.ticks],
        "ticktext": [html.escape(name) for _, name in seen.ticks],
        "range": [-0.5, edge],
    }
    layout = {
        "barmode": "overlay", "bargap": 0, "hovermode": "closest", "dragmode": "zoom", "shapes": shapes,
        "annotations": _notes(seen, top), "margin": {"l": 74, "r": 24, "t": 70, "b": 100}, "autosize": True,
        "font": {"family": "system-ui, -apple-system, Segoe UI, Roboto, sans-serif", "size": 13},
        "hoverlabel": {"align": "left", "font": {"size": 13}},
        "legend": {"orientation": "h", "x": 0, "y": 1.035, "yanchor": "bottom", "xanchor": "left"},
        "xaxis": {**ticks, "anchor": "y", "showticklabels": False, "showgrid": False, "zeroline": False},
        "xaxis2": {**ticks, "anchor": "y2", "showticklabels": False, "matches": "x", "showgrid": False, "zeroline": False},
        "xaxis3": {**ticks, "anchor": "y3", "matches": "x", "showgrid": False, "zeroline": False, "tickangle": -38},
        "yaxis": {"domain": [0.62, 1.0], **_bytes_axis("offset, MiB", top)},
        "yaxis2": {"domain": [0.2, 0.58], "matches": "y", **_bytes_axis("offset, MiB", top)},
        "yaxis3": {"domain": [0.0, 0.155], **_bytes_axis("live, MiB", max(seen.live) / MIB)},
    }  # fmt: skip
    return {"data": traces, "layout": layout}


def _bytes_axis(title: str, top: float) -> dict[str, Any]:
    return {"title": {"text": title}, "range": [0, top * 1.16 or 1], "zeroline": False, "tickformat": ",d", "nticks": 8}


def _bars(seen: Scene, panel: Panel, axis: str, *, top: float) -> list[dict[str, Any]]:
    traces, columns = [], len(seen.steps)
    for tone in TONES:
        rects = [r for r in panel.rects if r.tone == tone]
        fill, ink = COLOURS[tone]
        traces.append({
            "type": "bar", "name": html.escape(seen.legend[tone]), "legendgroup": tone, "showlegend": axis == "1" and bool(rects),
            "xaxis": f"x{axis}", "yaxis": f"y{axis}",
            "x": [(r.left + r.right) / 2 for r in rects], "width": [r.right - r.left + 1 for r in rects],
            "base": [r.offset / MIB for r in rects], "y": [r.nbytes / MIB for r in rects],
            "text": [_label(r, top) if r.wide(columns) else "" for r in rects], "textposition": "inside",
            "insidetextanchor": "middle", "textangle": 0, "textfont": {"color": ink, "size": 12},
            "constraintext": "none", "cliponaxis": True,
            "marker": {"color": fill, "line": {"color": EDGES["light"], "width": [int(r.wide(columns)) for r in rects]}},
            "customdata": [f"<b>{html.escape(r.buffer)}</b><br>{'<br>'.join(_folded(line) for line in r.about)}" for r in rects],
            "hovertemplate": "%{customdata}<extra></extra>",
        })  # fmt: skip
    return traces


def _label(r: Rect, top: float) -> str:
    """Name and size, on two lines where there is room."""
    return f"{html.escape(r.buffer)}{'<br>' if r.nbytes > top / 8 else ' '}{format_bytes(r.nbytes)}"


def _folded(line: str, width: int = 88) -> str:
    """An escaped line, broken where it is too wide for a hover box."""
    return "<br>&nbsp;&nbsp;".join(map(html.escape, textwrap.wrap(line, width, max_lines=6, placeholder=" ...")))


def _live(seen: Scene) -> dict[str, Any]:
    return {
        "type": "bar", "name": "live bytes", "showlegend": False, "xaxis": "x3", "yaxis": "y3",
        "x": list(range(len(seen.steps))), "y": [count / MIB for count in seen.live], "width": 1,
        "marker": {"color": CURVE, "line": {"width": 0}}, "opacity": 0.75,
        "customdata": [
            f"<b>{html.escape(name)}</b><br>{count:,} B alive<br>{seen.lower_bound - count:,} B below the bound"
            for name, count in zip(seen.steps, seen.live, strict=True)
        ],
        "hovertemplate": "%{customdata}<extra></extra>",
    }  # fmt: skip


def _band(i: int, first: int, last: int) -> dict[str, Any]:
    return {"type": "rect", "xref": "x", "yref": "paper", "x0": first - 0.5, "x1": last + 0.5, "y0": 0, "y1": 1,
            "fillcolor": BAND, "line": {"width": 0}, "layer": "below", "name": f"band{i}"}  # fmt: skip


def _line(x: str, y: str, edge: float, at: float, colour: str, dash: str) -> dict[str, Any]:
    return {"type": "line", "xref": x.replace("x1", "x"), "yref": y.replace("y1", "y"), "x0": -0.5, "x1": edge,
            "y0": at, "y1": at, "line": {"color": colour, "width": 1.5, "dash": dash}}  # fmt: skip


def _notes(seen: Scene, top: float) -> list[dict[str, Any]]:
    notes = []
    if len(seen.phases) <= MOST_LABELS:
        for phase, first, last in seen.phases:
            notes.append({"text": html.escape("all ranks meet" if phase == "barrier" else phase), "x": (first + last) / 2,
                          "xref": "x", "y": 1.0, "yref": "paper", "yanchor": "bottom", "showarrow": False,
                          "font": {"size": 11 if phase == "barrier" else 13}})  # fmt: skip
    for k, panel in enumerate(seen.panels):
        ref = {"xref": "x domain", "yref": f"y{k + 1}".replace("y1", "y"), "showarrow": False}
        notes.append({**ref, "text": f"peak {panel.peak / MIB:,.2f} MiB", "x": 0.999, "xanchor": "right", "y": panel.peak / MIB,
                      "yanchor": "bottom", "font": {"color": PEAK, "size": 12}})  # fmt: skip
        notes.append({**ref, "text": f"<b>{html.escape(panel.title)}</b>", "x": 0.004, "xanchor": "left", "y": top * 1.15,
                      "yanchor": "top", "name": "title"})  # fmt: skip
    notes.append({"text": f"lower bound {seen.lower_bound / MIB:,.2f} MiB", "xref": "x domain", "yref": "y3", "x": 0.004,
                  "xanchor": "left", "y": seen.lower_bound / MIB, "yanchor": "top", "showarrow": False,
                  "font": {"color": PEAK, "size": 12}})  # fmt: skip
    return notes


def _table(seen: Scene) -> str:
    """Rows of the table under the picture: what a hover says, for readers without a mouse."""
    before = {(r.buffer, r.left): r.offset for r in seen.panels[0].rects}
    cells = []
    for r in sorted(seen.panels[1].rects, key=lambda r: (-r.nbytes, r.buffer, r.left)):
        formula = r.about[3].removeprefix("formula: ")
        values = (r.buffer, f"{r.nbytes:,}", f"{before[r.buffer, r.left]:,}", f"{r.offset:,}", formula,
                  f"{seen.steps[r.left]} .. {seen.steps[r.right]}")  # fmt: skip
        cells.append("<tr>" + "".join(f"<td>{html.escape(v)}</td>" for v in values) + "</tr>")
    return "\n".join(cells)
