"""The picture of a plan as an SVG or PNG for a slide, drawn by matplotlib without its global state."""

import io

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PatchCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from palimpsest.core.units import format_bytes
from palimpsest.report.scene import MOST_LABELS, TONES, Panel, Scene

MIB = 1 << 20
PEAK = "#c9342e"
#: inches of a 16:9 slide
SIZE = (13.33, 7.5)


def draw(seen: Scene, kind: str, colours: dict[str, tuple[str, str]]) -> bytes:
    """The picture as ``svg`` or ``png`` bytes; equal scenes give equal SVG bytes."""
    with rc_context({"svg.hashsalt": seen.digest, "svg.fonttype": "path", "font.family": ["DejaVu Sans"]}):
        figure = Figure(figsize=SIZE, facecolor="white")
        FigureCanvasAgg(figure)
        axes = figure.subplots(3, 1, sharex=True, height_ratios=(4, 4, 1.5))
        top = max(panel.peak for panel in seen.panels) / MIB
        for axis, panel in zip(axes[:2], seen.panels, strict=True):
            _panel(axis, panel, top, colours)
        if seen.shared:
            axes[1].axhline(seen.shared / MIB, color=colours[TONES[0]][0], linestyle=":", linewidth=1.2)
        _live(axes[2], seen)
        _columns(axes, seen)
        used = [t for t in TONES if any(r.tone == t for r in seen.panels[0].rects)]
        figure.legend(handles=[Patch(facecolor=colours[t][0], edgecolor="black", lw=0.5, label=seen.legend[t]) for t in used],
                      loc="upper right", ncols=len(used), fontsize=8, frameon=False, bbox_to_anchor=(0.995, 0.995))  # fmt: skip
        figure.suptitle(_clipped(seen.title, 70), x=0.01, y=0.99, ha="left", fontsize=13, parse_math=False)
        figure.text(0.01, 0.935, _clipped(seen.subtitle, 150), fontsize=9, color="#444a52", parse_math=False)
        figure.subplots_adjust(left=0.06, right=0.995, top=0.87, bottom=0.11, hspace=0.12)
        out = io.BytesIO()
        figure.savefig(out, format=kind, dpi=144, metadata={"Date": None} if kind == "svg" else {})
        return out.getvalue()


def _clipped(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."


def _panel(axis: Axes, panel: Panel, top: float, colours: dict[str, tuple[str, str]]) -> None:
    columns = max((r.right for r in panel.rects), default=1) + 1
    axis.set_ylim(0, top * 1.13 or 1)
    boxes = [Rectangle((r.left - 0.5, r.offset / MIB), r.right - r.left + 1, r.nbytes / MIB) for r in panel.rects]
    axis.add_collection(PatchCollection(boxes, facecolors=[colours[r.tone][0] for r in panel.rects], edgecolors="black",
                                        linewidths=[0.5 * r.wide(columns) for r in panel.rects]))  # fmt: skip
    for r in panel.rects:
        ink, width, height = colours[r.tone][1], r.right - r.left + 1, r.nbytes / MIB
        # a 13-inch slide has about 150 characters across and 32 lines of 7 points up
        text = "\n".join((r.buffer, format_bytes(r.nbytes))) if height > top / 8 else r.label
        if height > top / 26 and width * 150 / columns > max(map(len, text.splitlines())):
            axis.text(r.left - 0.5 + width / 2, (r.offset + r.nbytes / 2) / MIB, text, ha="center", va="center", fontsize=7,
                      color=ink, parse_math=False, clip_on=True)  # fmt: skip
    axis.axhline(panel.peak / MIB, color=PEAK, linestyle="--", linewidth=1)
    axis.text(0.998, panel.peak / MIB, f"peak {panel.peak / MIB:,.2f} MiB", color=PEAK, fontsize=8, ha="right", va="bottom",
              transform=axis.get_yaxis_transform())  # fmt: skip
    axis.text(0.004, 0.985, panel.title, fontsize=9, fontweight="bold", va="top", transform=axis.transAxes, parse_math=False)
    axis.set_ylabel("offset, MiB", fontsize=8)
    axis.tick_params(labelsize=8)


def _live(axis: Axes, seen: Scene) -> None:
    axis.bar(range(len(seen.steps)), [count / MIB for count in seen.live], width=1.0, color="#9cc0e8")
    axis.axhline(seen.lower_bound / MIB, color=PEAK, linestyle=":", linewidth=1.2)
    axis.text(0.004, seen.lower_bound / MIB, f"lower bound {seen.lower_bound / MIB:,.2f} MiB", color=PEAK, fontsize=8, va="top",
              transform=axis.get_yaxis_transform())  # fmt: skip
    axis.set_ylabel("live, MiB", fontsize=8)
    axis.set_ylim(0, max(seen.live) / MIB * 1.1 or 1)
    axis.tick_params(labelsize=8)


def _columns(axes: "list[Axes]", seen: Scene) -> None:
    axes[2].set_xlim(-0.5, len(seen.steps) - 0.5)
    axes[2].set_xticks(
        [i for i, _ in seen.ticks],
        [_clipped(name, 28) for _, name in seen.ticks],
        rotation=32,
        ha="right",
        fontsize=7,
        parse_math=False,
    )
    for k, (phase, first, last) in enumerate(seen.phases):
        if k % 2 == 0:
            for axis in axes:
                axis.axvspan(first - 0.5, last + 0.5, color="#8086901a", linewidth=0, zorder=0)
        if len(seen.phases) <= MOST_LABELS:
            text = "meet" if phase == "barrier" else phase
            axes[0].text((first + last) / 2, 1.01, text, ha="center", va="bottom", fontsize=8, parse_math=False,
                         transform=axes[0].get_xaxis_transform())  # fmt: skip
