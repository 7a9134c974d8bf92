"""The picture in Chromium: it draws without a network, hovers, zooms, and is legible at 1280 px in light and in dark."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from palimpsest import Limits, plan

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
if CHROMIUM is None:
    pytest.skip("the picture in a browser is left out: no chromium on this machine", allow_module_level=True)
sync_api = pytest.importorskip("playwright.sync_api", reason="the picture in a browser is left out: playwright is not installed")
pytest.importorskip("plotly", reason="pictures need the extra: pip install palimpsest[report]")

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync"]  # fmt: skip
SIZE = {"width": 1280, "height": 1100}
HOSTILE = "<img src=x onerror=\"document.title='owned'\"></script><script>document.title='owned'</script>/layer3"


@pytest.fixture(scope="module")
def planned():
    return plan("kimi-k3.1-pro", Limits(1 << 20, 4096, 16))


@pytest.fixture(scope="module")
def browser() -> Iterator["sync_api.Browser"]:
    with sync_api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield found
        found.close()


def shown(browser: "sync_api.Browser", path: Path, look: str = "light") -> tuple["sync_api.Page", list[str], list[str]]:
    """The drawn page, the addresses it asked for, and everything it complained about."""
    page = browser.new_context(viewport=SIZE, color_scheme=look).new_page()
    asked: list[str] = []
    said: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(path.as_uri(), timeout=120_000)
    page.wait_for_selector("html[data-drawn=yes]", timeout=120_000)
    return page, asked, said


def labels(page: "sync_api.Page") -> list[tuple[str, float]]:
    """Visible buffer labels and their height in pixels."""
    return page.evaluate(
        "() => Array.from(document.querySelectorAll('.bartext')).filter(t => t.style.display !== 'none')"
        ".map(t => [t.textContent, t.getBoundingClientRect().height])"
    )


@pytest.mark.parametrize("look", ["light", "dark"])
def test_draws_alone_and_legibly(browser, planned, tmp_path: Path, look: str) -> None:
    path = planned.write_html(tmp_path / "plan.html")
    page, asked, said = shown(browser, path, look)
    assert asked == [path.as_uri()]
    assert said == []
    assert page.evaluate("document.documentElement.scrollWidth") <= SIZE["width"]
    seen = labels(page)
    names = [text for text, _ in seen]
    for name in ("index_history", "latent_history", "hidden", "context", "partial"):
        assert sum(text.startswith(name) for text in names) == 2, f"{name} is not labelled in both arrangements"
    assert min(height for _, height in seen) >= 11
    notes = page.locator(".annotation-text").all_text_contents()
    assert {"p0", "p1", "p2", "p3", "p5", "p6", "p7", "p8", "all ranks meet"} <= set(notes)
    assert sum(text.startswith("peak ") for text in notes) == 2
    assert any(text.startswith("lower bound ") for text in notes)
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == {
        "light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 28)"}[look]  # fmt: skip
    page.context.close()


def test_index_history_lies_on_the_bottom_of_the_latent_history(browser, planned, tmp_path: Path) -> None:
    """In pixels: in the lower panel both rectangles stand on the axis; in the upper one only the latent history does."""
    page, _, _ = shown(browser, planned.write_html(tmp_path / "plan.html"))
    boxes = page.evaluate(
        "() => Array.from(document.querySelectorAll('.point')).map(p => [p.querySelector('.bartext')?.textContent || '', "
        "p.querySelector('path').getBoundingClientRect()]).map(([t, b]) => [t, b.top, b.bottom])"
    )
    index = sorted(b for b in boxes if b[0].startswith("index_history"))
    latent = sorted(b for b in boxes if b[0].startswith("latent_history"))
    (upper_index, lower_index), (upper_latent, lower_latent) = sorted(b[2] for b in index), sorted(b[2] for b in latent)
    assert abs(lower_index - lower_latent) < 1.5
    assert upper_latent - upper_index > 100
    heights = [bottom - top for _, top, bottom in (index[0], latent[0])]
    assert heights[0] / heights[1] == pytest.approx(132 / 576, abs=0.02)
    page.context.close()


def test_hover_tells_and_zoom_shows_more(browser, planned, tmp_path: Path) -> None:
    page, _, _ = shown(browser, planned.write_html(tmp_path / "plan.html"))
    target = page.locator(".bartext", has_text="latent_history").last
    box = target.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.wait_for_selector(".hovertext", timeout=20_000)
    text = page.locator(".hovertext").text_content()
    for words in ("latent_history", "603,979,776 B (576 MiB)", "shape: latent_history [1,048,576, 576] u8",
                  "formula: tokens x 576",
                  "alive: gather_latent .. sparse_attend", "on the bytes of: index_history"):  # fmt: skip
        assert words in text
    before = len(labels(page))
    page.evaluate("() => Plotly.relayout('picture', {'xaxis.range': [1.5, 6.5], 'yaxis.range': [0, 30]})")
    page.wait_for_function(f"() => Array.from(document.querySelectorAll('.bartext')).some(t => t.style.display !== 'none' "
                           f"&& t.textContent.startsWith('q_latent')) || {before} < 0")  # fmt: skip
    page.context.close()


def test_the_button_changes_the_look(browser, planned, tmp_path: Path) -> None:
    page, _, _ = shown(browser, planned.write_html(tmp_path / "plan.html"))
    page.click("#look")
    page.wait_for_function("() => document.getElementById('picture')._fullLayout.paper_bgcolor === '#14171c'")
    assert page.evaluate("document.documentElement.getAttribute('data-look')") == "dark"
    assert page.text_content("#look") == "light"
    page.context.close()


def test_a_hostile_name_runs_nothing(browser, planned, tmp_path: Path) -> None:
    import dataclasses

    from palimpsest.report.picture import write_html

    path = write_html(dataclasses.replace(planned.program, name=HOSTILE), planned.on, planned.off, tmp_path / "plan.html")
    page, asked, _ = shown(browser, path)
    assert asked == [path.as_uri()]
    assert page.title() != "owned"
    assert HOSTILE in page.text_content("h1")
    page.context.close()
