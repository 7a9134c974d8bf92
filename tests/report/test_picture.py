"""Pictures: what is drawn, self-contained, all or nothing, hostile names, a missing library, and the flags a verb gets."""

import argparse
import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from palimpsest import Limits, plan
from palimpsest.core.errors import BadConfig
from palimpsest.report import picture
from palimpsest.report.scene import MOST_LABELS, TONES, scene

pytest.importorskip("plotly", reason="pictures need the extra: pip install palimpsest[report]")
pytest.importorskip("matplotlib", reason="pictures need the extra: pip install palimpsest[report]")

MIB = 1 << 20
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)> $\\frac{1}{$ {x} \N{RIGHT-TO-LEFT OVERRIDE}name/layer3"


@pytest.fixture(scope="module")
def planned():
    return plan("kimi-k3.1-pro", Limits(1 << 20, 4096, 16))


def named(planned, name: str):
    return dataclasses.replace(planned.program, name=name)


def test_the_scene_shows_every_buffer_in_both_arrangements(planned) -> None:
    seen = scene(planned.program, planned.on, planned.off)
    wanted = {p.buffer for p in planned.on.places if p.kind == "reusable"}
    before, after = seen.panels
    assert {r.buffer for r in before.rects} == {r.buffer for r in after.rects} == wanted
    assert (before.peak - after.peak, seen.shared) == (132 * MIB, 132 * MIB)
    (index,), (latent,) = ([r for r in after.rects if r.tone == tone] for tone in TONES[:2])
    assert (index.offset, index.nbytes, latent.offset) == (0, 132 * MIB, 0)
    assert [seen.steps[c] for c in (index.left, index.right)] == ["gather_index", "index_select"]
    assert [phase for phase, _, _ in seen.phases] == ["p0", "p1", "p2", "p3", "p5", "barrier", "p6", "p7", "p8"]
    assert max(seen.live) == seen.lower_bound
    assert any("on the bytes of: index_history" in line for line in latent.about)
    assert {"formula: tokens x 576", "alive: gather_latent .. sparse_attend"} <= set(latent.about)


def test_a_whole_model_is_labelled_by_layer() -> None:
    whole = plan("kimi-k3.1-pro", Limits(1 << 17, 2048, 16), whole=True)
    seen = scene(whole.program, whole.on, whole.off)
    assert len(seen.ticks) <= MOST_LABELS
    assert ("layer003") in {name for name, _, _ in seen.phases}
    assert sum(len(p.rects) for p in seen.panels) > 2000


def test_html_needs_no_network(planned, tmp_path: Path) -> None:
    path = planned.write_html(tmp_path / "plan.html")
    text = path.read_text("utf-8")
    assert "default-src 'none'" in text
    assert not re.findall(r"<(?:script|link|img|iframe)[^>]+(?:src|href)\s*=", text.partition("<body>")[0])
    assert not re.findall(r"<script[^>]+src", text)
    assert len(text) < 6 << 20
    assert [p.name for p in tmp_path.iterdir()] == ["plan.html"]
    assert planned.on.digest in text


def test_hostile_names_stay_text(planned, tmp_path: Path) -> None:
    made = named(planned, HOSTILE)
    text = picture.write_html(made, planned.on, planned.off, tmp_path / "p.html").read_text("utf-8")
    assert "<script>alert" not in text
    assert "<img src=x" not in text
    assert "&lt;img src=x onerror=alert(2)&gt;" in text
    ElementTree.fromstring(picture.write_image(made, planned.on, planned.off, tmp_path / "p.svg").read_bytes())
    evil = "<a href='javascript:alert(1)'>x</a>"
    buffers = tuple(dataclasses.replace(b, formula=evil) if b.name == "query" else b for b in planned.program.buffers)
    seen = scene(dataclasses.replace(planned.program, buffers=buffers), planned.on, planned.off)
    assert evil not in json.dumps(picture._figure(seen))


def test_svg_is_deterministic_and_png_is_a_slide(planned, tmp_path: Path) -> None:
    one, two = (planned.write_image(tmp_path / name).read_bytes() for name in ("a.svg", "b.svg"))
    assert one == two
    assert ElementTree.fromstring(one).tag.endswith("svg")
    png = planned.write_image(tmp_path / "c.png").read_bytes()
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = (int.from_bytes(png[at : at + 4], "big") for at in (16, 20))
    assert (width > 1800, abs(width / height - 16 / 9) < 0.01) == (True, True)


@pytest.mark.parametrize("name", ["plan.pdf", "plan", "plan.html"])
def test_another_ending_is_refused(planned, tmp_path: Path, name: str) -> None:
    with pytest.raises(BadConfig, match=r"must end in \.svg or \.png"):
        planned.write_image(tmp_path / name)


def test_all_or_nothing(planned, tmp_path: Path, monkeypatch) -> None:
    with pytest.raises(BadConfig, match="does not exist"):
        planned.write_html(tmp_path / "no" / "plan.html")
    (tmp_path / "plan.html").write_text("before")

    def broken(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(picture.os, "replace", broken)
    with pytest.raises(OSError, match="No space"):
        planned.write_html(tmp_path / "plan.html")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("plan.html", "before")]


def test_too_many_rectangles_are_refused(planned, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(picture, "MOST_RECTS", 10)
    with pytest.raises(BadConfig, match=r"rectangles; at most 10 can be drawn: plan one layer"):
        planned.write_html(tmp_path / "plan.html")


@pytest.mark.parametrize(("blocked", "call"), [("plotly", "write_html"), ("matplotlib", "write_image")])
def test_without_the_extra_the_error_says_what_to_install(blocked: str, call: str, tmp_path: Path) -> None:
    code = f"""
import sys
class Gone:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] == {blocked!r}:
            raise ModuleNotFoundError(f'No module named {{name!r}}', name=name)
sys.meta_path.insert(0, Gone())
from palimpsest import plan, Limits
from palimpsest.core.errors import Unavailable
try:
    plan('glm-5', Limits(1 << 16, 1024, 8)).{call}({str(tmp_path / "x.svg")!r})
except Unavailable as error:
    print(error, error.exit_code)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    assert f"pictures need {blocked}, which is not installed; pip install 'palimpsest[report]'" in done.stdout
    assert done.stdout.endswith(" 2\n")
    assert not list(tmp_path.iterdir())


def test_flags(planned, tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    picture.add_picture_arguments(parser)
    paths = [tmp_path / f"p.{kind}" for kind in ("html", "svg", "png")]
    args = parser.parse_args([word for p in paths for word in (f"--{p.suffix[1:]}", str(p))])
    assert picture.write_pictures(args, planned.program, planned.on, planned.off) == paths
    assert picture.write_pictures(parser.parse_args([]), planned.program, planned.on, planned.off) == []
    with pytest.raises(BadConfig, match=r"--svg .* must end in \.svg"):
        picture.write_pictures(parser.parse_args(["--svg", "x.png"]), planned.program, planned.on, planned.off)
