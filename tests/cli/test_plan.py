"""``palimpsest plan``: the printed numbers, the JSON form, refusals, and a start without torch or numpy."""

import argparse
import json
import subprocess
import sys

import pytest

from palimpsest.cli import plan as verb
from palimpsest.core.errors import PalimpsestError
from palimpsest.plan.check import check
from palimpsest.plan.plan import Plan
from palimpsest.recipes import default_formats, load_geometry, program

K31 = ["kimi-k3.1-pro", "--context", "1M", "--rows", "4096", "--ranks", "16"]


def run(capsys, *args):
    """Exit code, stdout and stderr of the verb, with errors shown as ``cli.main`` shows them."""
    parser = argparse.ArgumentParser()
    verb.add_arguments(parser)
    try:
        code = verb.run(parser.parse_args(list(args)))
    except PalimpsestError as error:
        print(f"palimpsest plan: {error}", file=sys.stderr)
        code = error.exit_code
    return code, *capsys.readouterr()


def test_the_table_shows_both_arrangements(capsys):
    code, out, err = run(capsys, *K31)
    assert (code, err) == (0, "")
    assert "708 MiB -> 576 MiB" in out
    assert "saved logical:   138,412,032 B (132 MiB) per rank" in out
    assert "index_history on bytes [0, 138,412,032) of latent_history" in out
    assert "24 of 93" in out
    assert "Binding: sparse_attend" in out
    assert max(map(len, out.splitlines())) <= 100
    assert "\N{HORIZONTAL ELLIPSIS}" not in out


def test_mapped_bytes_follow_the_granularity(capsys):
    _, out, _ = run(capsys, *K31, "--granularity", "2MiB")
    assert "whole granules of 2 MiB" in out


def test_json_is_canonical_and_the_plan_in_it_is_a_plan(capsys):
    code, out, err = run(capsys, *K31, "--json")
    assert (code, err) == (0, "")
    tree = json.loads(out)
    assert out == json.dumps(tree, sort_keys=True, separators=(",", ":"), ensure_ascii=False) + "\n"
    plan = Plan.from_json(json.dumps(tree["plan"]))
    assert plan.digest == tree["digest"]
    geometry = load_geometry("kimi-k3.1-pro")
    made = program(geometry, plan.limits, default_formats(geometry), 3)
    check(made, plan)
    assert tree["accounts"]["saved_logical"] == 138_412_032
    assert tree["accounts"]["on"]["logical"] == sum(s["nbytes"] for s in tree["plan"]["segments"])
    assert len(tree["sparse_layers"]) == 24


def test_reuse_off_gives_the_base_arrangement(capsys):
    on = json.loads(run(capsys, *K31, "--json")[1])
    off = json.loads(run(capsys, *K31, "--json", "--reuse", "off")[1])
    assert off["plan"]["reuse"] == "off"
    assert off["digest"] != on["digest"]
    assert off["accounts"] == on["accounts"]


def test_a_shared_layer_says_that_both_arrangements_are_the_same(capsys):
    code, out, err = run(capsys, "glm-5.2", "--context", "256K", "--layer", "3", "--ranks", "8")
    assert code == 0
    assert "no index history" in err
    assert "saved logical:   0 B per rank" in out


def test_a_context_beyond_the_model_is_planned_and_noted(capsys):
    code, _, err = run(capsys, "deepseek-v3.2", "--context", "1M", "--json")
    assert code == 0
    assert "declares a context of 163,840 tokens; this plan is for 1,048,576" in err


def test_a_config_file_plans_like_its_preset(capsys, tmp_path):
    from palimpsest.recipes.table import preset_folder

    (tmp_path / "config.json").write_text((preset_folder() / "glm-5.json").read_text())
    by_name = json.loads(run(capsys, "glm-5", "--context", "64K", "--json")[1])
    for path in (tmp_path, tmp_path / "config.json"):
        tree = json.loads(run(capsys, str(path), "--context", "64K", "--json")[1])
        assert tree["accounts"]["on"]["totals"] == by_name["accounts"]["on"]["totals"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["nope"], "unknown model"),
        (["./missing/config.json"], "no such file"),
        (["kimi-k3.1-pro", "--context", "lots"], "--context 'lots' is not a size"),
        (["kimi-k3.1-pro", "--context", "100"], "multiple of the page"),
        (["kimi-k3.1-pro", "--context", "0"], "tokens = 0"),
        (["kimi-k3.1-pro", "--context", "64", "--rows", "16"], "top-k 2048 exceeds"),
        (["kimi-k3.1-pro", "--context", "2K"], "rows 4096 exceed the context of 2048"),
        (["kimi-k3.1-pro", "--context", "4T"], "int32"),
        (["kimi-k3.1-pro", "--ranks", "3"], "3 ranks"),
        (["kimi-k3.1-pro", "--layer", "0"], "linear attention"),
        (["kimi-k3.1-pro", "--layer", "93"], "layer 93 does not exist"),
        (["kimi-k3.1-pro", "--layer", "-1"], "layer -1 does not exist"),
        (["kimi-k3.1-pro", "--index-format", "int4"], "index format 'int4'"),
        (["kimi-k3.1-pro", "--latent-format", "nvfp4"], "latent format 'nvfp4'"),
        (["kimi-k3.1-pro", "--granularity", "3000"], "power of two"),
        (["kimi-k3.1-pro", "--granularity", "x"], "--granularity 'x'"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(capsys, args, words):
    code, out, err = run(capsys, *args)
    assert (code, out) == (2, "")
    assert words in err
    assert err.count("\n") == 1


def test_no_torch_no_numpy():
    code = (
        "import argparse, sys; from palimpsest.cli import plan; p = argparse.ArgumentParser(); plan.add_arguments(p); "
        "plan.run(p.parse_args(sys.argv[1:])); print('LOADED', sorted({'torch', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, *K31], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("LOADED []\n")
    planted = subprocess.run([sys.executable, "-c", "import numpy;" + code, *K31], capture_output=True, text=True, check=True)
    assert planted.stdout.endswith("LOADED ['numpy']\n")


@pytest.mark.parametrize("reuse", ["on", "off"])
def test_a_written_plan_file_verifies(capsys, tmp_path, reuse):
    from palimpsest.plan.verify import verify_plan_file

    file = tmp_path / "plan.json"
    code, _, err = run(capsys, *K31, "--reuse", reuse, "--output", str(file))
    assert code == 0
    assert f"palimpsest verify {file}" in err
    report = verify_plan_file(file)
    assert report.ok, report.faults
    assert report.program == "kimi-k3.1-pro/layer3"
    assert report.peak == report.lower_bound + (138_412_032 if reuse == "off" else 0)
