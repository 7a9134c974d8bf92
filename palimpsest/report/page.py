"""The page around an interactive picture: light and dark, no network by its own policy, a table for readers without a mouse."""

from typing import Any

#: plotly's own buttons: no logo, no upload, zoom by wheel
CONFIG: dict[str, Any] = {
    "displaylogo": False,
    "responsive": True,
    "scrollZoom": True,
    "modeBarButtons": [["toImage"], ["zoom2d", "pan2d"], ["zoomIn2d", "zoomOut2d", "resetScale2d"]],
    "toImageButtonOptions": {"format": "svg", "filename": "plan"},
}


def _theme(page: str, ink: str, grid: str, box: str) -> dict[str, Any]:
    found: dict[str, Any] = {"paper_bgcolor": page, "plot_bgcolor": page, "font.color": ink}
    for axis in ("xaxis", "xaxis2", "xaxis3", "yaxis", "yaxis2", "yaxis3"):
        found |= {f"{axis}.gridcolor": grid, f"{axis}.linecolor": grid}
    return found | {"hoverlabel.bgcolor": box, "hoverlabel.bordercolor": grid, "hoverlabel.font.color": ink}


#: what changes between the two looks of the drawing
THEMES = {
    "light": _theme("#ffffff", "#1d2127", "#e3e6ea", "#ffffff"),
    "dark": _theme("#14171c", "#e4e7ec", "#2f353e", "#20252c"),
}

#: outline of a rectangle in each look
EDGES = {"light": "rgba(20,24,30,0.65)", "dark": "#566171"}

#: runs after the first drawing; labels that do not fit their rectangle are hidden until a zoom makes room
POST_SCRIPT = """
(function () {
  var themes = THEMES, edges = EDGES, box = document.getElementById('picture'), button = document.getElementById('look');
  var system = window.matchMedia('(prefers-color-scheme: dark)'), chosen = null;
  function look() { return chosen || (system.matches ? 'dark' : 'light'); }
  var bars = box.data.map(function (t, i) { return t.showlegend === false && t.name === 'live bytes' ? -1 : i; })
    .filter(function (i) { return i >= 0; });
  function tidy() {
    // all writes, then all reads, then all writes: one layout instead of one per label
    var labels = Array.from(box.querySelectorAll('.bartext'));
    labels.forEach(function (text) { text.style.display = ''; });
    labels.map(function (text) {
      var t = text.getBoundingClientRect(), b = text.parentNode.querySelector('path').getBoundingClientRect();
      return t.height > b.height + 3 || t.width > b.width;
    }).forEach(function (wide, i) { if (wide) { labels[i].style.display = 'none'; } });
  }
  box.on('plotly_afterplot', tidy);
  function apply() {
    document.documentElement.setAttribute('data-look', look());
    button.textContent = look() === 'dark' ? 'light' : 'dark';
    return Plotly.update(box, { 'marker.line.color': edges[look()] }, themes[look()], bars);
  }
  button.addEventListener('click', function () { chosen = look() === 'dark' ? 'light' : 'dark'; apply(); });
  system.addEventListener('change', apply);
  apply().then(function () { tidy(); document.documentElement.setAttribute('data-drawn', 'yes'); });
})();
"""

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; --page: #ffffff; --ink: #1d2127; --soft: #59616d; --line: #d9dde3; }}
@media (prefers-color-scheme: dark) {{ :root {{ --page: #14171c; --ink: #e4e7ec; --soft: #a2abb8; --line: #343b45; }} }}
:root[data-look=light] {{ color-scheme: light; --page: #ffffff; --ink: #1d2127; --soft: #59616d; --line: #d9dde3; }}
:root[data-look=dark] {{ color-scheme: dark; --page: #14171c; --ink: #e4e7ec; --soft: #a2abb8; --line: #343b45; }}
body {{ margin: 0; padding: 14px 18px 24px; background: var(--page); color: var(--ink);
  font: 15px/1.45 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }}
header {{ display: flex; gap: 16px; align-items: flex-start; justify-content: space-between; }}
h1 {{ font-size: 19px; margin: 0; overflow-wrap: anywhere; }}
p {{ margin: 2px 0 0; color: var(--soft); }}
button {{ font: inherit; color: var(--ink); background: transparent; border: 1px solid var(--line); border-radius: 6px;
  padding: 3px 12px; cursor: pointer; }}
#frame {{ height: 940px; margin-top: 6px; }}
table {{ border-collapse: collapse; width: 100%; font-size: 13px; margin-top: 8px; font-variant-numeric: tabular-nums; }}
th, td {{ text-align: left; padding: 3px 10px 3px 0; border-bottom: 1px solid var(--line); overflow-wrap: anywhere; }}
th:nth-child(n+2):nth-child(-n+4), td:nth-child(n+2):nth-child(-n+4) {{ text-align: right; white-space: nowrap; }}
summary {{ cursor: pointer; margin-top: 8px; }}
code {{ font-size: 12px; overflow-wrap: anywhere; }}
</style>
</head>
<body>
<header>
<div><h1>{title}</h1><p>{subtitle}</p></div>
<button id="look" type="button" aria-label="switch between light and dark">dark</button>
</header>
<div id="frame">{body}</div>
<noscript><p>The drawing needs scripts; the table below says the same.</p></noscript>
<p>A rectangle is a buffer: as wide as the steps it is alive, as high as its bytes. Where two lie on the same height, the later
one reuses the bytes of the earlier one. Drag to zoom, double-click to go back, hover for shape, formula and live range.</p>
<details><summary>every buffer as a table</summary>
<table>
<thead><tr><th>buffer</th><th>bytes</th><th>offset before</th><th>offset after</th><th>formula</th><th>alive</th></tr></thead>
<tbody>
{rows}
</tbody></table></details>
<p>plan <code>{digest}</code></p>
</body>
</html>
"""
