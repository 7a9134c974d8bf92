"""The comparison and the explanation as text: what stands where, and nothing cut off."""

import argparse
import json

import pytest

from palimpsest import Deployment, Limits, compare, plan
from palimpsest.core.canon import canonical
from palimpsest.core.errors import BadConfig
from palimpsest.report import explain_text
from palimpsest.report.compare_text import add_compare_arguments, deployment_of, render_compare

GIB = 1 << 30


def test_compare_shows_numbers_kinds_and_reasons(capsys) -> None:
    limits = Limits(1 << 20, 8192, 8)
    known = Deployment(device_bytes=80 * GIB, free_bytes=6 * GIB)
    render_compare(compare("deepseek-v3.2", limits, deployment=known), "deepseek-v3.2", limits)
    out = capsys.readouterr().out
    rows = {line.split()[0]: line for line in out.splitlines() if line}
    assert out.startswith("What each engine allocates for deepseek-v3.2, MiB: 1M tokens, 8,192 rows, one of 8 ranks\n")
    for words in ("vLLM 0.33.0  ", "2,113", "3,664", "~512", "4,368", "SGLang 0.5.23", "~1,228", "llama.cpp b12180", "2,595"):
        assert words in out
    assert "min(T, max(1, b // (4*N)))*4*N where b = " in out
    assert "v1/attention/backends/mla/flashmla_sparse.py::__init__" in out
    assert "not computable: no gathered copy of the latents in the files read" in out
    assert "L = 1,048,576, D = 576, I = 128, f = 2" in out
    assert rows["ours"].startswith("ours")
    assert "\N{HORIZONTAL ELLIPSIS}" not in out


def test_flags_of_a_comparison() -> None:
    parser = argparse.ArgumentParser()
    add_compare_arguments(parser)
    args = parser.parse_args(["--compare", "--device-memory", "80GiB", "--free-memory", "6GiB"])
    assert (args.compare, deployment_of(args)) == (True, Deployment(device_bytes=80 * GIB, free_bytes=6 * GIB))
    assert deployment_of(parser.parse_args([])) == Deployment()
    with pytest.raises(BadConfig, match="exceeds the device"):
        deployment_of(parser.parse_args(["--device-memory", "1GiB", "--free-memory", "2GiB"]))


def test_a_comparison_has_a_json_form() -> None:
    tree = json.loads(canonical(compare("glm-5", Limits(1 << 16, 1024, 8))))
    assert [bill["engine"] for bill in tree][-1] == "ours"
    assert {cell["kind"] for bill in tree for cell in bill["cells"]} == {"named", "hidden", "not computable"}


def test_a_name_with_markup_is_text(capsys) -> None:
    limits = Limits(1 << 16, 1024, 8)
    render_compare(compare("glm-5", limits), "[bold]x[/bold]", limits)
    assert "[bold]x[/bold]" in capsys.readouterr().out


def test_explain_groups_what_repeats_over_layers(capsys) -> None:
    planned = plan("glm-5.2", Limits(1 << 17, 2048, 8), whole=True)
    explain_text.show(planned.explain(), planned.explain("off"))
    out = capsys.readouterr().out
    assert " times like this)" in out
    assert "smaller ones:" in out
    assert "\N{HORIZONTAL ELLIPSIS}" not in out
