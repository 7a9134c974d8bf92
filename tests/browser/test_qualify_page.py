"""The qualification report in Chromium: readable at 1280 px in light and in dark, no request, no script, no escape from a
hostile record.
"""

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "report"))
from evidence_pages import HOSTILE, example, page_of

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
if CHROMIUM is None:
    pytest.skip("the report in a browser is left out: no chromium on this machine", allow_module_level=True)
sync_api = pytest.importorskip("playwright.sync_api", reason="the report in a browser is left out: playwright is not installed")
pytest.importorskip("jinja2", reason="the report needs the extra: pip install palimpsest[report]")

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
SIZE = {"width": 1280, "height": 900}


@pytest.fixture(scope="module")
def browser() -> Iterator["sync_api.Browser"]:
    with sync_api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield found
        found.close()


def shown(browser: "sync_api.Browser", path: Path, look: str = "light") -> tuple["sync_api.Page", list[str], list[str]]:
    page = browser.new_context(viewport=SIZE, color_scheme=look).new_page()
    asked: list[str] = []
    said: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(path.as_uri(), timeout=60_000)
    return page, asked, said


def contrast(page: "sync_api.Page", selector: str) -> float:
    """WCAG contrast of an element's ink against the first painted background behind it."""
    return page.evaluate(
        """selector => {
          const light = text => { const c = text.match(/[\\d.]+/g).slice(0, 3).map(v => v / 255)
              .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4); return 0.2126 * c[0] + 0.7152 * c[1] + 0.0722
              * c[2]; };
          let at = document.querySelector(selector); const ink = light(getComputedStyle(at).color);
          while (at && /rgba\\(.*, 0\\)/.test(getComputedStyle(at).backgroundColor)) at = at.parentElement;
          const back = light(getComputedStyle(at).backgroundColor);
          return (Math.max(ink, back) + 0.05) / (Math.min(ink, back) + 0.05);
        }""",
        selector,
    )


@pytest.mark.parametrize("look", ["light", "dark"])
def test_the_page_stands_alone_and_reads(browser, tmp_path: Path, look: str) -> None:
    page, asked, said = shown(browser, page_of(tmp_path, example()), look)
    assert asked == [page.url]
    assert said == []
    assert page.evaluate("document.documentElement.scrollWidth") <= SIZE["width"]
    assert page.text_content("#verdict") == "FAIL"
    headings = page.locator("h2").all_text_contents()
    for text in (
        "Claim",
        "Not claimed",
        "What did not pass",
        "Cases, gates, ranks",
        "Where the bytes were",
        "Selection and ties",
        "Measured",
        "Time",
    ):
        assert any(heading.startswith(text) for heading in headings), text
    for selector in ("#verdict", "h1", ".soft", "#matrix i.PASS", "#matrix i.FAIL", ".figures dt", "th", "svg text.beside"):
        if page.locator(selector).count():
            assert contrast(page, selector) >= 4.5, selector
    assert (
        page.evaluate("getComputedStyle(document.body).backgroundColor")
        == {"light": "rgb(251, 251, 250)", "dark": "rgb(20, 23, 28)"}[look]
    )
    page.context.close()


def test_a_case_opens_to_its_ranks_and_a_cell_tells_its_count(browser, tmp_path: Path) -> None:
    page, _, _ = shown(browser, page_of(tmp_path, example()))
    closed = page.locator("#matrix details", has_text="C02")
    assert not closed.locator(".rank").first.is_visible()
    closed.locator("summary").click()
    assert closed.locator(".rank").count() == 2
    assert closed.locator(".rank").first.is_visible()
    title = closed.locator(".rank i.PASS").first.get_attribute("title")
    assert "C02 rank 0 S4 PASS: 12 of 12 views" in title
    page.context.close()


def test_the_index_history_stands_on_the_head_of_the_latent_history_in_alias_only(browser, tmp_path: Path) -> None:
    page, _, _ = shown(browser, page_of(tmp_path, example()))
    bottoms = page.evaluate(
        """() => Array.from(document.querySelectorAll('svg')).map(svg => Object.fromEntries(Array.from(svg.querySelectorAll('g'))
          .map(g => [g.querySelector('title').textContent.split(':')[0],
          g.querySelector('rect').getBoundingClientRect().bottom])))"""
    )
    base, alias = bottoms
    assert abs(alias["index_history"] - alias["latent_history"]) < 1
    assert base["latent_history"] - base["index_history"] > 20
    page.context.close()


def test_a_hostile_record_runs_nothing(browser, tmp_path: Path) -> None:
    tree = example()
    hostile = json.loads(
        json.dumps(tree).replace("tiny-k31", json.dumps(HOSTILE)[1:-1]).replace("a planted failure", json.dumps(HOSTILE)[1:-1])
    )
    page, asked, _ = shown(browser, page_of(tmp_path, hostile))
    assert asked == [page.url]
    assert page.evaluate("document.querySelectorAll('img, script, iframe, a').length") == 0
    assert HOSTILE in page.text_content("h1")
    assert page.title() != "owned"
    page.context.close()
