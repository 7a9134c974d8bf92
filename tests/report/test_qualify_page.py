"""The HTML report: everything escaped, nothing fetched, complete on its own; refused when the evidence does not hold."""

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from evidence_pages import HOSTILE, example, page_of

from palimpsest.core.errors import BadConfig, EvidenceError, Unavailable
from palimpsest.report import qualify_html

pytest.importorskip("jinja2", reason="the report needs the extra: pip install palimpsest[report]")


class Tags(HTMLParser):
    """Every tag and attribute of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str | None]] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += attrs
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def parsed(text: str) -> Tags:
    made = Tags()
    made.feed(text)
    assert made.open == []
    return made


def test_the_page_is_well_formed_and_fetches_nothing(tmp_path: Path) -> None:
    text = page_of(tmp_path, example()).read_text()
    found = parsed(text)
    assert not found.tags & {"script", "img", "link", "iframe", "a", "form", "object", "embed", "base"}
    assert not [a for a in found.attributes if a[0].startswith("on") or a[0] in ("src", "href")]
    assert "default-src 'none'" in text
    assert not re.search(r"https?:|url\(|@import", text)


def test_strangers_words_stay_words(tmp_path: Path) -> None:
    tree = json.loads(
        json.dumps(example()).replace("tiny-k31", json.dumps(HOSTILE)[1:-1]).replace("mine:select", json.dumps(HOSTILE)[1:-1])
    )
    text = page_of(tmp_path, tree).read_text()
    assert "<img" not in text
    assert "<script" not in text
    assert "{{ 7 * 7 }}" in text
    assert text.count("&lt;img src=x") >= 3
    parsed(text)


def test_what_a_reader_needs_is_there(tmp_path: Path) -> None:
    text = page_of(tmp_path, example()).read_text()
    for words in (
        "a planted failure",
        "other layers",
        "132 MiB",
        "603,979,776",
        "mine:select",
        "5 \u00b7 2^-3",
        "exact_tie",
        "75.0 %",
        "4.0 s",
        "0.75",
    ):
        assert words in text, words
    assert text.count("<details") >= 5


def test_a_run_that_ended_early_has_a_page_too(tmp_path: Path) -> None:
    tree = example()
    tree["record"] |= {"failure": "rank 1 in p3: killed", "gates_verdict": "ERROR", "verdict": "ERROR", "allocation": {}}
    tree["flags"] = []
    tree["ties"] = []
    text = page_of(tmp_path, tree).read_text()
    assert "rank 1 in p3: killed" in text
    assert "Where the bytes were" not in text
    parsed(text)


def test_evidence_that_does_not_verify_gets_no_page(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "record.json").write_text("{}")
    with pytest.raises(EvidenceError):
        qualify_html.write_report(tmp_path / "folder", tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_a_missing_folder_is_found_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match="does not exist"):
        qualify_html.ready(tmp_path / "nowhere" / "report.html")


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(Unavailable, match=r"palimpsest\[report\]"):
        qualify_html.ready(tmp_path / "report.html")
