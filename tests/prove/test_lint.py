"""Gate V5's lint: the qualifier is clean, and the lint can fail."""

from pathlib import Path

import pytest

from palimpsest.prove import lint


def test_the_qualifier_holds_no_tolerance():
    root = Path(lint.__file__).parent
    count, found = lint.lint_package(root)
    assert count >= 7
    assert not found, "\n".join(map(str, found))


@pytest.mark.parametrize(
    ("text", "finding"),
    [
        ("import numpy as np\nok = np.allclose(a, b)\n", "allclose"),
        ("from torch.testing import assert_close\n", "assert_close"),
        ("from math import isclose as near\n", "isclose"),
        ("check(a, b, atol=x)\n", "atol"),
        ("def check(a, rtol): ...\n", "rtol"),
        ("f = getattr(np, 'allclose')\n", "allclose"),
        ("assert got == pytest.approx(want)\n", "approx"),
        ("bad = error > 1e-5\n", "literal in a comparison"),
        ("bad = error > 3 * -0.5 * u\n", "literal in a comparison"),
        ("bad = 0.0 < x <= y\n", "literal in a comparison"),
        ("bad = [e for e in es if not e <= 2.0**-24]\n", "literal in a comparison"),
        ("bad = error > 2**-20\n", "literal in a comparison"),
        ("bad = error > 1 / 1000\n", "literal in a comparison"),
        ("EPS = 1e-5\nbad = error > 4 * EPS\n", "'EPS' is a literal"),
        ("def f(x, limit=0.25):\n    return x < limit\n", "'limit' is a literal"),
        ("def f(x, *, limit: float = -0.25):\n    return x < limit\n", "'limit' is a literal"),
        ("class A:\n    slack: float = 3e-3\n\nbad = x > a.slack\n", "'slack' is a literal"),
    ],
)
def test_planted_violations_are_found(text, finding):
    found = lint.lint_source(text, "planted.py")
    assert found, text
    assert any(finding in str(f) for f in found)
    assert str(found[0]).startswith("planted.py:")


def test_a_planted_file_fails_the_package(tmp_path):
    (tmp_path / "gate.py").write_text('"""allclose in words is fine."""\nU = 2.0**-24\nok = diff <= bound * U and n > 2\n')
    assert lint.lint_package(tmp_path) == (1, [])
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "bad.py").write_text("\n\nok = diff <= 1e-3\n")
    count, found = lint.lint_package(tmp_path)
    assert count == 2
    assert [str(f) for f in found] == ["deep/bad.py:3: fraction literal in a comparison"]
