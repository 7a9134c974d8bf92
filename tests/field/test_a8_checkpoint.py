"""Field cases A8: checkpoints that load and are wrong. Each fault is planted in a good folder."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from palimpsest.checkpoint import make as making
from palimpsest.checkpoint.index import INDEX, open_checkpoint
from palimpsest.checkpoint.load import Reader
from palimpsest.checkpoint.preflight import PreflightReport
from palimpsest.cli.preflight import examine
from palimpsest.core.errors import BadCheckpoint, UserError
from palimpsest.recipes import load_geometry

Stored = dict[str, tuple[str, tuple[int, ...], bytes]]
WK = "model.layers.1.self_attn.indexer.wk.weight"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory):
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = making.make(name, tmp_path_factory.mktemp("good") / name)
        return made[name]

    return folder


@pytest.fixture
def damaged(good, tmp_path: Path):
    """A private copy of a preset whose tensors and config were edited."""

    def folder(name: str, tensors: Callable[[Stored], object] | None = None, **config: object) -> Path:
        root = Path(shutil.copytree(good(name), tmp_path / f"{name}-{len(list(tmp_path.iterdir()))}"))
        if config:
            path = root / "config.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | config))
        if tensors:
            checkpoint = open_checkpoint(root)
            stored: Stored = {
                n: (ref.dtype, ref.shape, (root / ref.file).read_bytes()[ref.begin : ref.end])
                for n, ref in checkpoint.tensors.items()
            }
            tensors(stored)
            for file in checkpoint.files:
                (root / file).unlink()
            (root / INDEX).unlink(missing_ok=True)
            making.write_safetensors(root / "model.safetensors", stored, {})
        return root

    return folder


def errors(root: Path) -> str:
    report = examine(str(root))
    assert isinstance(report, PreflightReport)
    assert not report.ok
    return "\n".join(map(str, report.errors))


def read(root: Path, name: str) -> torch.Tensor:
    with Reader(open_checkpoint(root)) as reader:
        return reader.read(name).clone()


def test_8_01_an_fp8_weight_has_its_scale_and_every_scale_is_used(good, damaged) -> None:
    """Dropped, unused and applied: the value read is code x scale, and twice the scale is twice the value."""
    name = next(n for n in open_checkpoint(good("tiny-dsv32-fp8")).tensors if n.endswith("indexer.wk.weight"))
    scale = f"{name}_scale_inv"
    assert name in errors(damaged("tiny-dsv32-fp8", lambda stored: stored.pop(scale)))

    def double(stored: Stored) -> None:
        dtype, shape, data = stored[scale]
        assert dtype == "F32"
        stored[scale] = (dtype, shape, (2 * torch.frombuffer(bytearray(data), dtype=torch.float32)).numpy().tobytes())

    one, two = read(good("tiny-dsv32-fp8"), name), read(damaged("tiny-dsv32-fp8", double), name)
    assert one.any()
    assert torch.equal(2 * one.double(), two.double())

    def leftover(stored: Stored) -> None:
        _, shape, data = stored[name]
        stored[name] = ("BF16", shape, bytes(2 * len(data)))

    assert scale in errors(damaged("tiny-dsv32-fp8", leftover))


def test_8_02_wk_may_be_fp8_with_a_scale_or_bf16_without(damaged) -> None:
    """Both spellings load as they are; the mixtures are refused (fp8 without block sizes, bf16 with a scale)."""

    def plain(stored: Stored) -> None:
        for name in [n for n in stored if n.endswith("indexer.wk.weight")]:
            shape = stored[name][1]
            stored[name] = ("BF16", shape, bytes(2 * shape[0] * shape[1]))
            del stored[f"{name}_scale_inv"]

    assert examine(str(damaged("tiny-dsv32-fp8", plain))).ok
    with pytest.raises(UserError, match="weight_block_size"):
        examine(str(damaged("tiny-dsv32-fp8", quantization_config={"quant_method": "fp8"})))
    assert WK in errors(damaged("tiny-dsv32-fp8", quantization_config=None))


def test_8_04_the_schedule_is_read_and_compared_with_the_tensors(good, damaged) -> None:
    """A shared layer read as full, an indexer on a shared layer, a full one without: each named by layer."""
    assert examine(str(good("tiny-glm"))).facts["selecting_layers"] == [0, 1, 3]
    assert "layers.2." in errors(damaged("tiny-glm", indexer_types=["full"] * 4))

    def extra(stored: Stored) -> None:
        for name in [n for n in stored if ".layers.1." in n and ".indexer." in n]:
            stored[name.replace(".layers.1.", ".layers.2.")] = stored[name]

    assert "layers.2." in errors(damaged("tiny-glm", extra))

    def missing(stored: Stored) -> None:
        for name in [n for n in stored if ".layers.3." in n and ".indexer." in n]:
            del stored[name]

    assert "layers.3." in errors(damaged("tiny-glm", missing))


@pytest.mark.parametrize("letters", ["SSSS", "FFS", "FFFFF", "FDFF"])
def test_8_04_impossible_schedules_are_refused(damaged, letters: str) -> None:
    """[S,...] selects nothing, a list off by one has no meaning, an unknown kind either."""
    value = [{"F": "full", "S": "shared", "D": "dense"}[letter] for letter in letters]
    with pytest.raises(UserError, match="indexer_types"):
        examine(str(damaged("tiny-glm", indexer_types=value)))


@pytest.mark.parametrize("layers", [[4], [5, 4], [4, 4], [0, 4], [4, 6]])
def test_8_04_one_indexed_layer_lists_must_fit(damaged, good, layers: list[int]) -> None:
    """The 1-based list of full-attention layers: one missing, out of order or twice, numbered from 0, beyond the last."""
    config = json.loads((good("tiny-k31") / "config.json").read_text())
    text = config["text_config"]
    assert text["linear_attn_config"]["full_attn_layers"] == [4, 5]
    changed = text | {"linear_attn_config": text["linear_attn_config"] | {"full_attn_layers": layers}}
    root = damaged("tiny-k31", text_config=changed)
    try:
        refused = not examine(str(root)).ok
    except UserError as error:
        refused = "layer" in str(error)
    assert refused or layers == [5, 4]


def test_8_04_the_norms_epsilon_and_kind_reach_the_kernel(m0) -> None:
    """1e-5 for 1e-6 changes bytes, and so does the missing bias of a LayerNorm: neither is a detail."""

    def eps(value: float):
        made = m0.geometry()
        return dataclasses.replace(made, indexer=dataclasses.replace(made.indexer, norm_eps=value))

    step = next(s for s in m0.program(eps(1e-5)).steps if s.name == "append_index")
    assert dict(step.params)["eps"] == 1e-5
    scores = []
    for value in (1e-6, 1e-1):
        found = m0.Scores()
        m0.run(lambda s, found=found: m0.whole(s, (16,), before=found.begin, hooks=found.hooks), made=eps(value), formats=m0.FP32)
        scores.append(found.rows[15])
    assert (scores[0] != scores[1]).any()

    def unbiased(session):
        session.arena.view("w.index_k_norm_bias").zero_()
        found = m0.Scores()
        m0.whole(session, (16,), before=found.begin, hooks=found.hooks)
        return found.rows[15]

    assert (m0.run(unbiased, made=eps(1e-6), formats=m0.FP32)[0] != scores[0]).any()


def test_8_04_a_norm_without_its_bias_is_refused(damaged) -> None:
    bias = "model.layers.1.self_attn.indexer.k_norm.bias"
    assert bias in errors(damaged("tiny-dsv32", lambda stored: stored.pop(bias)))


def test_8_05_the_rope_layout_of_the_indexer_is_the_familys(m0) -> None:
    """V3.2 pairs halves, GLM pairs neighbours; swapped, selections change above top-k and not one byte below it."""
    assert load_geometry("deepseek-v3.2").indexer.rope_layout == "half"
    assert load_geometry("glm-5.2").indexer.rope_layout == "interleaved"
    made = m0.geometry()
    swapped = dataclasses.replace(made, indexer=dataclasses.replace(made.indexer, rope_layout="interleaved"))
    one, two = m0.outcome(made=made), m0.outcome(made=swapped)
    assert m0.same(one.output[:8], two.output[:8])
    assert sum(a != b for a, b in zip(one.sets()[8:], two.sets()[8:], strict=True)) > 8


def test_8_07_a_shard_that_is_named_and_missing(damaged) -> None:
    root = damaged("tiny-dsv32")
    shard = sorted(root.glob("*.safetensors"))[-1]
    shard.unlink()
    with pytest.raises(BadCheckpoint, match=shard.name):
        open_checkpoint(root)


@pytest.mark.parametrize("cut", [1, 7, 4096])
def test_8_08_a_shard_that_is_short(damaged, cut: int) -> None:
    """The end of the file against the end the header declares, for every shard, before a single tensor is read."""
    root = damaged("tiny-dsv32")
    for shard in sorted(root.glob("*.safetensors")):
        whole = shard.read_bytes()
        shard.write_bytes(whole[:-cut])
        with pytest.raises(BadCheckpoint, match=f"{len(whole) - cut} bytes, its header describes {len(whole)}"):
            open_checkpoint(root)
        shard.write_bytes(whole + bytes(cut))
        with pytest.raises(BadCheckpoint, match="bytes no tensor owns"):
            open_checkpoint(root)
        shard.write_bytes(whole)


def test_8_10_biases_are_wanted_where_they_exist_and_refused_where_nobody_applies_them(good, damaged) -> None:
    """No published checkpoint has weights_proj.bias: none is expected; one that is there would be ignored, so it is an error."""
    names = open_checkpoint(good("tiny-dsv32")).tensors
    assert not [n for n in names if n.endswith("weights_proj.bias")]
    assert examine(str(good("tiny-dsv32"))).ok
    bias = "model.layers.1.self_attn.indexer.weights_proj.bias"
    assert bias in errors(damaged("tiny-dsv32", lambda stored: stored.__setitem__(bias, ("BF16", (32,), bytes(64)))))


def test_8_11_a_model_that_would_run_dense_is_refused(good, damaged) -> None:
    """The report says which layers select; a configuration without an indexer, or with an unknown architecture, does not load."""
    assert examine(str(good("tiny-k31"))).facts["selecting_layers"] == [3, 4]
    with pytest.raises(UserError, match="dense"):
        examine(str(damaged("tiny-dsv32", index_n_heads=None)))
    with pytest.raises(UserError):
        examine(str(damaged("tiny-dsv32", model_type="llama", architectures=["LlamaForCausalLM"])))
