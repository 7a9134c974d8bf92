"""Built-in configurations: every geometry field, the layer schedules, the program digests and the plans they lead to."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from palimpsest import recipes
from palimpsest.core.errors import BadCheckpoint, BadConfig, UnknownName, Unsupported
from palimpsest.core.geometry import Formats, latent_record_bytes
from palimpsest.core.spec import Limits
from palimpsest.plan.check import check
from palimpsest.plan.place import place

PRESETS = ("deepseek-v3.2", "glm-5", "glm-5.1", "glm-5.2", "kimi-k3.1-pro")
GOLDEN = Path(__file__).parents[1] / "golden"


def _regenerate():
    spec = importlib.util.spec_from_file_location("regenerate", GOLDEN / "regenerate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_presets_are_these_five():
    assert recipes.presets() == PRESETS


@pytest.mark.parametrize("name", PRESETS)
def test_geometry_and_program_match_the_golden(name):
    assert _regenerate().text(name) == (GOLDEN / f"recipe-{name}.json").read_text("utf-8")


@pytest.mark.parametrize("name", PRESETS)
def test_whole_model_totals_match_the_golden(name):
    assert _regenerate().model_text(name) == (GOLDEN / f"model-{name}.json").read_text("utf-8")


def test_kimi_k31_numbers_of_the_model_page():
    g = recipes.load_geometry("kimi-k3.1-pro")
    assert (g.hidden, g.layers, g.heads, g.q_lora, g.kv_lora, g.nope, g.rope.dims, g.v_dim) == (
        7168,
        93,
        96,
        1536,
        512,
        128,
        64,
        128,
    )
    assert g.full_layers == (*range(3, 92, 4), 92)
    assert g.full_layers == g.sparse_layers
    assert len(g.full_layers) == 24
    assert g.softmax_scale == 192**-0.5
    assert (g.output_gate, g.latent_norm_eps, g.latent_format, g.max_context) == (True, 1e-6, "fp8", 1 << 20)
    ix = g.indexer
    assert (ix.heads, ix.dim, ix.topk, ix.rope_layout, ix.rope_dims, ix.norm_eps) == (32, 128, 2048, "none", 0, 1e-5)
    assert (ix.hadamard, ix.scale_format) == (False, "ue8m0")
    assert latent_record_bytes(g, recipes.default_formats(g)) == 576
    assert recipes.tables(g) == {}


def test_deepseek_v32_numbers_of_the_model_page():
    g = recipes.load_geometry("deepseek-v3.2")
    assert (g.hidden, g.layers, g.heads, g.q_lora, g.kv_lora, g.nope, g.rope.dims, g.v_dim) == (
        7168,
        61,
        128,
        1536,
        512,
        128,
        64,
        128,
    )
    assert g.schedule == ("full",) * 61
    assert round(g.softmax_scale, 7) == 0.1352338
    assert (g.rope.layout, g.indexer.rope_layout, g.indexer.heads, g.indexer.norm_eps) == ("interleaved", "half", 64, 1e-6)
    assert (g.block_fp8, g.latent_format, g.output_gate) == ((128, 128), "fp8_ds_mla", False)
    assert latent_record_bytes(g, recipes.default_formats(g)) == 656


def test_glm_52_shares_indexers():
    g = recipes.load_geometry("glm-5.2")
    assert g.full_layers == (0, 1, 2, *range(6, 75, 4))
    assert (len(g.full_layers), g.schedule.count("shared")) == (21, 57)
    assert (g.hidden, g.heads, g.q_lora, g.nope, g.v_dim, g.softmax_scale) == (6144, 64, 2048, 192, 256, 0.0625)
    assert (g.rope.theta, g.rope.layout, g.indexer.rope_layout, g.indexer.norm_eps) == (8e6, "interleaved", "interleaved", 1e-6)


def test_glm_5_and_51_run_every_indexer_and_agree():
    a, b = recipes.load_geometry("glm-5"), recipes.load_geometry("glm-5.1")
    assert a.schedule == ("full",) * 78
    assert {**vars(a), "name": ""} == {**vars(b), "name": ""}


@pytest.mark.parametrize("name", PRESETS)
def test_only_full_layers_have_an_index_cache(name):
    g = recipes.load_geometry(name)
    limits, formats = Limits(4096, 256, 8), recipes.default_formats(g)
    for layer, kind in enumerate(g.schedule):
        if kind == "linear":
            with pytest.raises(Unsupported, match=f"layer {layer} of {name} is linear attention"):
                recipes.program(g, limits, formats, layer)
            continue
        program = recipes.program(g, limits, formats, layer)
        index = {buffer.name for buffer in program.buffers if "index" in buffer.name}
        assert ("index_cache" in index, "index_history" in index) == (kind == "full",) * 2
        assert bool(index) == (kind == "full")
        assert program.inputs == (() if kind == "full" else ("ids", "counts"))


@pytest.mark.parametrize("name", PRESETS)
def test_a_full_and_a_shared_layer_can_be_planned(name):
    g = recipes.load_geometry(name)
    limits = Limits(min(g.max_context // 64 * 64, 1 << 20), 4096, 16)
    for kind in sorted(set(g.schedule) - {"linear"}):
        program = recipes.program(g, limits, recipes.default_formats(g), g.schedule.index(kind))
        plan = place(program)
        check(program, plan)


@pytest.mark.parametrize("latent", ["fp8", "fp8_ds_mla", "bf16", "fp32"])
@pytest.mark.parametrize("index", ["fp8", "fp32"])
def test_every_record_format_makes_a_program(latent, index):
    for name in PRESETS:
        g = recipes.load_geometry(name)
        program = recipes.program(g, Limits(4096, 64, 4), Formats(index=index, latent=latent), g.full_layers[0])
        facts = dict(program.facts)
        assert facts["index_record_bytes"] == {"fp8": 132, "fp32": 512}[index]
        assert facts["latent_record_bytes"] == {"fp8": 576, "fp8_ds_mla": 656, "bf16": 1152, "fp32": 2304}[latent]


def test_recipes_import_neither_torch_nor_numpy():
    code = (
        "import sys; from palimpsest import recipes; from palimpsest.core.spec import Limits\n"
        "for name in recipes.presets():\n"
        "    g = recipes.load_geometry(name)\n"
        "    recipes.program(g, Limits(4096, 64, 4), recipes.default_formats(g), g.full_layers[0])\n"
        "    recipes.weight_slices(g, g.full_layers[0], 0, 4); recipes.tables(g)\n"
        "print([m for m in ('torch', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_load_geometry_reads_a_file_and_a_folder(tmp_path):
    preset = json.loads((Path(recipes.__file__).parent / "presets" / "glm-5.2.json").read_text("utf-8"))
    folder = tmp_path / "my-glm"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(preset), "utf-8")
    other = tmp_path / "other.json"
    other.write_text(json.dumps(preset), "utf-8")
    wanted = vars(recipes.load_geometry("glm-5.2"))
    assert vars(recipes.load_geometry(str(folder))) == {**wanted, "name": "my-glm"}
    assert vars(recipes.load_geometry(str(folder / "config.json"))) == {**wanted, "name": "my-glm"}
    assert vars(recipes.load_geometry(str(other))) == {**wanted, "name": "other"}


def test_load_geometry_says_what_it_could_not_find(tmp_path):
    with pytest.raises(UnknownName, match=r"'glm-6'; known: deepseek-v3.2, glm-5, glm-5.1, glm-5.2, kimi-k3.1-pro"):
        recipes.load_geometry("glm-6")
    with pytest.raises(BadConfig, match=r"no such file or folder: '\./nowhere/config\.json'"):
        recipes.load_geometry("./nowhere/config.json")
    with pytest.raises(BadCheckpoint, match=r"has no config\.json"):
        recipes.load_geometry(str(tmp_path))
    (tmp_path / "config.json").write_text('{"a": 1, "a": 2}', "utf-8")
    with pytest.raises(BadConfig):
        recipes.load_geometry(str(tmp_path))
