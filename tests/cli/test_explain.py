"""``palimpsest explain``: the text, the JSON form, refusals, and a start without torch or numpy."""

import argparse
import json
import subprocess
import sys

import pytest

from palimpsest.cli import explain as verb
from palimpsest.core.errors import PalimpsestError

K31 = ["kimi-k3.1-pro", "--context", "1M", "--ranks", "16"]


def run(capsys, *args):
    parser = argparse.ArgumentParser()
    verb.add_arguments(parser)
    try:
        code = verb.run(parser.parse_args(list(args)))
    except PalimpsestError as error:
        print(error, file=sys.stderr)
        code = error.exit_code
    return code, *capsys.readouterr()


def test_text_says_why(capsys):
    code, out, err = run(capsys, *K31)
    assert (code, err) == (0, "")
    assert "because sparse_attend (p7) needs" in out
    assert "No placement can be smaller" in out
    assert "latent_history         603,979,776" in out
    assert "132 MiB  latent_history on index_history, bytes [0, 138,412,032)" in out
    assert "index_select -> selection_barrier -> gather_latent" in out
    assert "Sharing the histories saves 138,412,032 B" in out


def test_json_is_canonical_and_adds_up(capsys):
    code, out, err = run(capsys, *K31, "--json")
    assert (code, err) == (0, "")
    tree = json.loads(out)
    assert out == json.dumps(tree, sort_keys=True, separators=(",", ":"), ensure_ascii=False) + "\n"
    assert tree["format"] == verb.FORMAT
    for found in (tree["on"], tree["off"]):
        assert sum(r["saved"] for r in found["reuses"]) == found["saved"]
        assert found["slots"] - found["saved"] + found["idle"] == found["peak"]
    assert tree["off"]["peak"] - tree["on"]["peak"] == 138_412_032


@pytest.mark.parametrize(("args", "words"), [(["nope"], "unknown model"), (["glm-5", "--ranks", "3"], "3 ranks"),
                                             (["glm-5", "--context", "many"], "--context 'many'")])  # fmt: skip
def test_bad_input_is_one_line_and_exit_code_2(capsys, args, words):
    code, out, err = run(capsys, *args)
    assert (code, out) == (2, "")
    assert words in err
    assert err.count("\n") == 1


def test_no_torch_no_numpy():
    code = (
        "import argparse, sys; from palimpsest.cli import explain; p = argparse.ArgumentParser(); explain.add_arguments(p); "
        "explain.run(p.parse_args(sys.argv[1:])); print('LOADED', sorted({'torch', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, *K31], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("LOADED []\n")
