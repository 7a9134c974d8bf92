"""The Python API: lazy, pinned, one word for the verb ``plan`` and its package, and the example that CI runs."""

import subprocess
import sys
from pathlib import Path

import pytest

import palimpsest
from palimpsest import Deployment, Formats, Limits, compare, fit, load_geometry, plan
from palimpsest.core.errors import BadConfig, Unsupported

ROOT = Path(__file__).parents[1]
MIB = 1 << 20
NAMES = ["Deployment", "Formats", "Geometry", "Limits", "Planned", "__version__", "compare", "fit", "load_geometry", "plan"]


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout.strip()


def test_names_are_pinned_and_documented() -> None:
    assert sorted(palimpsest.__all__) == sorted(NAMES)
    assert set(NAMES) <= set(dir(palimpsest))
    assert all(getattr(palimpsest, name).__doc__ for name in NAMES if name != "__version__")
    with pytest.raises(AttributeError, match="no attribute 'nothing'; it has"):
        _ = palimpsest.nothing


def test_importing_the_package_imports_nothing_else() -> None:
    """Deterministic instead of timed: what is not imported costs nothing."""
    code = (
        "import sys; old = set(sys.modules); import palimpsest; print(sorted(m for m in set(sys.modules) - old if '.' not in m))"
    )
    loaded = python(code)
    assert "'palimpsest'" in loaded
    assert not [m for m in ("torch", "numpy", "rich", "plotly", "matplotlib", "dataclasses") if f"'{m}'" in loaded]
    assert python("import sys, palimpsest; print([m for m in sys.modules if m.startswith('palimpsest.')])") == "[]"


def test_planning_imports_neither_torch_nor_numpy() -> None:
    code = (
        "import sys; from palimpsest import *; from palimpsest import Limits, plan, compare, fit\n"
        "p = plan('kimi-k3.1-pro', Limits(1 << 16, 4096, 16)); p.explain(); compare('glm-5', Limits(1 << 16, 4096, 8))\n"
        "fit('kimi-k3.1-pro', '1GiB', ranks=16, whole=False)\n"
        "print([m for m in ('torch', 'numpy', 'plotly', 'matplotlib') if m in sys.modules])"
    )
    assert python(code) == "[]"
    assert python("import numpy;" + code) == "['numpy']"


@pytest.mark.parametrize(
    "first", ["import palimpsest.plan.place", "from palimpsest.plan import check", "import palimpsest", "import palimpsest.api"]
)
def test_plan_is_a_package_and_a_verb_whatever_was_imported_first(first: str) -> None:
    code = (
        f"{first}\nfrom palimpsest import plan, Limits\nimport palimpsest.plan.place as p\n"
        "print(plan('kimi-k3.1-pro', Limits(1 << 16, 4096, 16)).saved, plan.__name__, p.place.__name__)"
    )
    assert python(code) == f"{132 << 16} palimpsest.plan place"


def test_plan_gives_both_arrangements_checked() -> None:
    planned = plan("kimi-k3.1-pro", Limits(1 << 20, 4096, 16))
    assert planned.saved == planned.off.peak - planned.on.peak == planned.bill.saved_logical == 132 * MIB
    assert planned.program.name == "kimi-k3.1-pro/layer3"
    other = plan(planned.geometry, Limits(1 << 20, 4096, 16), Formats(latent="bf16"), layer=7)
    assert other.on.by_name["latent_history"].nbytes == 1152 * MIB
    assert other.program.name.endswith("layer7")


def test_whole_models_are_one_program() -> None:
    planned = plan("deepseek-v3.2", Limits(1 << 17, 2048, 8), whole=True)
    assert planned.program.name == "deepseek-v3.2/model"
    assert planned.explain().reuses


def test_fit_answers_all_three_questions() -> None:
    asked = {"whole": False}
    context = fit("kimi-k3.1-pro", "1GiB", ranks=16, **asked)
    assert context.asked == "context"
    assert plan("kimi-k3.1-pro", context.limits).on.total <= 1 << 30
    assert fit("kimi-k3.1-pro", 1 << 30, ranks=16, context=1 << 18, **asked).asked == "rows"
    assert fit("kimi-k3.1-pro", 1 << 30, context=1 << 18, **asked).asked == "ranks"
    with pytest.raises(BadConfig, match="fit needs ranks"):
        fit("kimi-k3.1-pro", "1GiB")
    with pytest.raises(BadConfig, match="nothing is left to find"):
        fit("kimi-k3.1-pro", "1GiB", ranks=16, context=1 << 18, rows=64)


def test_compare_knows_the_vocabulary_of_the_model() -> None:
    found = {bill.engine: bill for bill in compare("deepseek-v3.2", Limits(1 << 17, 8192, 8), deployment=Deployment())}
    assert list(found) == ["vLLM", "SGLang", "TensorRT-LLM", "lmdeploy", "llama.cpp", "ours"]
    assert found["lmdeploy"].cell("total").nbytes // MIB == 2595


def test_a_layer_without_sparse_attention_is_refused() -> None:
    with pytest.raises(Unsupported, match="linear attention"):
        plan(load_geometry("kimi-k3.1-pro"), Limits(1 << 16, 4096, 16), layer=0)


def test_the_example_runs(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "examples/plan_a_deployment.py"], capture_output=True, text=True, cwd=ROOT, check=True)
    for words in ("93 layers, 24 of them sparse", "both together: 708 -> 576 MiB per rank", "the peak is at sparse_attend",
                  "takes 132 MiB over from index_history: index_select -> selection_barrier -> gather_latent",
                  "vLLM          latent gather:", "2 GiB per rank:"):  # fmt: skip
        assert words in done.stdout
    assert done.stderr == ""
