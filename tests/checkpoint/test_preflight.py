"""Real faults of checkpoint loading, each planted in a good folder: each an error that names the tensor and both values."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from palimpsest.checkpoint import make
from palimpsest.checkpoint.index import INDEX, open_checkpoint
from palimpsest.checkpoint.preflight import PreflightReport, WeightNames, preflight
from palimpsest.cli.preflight import examine
from palimpsest.core.errors import BadCheckpoint

Stored = dict[str, tuple[str, tuple[int, ...], bytes]]
ATTENTION = "model.layers.1.self_attn."
KIMI = "language_model.model.layers."


def change(root: Path, edit: Callable[[Stored], None]) -> None:
    """Rewrite the folder with its tensors changed by ``edit``."""
    checkpoint = open_checkpoint(root)
    stored: Stored = {}
    for name, ref in checkpoint.tensors.items():
        data = (root / ref.file).read_bytes()[ref.begin : ref.end]
        stored[name] = (ref.dtype, ref.shape, data)
    edit(stored)
    for file in checkpoint.files:
        (root / file).unlink()
    (root / INDEX).unlink()
    make.write_safetensors(root / "model.safetensors", stored, {})


def without(beginning: str) -> Callable[[Stored], None]:
    def edit(stored: Stored) -> None:
        for name in [name for name in stored if name.startswith(beginning)]:
            del stored[name]

    return edit


def rename(old: str, new: str) -> Callable[[Stored], None]:
    def edit(stored: Stored) -> None:
        for name in list(stored):
            stored[name.replace(old, new, 1)] = stored.pop(name)

    return edit


def configure(root: Path, **changes: object) -> None:
    path = root / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def configure_text(root: Path, **changes: object) -> None:
    config = json.loads((root / "config.json").read_text())
    configure(root, text_config=config["text_config"] | changes)


def errors(root: Path) -> dict[str, str]:
    report = examine(str(root))
    assert not report.ok
    for finding in report.findings:
        assert "\n" not in str(finding)
        assert finding.step
    return {finding.tensor: str(finding) for finding in report.errors}


@pytest.mark.parametrize("preset", sorted(set(make.PRESETS) - {"k31-pro-layer3"}))
def test_every_preset_is_clean(presets, preset: str) -> None:
    report = examine(str(presets(preset)))
    assert report.ok
    assert report.findings == ()
    assert report.facts["selecting_layers"]
    assert json.dumps(report.to_json())


def test_facts(presets) -> None:
    facts = examine(str(presets("tiny-glm"))).facts
    assert facts["selecting_layers"] == [0, 1, 3]
    assert facts["shared_layers"] == [2]
    assert facts["index_rope"] == "interleaved, first 64 dims"
    facts = examine(str(presets("tiny-dsv32-fp8"))).facts
    assert facts["index_rope"] == "half, first 64 dims"
    assert facts["weight_block"] == [128, 128]
    facts = examine(str(presets("tiny-k31"))).facts
    assert facts["linear_layers"] == [0, 1, 2]
    assert facts["index_rope"] == "none"
    assert facts["index_key_norm"] == "LayerNorm eps 1e-05"
    assert facts["latent_norm"] == "RMSNorm eps 1e-06"
    assert facts["output_gate"] is True


def test_dropped_scale(copy) -> None:
    root = copy("tiny-dsv32-fp8")
    name = f"{ATTENTION}indexer.wk.weight_scale_inv"
    change(root, without(name))
    assert "raw fp8 codes would be used" in errors(root)[name]


def test_scale_that_is_never_used(copy) -> None:
    root = copy("tiny-dsv32")
    name = f"{ATTENTION}indexer.wk.weight_scale_inv"
    change(root, lambda stored: stored.update({name: ("F32", (1, 2), bytes(8))}))
    assert "never used" in errors(root)[name]


def test_scale_without_its_weight(copy) -> None:
    root = copy("tiny-dsv32")
    change(root, lambda stored: stored.update({"model.layers.0.mlp.extra.weight_scale_inv": ("F32", (1, 2), bytes(8))}))
    assert "without its weight" in errors(root)["model.layers.0.mlp.extra.weight_scale_inv"]


@pytest.mark.parametrize(
    ("dtype", "shape", "size"), [("F32", (4, 2), 4), ("F32", (5, 3), 4), ("F32", (10,), 4), ("I32", (5, 2), 4)]
)
def test_scale_of_wrong_shape_or_dtype(copy, dtype: str, shape: tuple[int, ...], size: int) -> None:
    root = copy("tiny-dsv32-fp8")
    name = f"{ATTENTION}kv_a_proj_with_mqa.weight_scale_inv"
    count = 1
    for length in shape:
        count *= length
    change(root, lambda stored: stored.update({name: (dtype, shape, bytes(size * count))}))
    assert ("[5, 2]" in errors(root)[name]) or (dtype in errors(root)[name])


def test_fp8_weight_without_block_size_in_the_config(copy) -> None:
    root = copy("tiny-dsv32-fp8")
    configure(root, quantization_config=None)
    assert any("weight_block_size" in text for text in errors(root).values())


def test_fp8_norm_is_refused(copy) -> None:
    root = copy("tiny-dsv32")
    name = f"{ATTENTION}kv_a_layernorm.weight"
    change(root, lambda stored: stored.update({name: ("F8_E4M3", (512,), bytes(512))}))
    assert "dtype F8_E4M3" in errors(root)[name]


@pytest.mark.parametrize(
    "suffix", ["indexer.wq_b.weight", "indexer.wk.weight", "indexer.weights_proj.weight", "indexer.k_norm.weight"]
)
def test_missing_indexer_tensor(copy, suffix: str) -> None:
    root = copy("tiny-glm")
    change(root, without(ATTENTION + suffix))
    assert "absent" in errors(root)[ATTENTION + suffix]


def test_missing_indexer_of_a_layer(copy) -> None:
    root = copy("tiny-glm")
    change(root, without(f"{ATTENTION}indexer."))
    found = errors(root)
    assert "layers 1 missing" in found["indexer layers"]
    assert f"{ATTENTION}indexer.wk.weight" in found


def test_norm_without_its_bias(copy) -> None:
    root = copy("micro")
    change(root, without(f"{ATTENTION}indexer.k_norm.bias"))
    assert "LayerNorm with bias" in errors(root)[f"{ATTENTION}indexer.k_norm.bias"]


@pytest.mark.parametrize(
    "suffix",
    ["indexer.weights_proj.bias", "q_a_layernorm.bias", "q_b_proj.bias", "o_proj.bias", "q_proj.weight", "g_proj.weight"],
)
def test_tensor_the_recipe_would_ignore(copy, suffix: str) -> None:
    root = copy("micro")
    change(root, lambda stored: stored.update({ATTENTION + suffix: ("BF16", (4,), bytes(8))}))
    assert "present" in errors(root)[ATTENTION + suffix]


def test_harmless_buffer_is_accepted(copy) -> None:
    root = copy("micro")
    change(root, lambda stored: stored.update({f"{ATTENTION}rotary_emb.inv_freq": ("F32", (2,), bytes(8))}))
    assert examine(str(root)).ok


def test_indexer_on_a_shared_layer(copy) -> None:
    root = copy("tiny-glm")
    source, target = "model.layers.1.self_attn.indexer.", "model.layers.2.self_attn.indexer."
    change(
        root,
        lambda stored: stored.update(
            {name.replace(source, target): stored[name] for name in list(stored) if name.startswith(source)}
        ),
    )
    found = errors(root)
    assert "no indexer on shared layer 2" in found[f"{target}wk.weight"]
    assert "layers 2 too many" in found["indexer layers"]


def test_indexer_on_a_linear_layer(copy) -> None:
    root = copy("tiny-k31")
    name = f"{KIMI}1.self_attn.indexer.wk.weight"
    change(root, lambda stored: stored.update({name: ("BF16", (128, 256), bytes(65536))}))
    assert "no indexer on linear layer 1" in errors(root)[name]


def test_shared_schedule_read_as_full(copy) -> None:
    root = copy("tiny-glm")
    configure(root, indexer_types=["full"] * 4)
    assert "layers 2 missing" in errors(root)["indexer layers"]


def test_layer_list_off_by_one(copy) -> None:
    root = copy("tiny-k31")
    linear = json.loads((root / "config.json").read_text())["text_config"]["linear_attn_config"]
    configure_text(root, linear_attn_config=linear | {"full_attn_layers": [3, 4], "kda_layers": [1, 2, 5]})
    assert "off by 1" in errors(root)["indexer layers"]


def test_more_layers_than_weights(copy) -> None:
    root = copy("tiny-dsv32")
    configure(root, num_hidden_layers=4)
    assert "no tensor of layer 3 is there" in errors(root)["model.layers.3.self_attn.q_a_proj.weight"]


@pytest.mark.parametrize(
    ("field", "tensor"), [("index_n_heads", "indexer.wq_b.weight"), ("kv_lora_rank", "kv_a_layernorm.weight")]
)
def test_shape_that_disagrees_with_the_config(copy, field: str, tensor: str) -> None:
    root = copy("micro")
    configure(root, **{field: 3})
    assert "from config.json" in errors(root)[ATTENTION + tensor]


def test_other_published_prefix_is_understood(copy) -> None:
    root = copy("tiny-k31")
    change(root, rename("language_model.model.", "model."))
    assert examine(str(root)).ok


def test_foreign_prefix_is_reported_under_the_published_names(copy) -> None:
    root = copy("micro")
    change(root, rename("model.", "transformer."))
    assert "absent" in errors(root)[f"{ATTENTION}q_a_proj.weight"]


def test_packed_attention_is_named(copy) -> None:
    root = copy("micro")
    name = f"{ATTENTION}q_b_proj.weight"

    def pack(stored: Stored) -> None:
        stored.pop(name)
        stored[f"{ATTENTION}q_b_proj.weight_packed"] = ("U8", (4,), bytes(4))

    change(root, pack)
    assert "stored packed" in errors(root)[name]


def test_shards_that_are_missing_or_short_stop_before_the_report(copy) -> None:
    root = copy("tiny-dsv32")
    shard = sorted(root.glob("*.safetensors"))[1]
    data = shard.read_bytes()
    shard.write_bytes(data[:-300])
    with pytest.raises(BadCheckpoint, match="truncated"):
        examine(str(root))
    shard.unlink()
    with pytest.raises(BadCheckpoint, match="not in the checkpoint folder"):
        examine(str(root))


def test_leftover_files_are_a_warning(copy) -> None:
    root = copy("micro")
    (root / "pytorch_model.bin").write_bytes(b"")
    report = examine(str(root))
    assert report.ok
    assert [finding.level for finding in report.findings] == ["warning"]


def test_schedule_without_a_selecting_layer(presets) -> None:
    from dataclasses import replace

    from palimpsest import recipes

    checkpoint = open_checkpoint(presets("micro"))
    geometry = recipes.geometry_from_config(dict(checkpoint.config), "micro")
    for schedule, says in (
        (("linear", "linear"), "0 layers that select"),
        (("shared", "full"), "layer 0 is shared"),
        (("full",), "1 entries"),
    ):
        changed = replace(geometry, schedule=schedule, layers=2)
        report: PreflightReport = preflight(checkpoint, changed, WeightNames({}, {}))
        assert any(says in str(finding) for finding in report.errors)
