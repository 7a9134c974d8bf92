"""``palimpsest fit``: one command from a memory to a context, what binds, what cannot fit, and a start without torch or numpy."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

from palimpsest.cli import fit as verb
from palimpsest.core.errors import PalimpsestError
from palimpsest.core.spec import Limits
from palimpsest.plan.fit import Budget
from palimpsest.plan.place import place
from palimpsest.recipes import default_formats, load_geometry
from palimpsest.recipes.model import model_program

LAYER = ["kimi-k3.1-pro", "--layer", "3", "--memory", "2GiB", "--ranks", "16"]


def run(capsys, *args):
    parser = argparse.ArgumentParser()
    verb.add_arguments(parser)
    try:
        code = verb.run(parser.parse_args(list(args)))
    except PalimpsestError as error:
        print(f"palimpsest fit: {error}", file=sys.stderr)
        code = error.exit_code
    return code, *capsys.readouterr()


def test_the_number_comes_first(capsys):
    code, out, err = run(capsys, *LAYER)
    assert (code, err) == (0, "")
    assert "context:  3,039,552 tokens" in out
    assert "the model itself declares 1,048,576" in out
    assert "binding:  latent_history, 576 B per token of 620.25 in all, per rank" in out
    assert "next GiB: 4,772,608 tokens" in out
    assert "0 B left" in out
    assert max(map(len, out.splitlines())) <= 100
    assert "\N{HORIZONTAL ELLIPSIS}" not in out


def test_a_whole_model_on_eight_devices(capsys):
    code, out, _ = run(capsys, "deepseek-v3.2", "--memory", "96GiB", "--ranks", "8")
    assert code == 0
    assert out.startswith("deepseek-v3.2, whole model: 8 ranks of 96 GiB\n\ncontext:")
    assert "layer#.w.experts_up" in out
    assert "1.0000 of the lower bound" in out


def test_what_cannot_fit_is_shown_with_the_next_step(capsys):
    code, out, _ = run(capsys, "glm-5.2", "--memory", "96GiB", "--ranks", "8")
    assert code == 1
    assert "does not fit" in out
    assert "the smallest set that cannot fit: " in out
    assert "layer#.w.experts_down" in out
    assert "next step: --ranks 16 is enough" in out
    assert max(map(len, out.splitlines())) <= 100


def test_json_is_canonical_and_its_limits_plan_to_its_bytes(capsys):
    code, out, err = run(capsys, "deepseek-v3.2", "--memory", "120GiB", "--ranks", "8", "--rows", "512", "--json")
    assert (code, err) == (0, "")
    tree = json.loads(out)
    assert out == json.dumps(tree, sort_keys=True, separators=(",", ":"), ensure_ascii=False) + "\n"
    found = tree["fit"]
    geometry = load_geometry("deepseek-v3.2")
    plan = place(model_program(geometry, Limits(**found["limits"]), default_formats(geometry)))
    assert plan.digest == found["digest"]
    mapped = Budget(120 << 30).mapped({s.kind: s.nbytes for s in plan.segments})
    assert mapped == found["mapped"] <= 120 << 30
    assert found["lower_bound"] == found["peak"]


def test_rows_or_ranks_are_searched_when_the_context_is_given(capsys):
    _, out, _ = run(capsys, *LAYER, "--context", "1M", "--json")
    rows = json.loads(out)["fit"]
    assert (rows["asked"], rows["limits"]["tokens"], rows["limits"]["rows"]) == ("rows", 1 << 20, 33_686)
    _, out, _ = run(capsys, *LAYER[:5], "--context", "1M", "--json")
    ranks = json.loads(out)["fit"]
    assert (ranks["asked"], ranks["limits"]["ranks"], ranks["limits"]["rows"]) == ("ranks", 4, 4096) or ranks["limits"][
        "ranks"
    ] < 16
    _, out, _ = run(capsys, *LAYER, "--context", "1M", "--rows", "4096", "--json")
    assert json.loads(out)["fit"]["limits"] == {"tokens": 1 << 20, "rows": 4096, "ranks": 16, "page": 64}


def test_weights_and_reserve_change_the_answer(capsys):
    def fit(*more):
        args = ["deepseek-v3.2", "--memory", "180GiB", "--ranks", "8", "--context", "128K", "--rows", "512", "--json"]
        return json.loads(run(capsys, *args, *more)[1])["fit"]

    published, half = fit(), fit("--weights", "bf16")
    assert half["fits"]
    assert half["mapped"] > published["mapped"]
    assert not fit("--weights", "bf16", "--reserve", "100GiB")["fits"]


def test_more_rows_or_a_reserve_leave_a_shorter_context(capsys):
    def tokens(*more):
        return json.loads(run(capsys, *LAYER, "--json", *more)[1])["fit"]["limits"]["tokens"]

    assert tokens("--rows", "8192") < tokens()
    assert tokens("--reserve", "1GiB") < tokens()
    assert tokens("--latent-format", "bf16") < tokens()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["nobody", "--memory", "1GiB"], "nobody"),
        ([*LAYER[:3], "--memory", "lots"], "--memory 'lots' is not a size"),
        ([*LAYER, "--reserve", "2GiB"], "leave something to plan with"),
        ([*LAYER, "--granularity", "3000"], "power of two"),
        ([*LAYER, "--context", "100"], "multiple of the page"),
        ([*LAYER, "--latent-format", "int3"], "latent format 'int3'"),
        ([*LAYER[:2], "1", "--memory", "1GiB"], "linear attention"),
        ([*LAYER[:5], "--ranks", "5"], "power of two"),
        ([*LAYER, "--drafter", "dflash"], "drop --layer"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(capsys, args, words):
    code, out, err = run(capsys, *args)
    assert (code, out) == (2, "")
    assert words in err
    assert err.count("\n") == 1


def test_no_torch_no_numpy():
    code = (
        "import argparse, sys; from palimpsest.cli import fit as verb; p = argparse.ArgumentParser(); verb.add_arguments(p); "
        f"verb.run(p.parse_args({LAYER!r})); bad = [m for m in ('torch', 'numpy') if m in sys.modules]; print('BAD', bad)"
    )
    root = Path(verb.__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True)
    assert done.stdout.endswith("BAD []\n")
