"""Templates: JSON only, the same text in every process, nothing unpickled; changed arguments are exactly the declared ones."""

import json
import subprocess
import sys

import pytest
import torch

from palimpsest.core.errors import BadConfig
from palimpsest.export.spec import Argument
from palimpsest.export.template import digest, export_template, key_text, read_template

ARGS = (Argument("a", "fp32", (4, 8), (8, 1)), Argument("b", "fp32", (4, 8), (8, 1), mutated=True))


def double(a, b) -> None:
    b.copy_(a * 2)


def test_round_trip_computes_the_same() -> None:
    tree, program = read_template(export_template("double", double, ARGS))
    a, b = torch.arange(32.0).view(4, 8), torch.zeros(4, 8)
    program.module()(a, b)
    assert torch.equal(b, a * 2)
    assert tree["args"][1]["mutated"]


def test_text_is_plain_json_without_paths() -> None:
    text = export_template("double", double, ARGS)
    json.loads(text)
    assert b"site-packages" not in text
    assert b".py" not in text


def test_text_is_the_same_in_another_process() -> None:
    code = (
        "import sys, warnings; warnings.filterwarnings('ignore')\n"
        "from palimpsest.export import programs; from palimpsest.export.spec import Argument as A\n"
        "from palimpsest.export.template import digest, export_template\n"
        "source = A('r', 'u8', (64, 96), (96, 1), dynamic={0: 'pages'})\n"
        "args = (source, A('h', 'u8', (64, 64), (64, 1), mutated=True, dynamic={0: 'pages'}))\n"
        "print(digest(export_template('gather', programs.gather_pages((16,)), args)))\n"
    )
    found = {subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout for _ in range(2)}
    assert len(found) == 1


def test_undeclared_change_is_refused() -> None:
    read_only = (ARGS[0], Argument("b", "fp32", (4, 8), (8, 1)))
    with pytest.raises(BadConfig, match="changes arguments"):
        export_template("double", double, read_only)


def test_constant_is_refused() -> None:
    held = torch.ones(8)

    def add(a, b) -> None:
        b.copy_(a + held)

    with pytest.raises(BadConfig, match="constants"):
        export_template("add", add, ARGS)


def test_key_covers_graph_config_and_toolchain() -> None:
    text = export_template("double", double, ARGS)
    program = read_template(text)[1]
    base = key_text(text, program, {"x": 1}, {"torch": "1"})
    assert base == key_text(text, program, {"x": 1}, {"torch": "1"})
    assert base != key_text(text, program, {"x": 2}, {"torch": "1"})
    assert base != key_text(text, program, {"x": 1}, {"torch": "2"})
    other = export_template("double", lambda a, b: b.copy_(a * 3), ARGS)
    assert base != key_text(other, read_template(other)[1], {"x": 1}, {"torch": "1"})


def test_full_capacity_allocates_nothing() -> None:
    tokens = 1 << 20
    args = (
        Argument("cache", "u8", (tokens // 64, 64 * 576), (64 * 576, 1), dynamic={0: "pages"}),
        Argument("history", "u8", (tokens // 64, 64 * 576), (64 * 576, 1), mutated=True, dynamic={0: "pages"}),
    )
    from palimpsest.export import programs

    text = export_template("gather", programs.gather_pages((0,)), args)
    assert len(text) < 64 << 10
    assert digest(text) == digest(text)


def test_another_format_is_refused() -> None:
    with pytest.raises(BadConfig, match="format"):
        read_template(b'{"format": "palimpsest-template-0"}')
