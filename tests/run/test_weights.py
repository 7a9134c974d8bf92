"""Weights of a rank come from the checkpoint as the recipe cuts them, rounded once; whatever does not fit is refused by name."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import save_file

from palimpsest import recipes
from palimpsest.checkpoint.index import open_checkpoint
from palimpsest.core.errors import BadConfig, RankError
from palimpsest.core.geometry import Formats
from palimpsest.core.spec import Limits
from palimpsest.plan.place import place
from palimpsest.ranks.local import run_local
from palimpsest.recipes.blocks import layer_program
from palimpsest.run.arena import Arena
from palimpsest.run.weights import fill_tables, from_checkpoint, synthetic

FORMATS = Formats(activation="bf16")


@pytest.fixture
def geometry(micro):
    return dataclasses.replace(micro.geometry(), family="deepseek_v32")


def tensors(geometry) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = recipes.attention_tensors(geometry, 0)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def folder(path, held, config=None):
    (path / "config.json").write_text(json.dumps(config or {}))
    save_file(held, path / "model.safetensors")
    return open_checkpoint(path)


def filled(geometry, checkpoint, ranks=2, change=lambda parts: parts, **more):
    """Buffer name -> copy of the weights, for every rank."""
    program = layer_program(geometry, Limits(128, 64, ranks, 16), FORMATS, 0)
    plan = place(program)

    def main(comm):
        arena = Arena(program, plan)
        try:
            slices = lambda rank, size: change(recipes.weight_slices(geometry, 0, rank, size))  # noqa: E731
            from_checkpoint(checkpoint, slices, recipes.tables(geometry), **more)(arena, comm)
            kept = ("weights", "table")
            return {b.name: arena.view(b.name).clone() for b in program.buffers if b.kind in kept}
        finally:
            arena.close()

    return run_local(ranks, main)


def test_each_rank_gets_its_heads(geometry, tmp_path) -> None:
    held = tensors(geometry)
    g, prefix = geometry, recipes.prefixes(geometry)[0] + "layers.0.self_attn."
    found = filled(geometry, folder(tmp_path, held))
    for rank, views in enumerate(found):
        heads = slice(2 * rank, 2 * rank + 2)
        kv = held[prefix + "kv_b_proj.weight"].view(4, g.nope + g.v_dim, g.kv_lora)[heads]
        expected = {
            "w.q_a": held[prefix + "q_a_proj.weight"],
            "w.q_b": held[prefix + "q_b_proj.weight"].view(4, -1, g.q_lora)[heads].reshape(-1, g.q_lora),
            "w.uk": kv[:, : g.nope],
            "w.uv": kv[:, g.nope :],
            "w.o": held[prefix + "o_proj.weight"].view(g.hidden, 4, g.v_dim)[:, heads].reshape(g.hidden, -1),
            "w.index_w": held[prefix + "indexer.weights_proj.weight"],
        }
        for name, value in expected.items():
            assert torch.equal(views[name], value.to(torch.bfloat16)), name  # torch rounds to nearest even
        assert torch.equal(views["inv_freq"], torch.tensor(recipes.tables(geometry)["inv_freq"]))


def test_block_fp8_scales_are_accounted_for(geometry, tmp_path) -> None:
    held, prefix = tensors(geometry), recipes.prefixes(geometry)[0] + "layers.0.self_attn."
    name = prefix + "q_a_proj.weight"
    held[name] = held[name].to(torch.float8_e4m3fn)
    held[name + "_scale_inv"] = torch.full((1, 1), 0.5)
    config = {"quantization_config": {"weight_block_size": [128, 128]}}
    found = filled(geometry, folder(tmp_path, held, config), scope=prefix)
    assert torch.equal(found[0]["w.q_a"], (held[name].float() * 0.5).to(torch.bfloat16))
    other = tmp_path / "unused"
    other.mkdir()
    held[prefix + "o_proj.weight_scale_inv"] = torch.ones(1, 1)
    with pytest.raises(RankError, match=r"BadCheckpoint: 1 scales under .* first .*o_proj.weight_scale_inv"):
        filled(geometry, folder(other, held, config), ranks=1, scope=prefix)


def test_a_wrong_shape_and_a_missing_tensor_are_named(geometry, tmp_path) -> None:
    held, prefix = tensors(geometry), recipes.prefixes(geometry)[0] + "layers.0.self_attn."
    held[prefix + "o_proj.weight"] = torch.zeros(64, 63)
    with pytest.raises(RankError, match=r"BadCheckpoint: .*o_proj.weight has shape \[64, 63\], expected \[64, 64\]"):
        filled(geometry, folder(tmp_path, held), ranks=1)
    del held[prefix + "o_proj.weight"]
    other = tmp_path / "missing"
    other.mkdir()
    with pytest.raises(RankError, match=r"BadCheckpoint: .*o_proj.weight"):
        filled(geometry, folder(other, held), ranks=1)


def test_sources_and_buffers_must_match(geometry, tmp_path) -> None:
    checkpoint = folder(tmp_path, tensors(geometry))

    def without(parts):
        return {name: part for name, part in parts.items() if name != "w.o"}

    with pytest.raises(RankError, match=r"BadConfig: .*weights without a source \['w.o'\]"):
        filled(geometry, checkpoint, ranks=1, change=without)


def test_tables_must_match(geometry) -> None:
    program = layer_program(geometry, Limits(128, 64, 1, 16), FORMATS, 0)
    arena = Arena(program, place(program))
    with pytest.raises(BadConfig, match="inv_freq"):
        fill_tables(arena, {})
    with pytest.raises(BadConfig, match="inv_freq"):
        fill_tables(arena, {"inv_freq": (1.0,) * 7})
    arena.close()


def test_synthetic_weights_are_one_model_on_any_rank_count(geometry) -> None:
    def main(comm):
        program = layer_program(geometry, Limits(128, 64, comm.size, 16), FORMATS, 0)
        arena = Arena(program, place(program))
        synthetic(7, recipes.tables(geometry))(arena, comm)
        views = {b.name: arena.view(b.name).clone() for b in program.buffers if b.kind == "weights"}
        arena.close()
        return views

    (one,) = run_local(1, main)
    four = run_local(4, main)
    for name, whole in one.items():
        axis = {"w.q_b": 0, "w.uk": 0, "w.uv": 0, "w.o": 1}.get(name)
        joined = four[0][name] if axis is None else torch.cat([views[name] for views in four], axis)
        assert torch.equal(joined, whole), name
        assert float(whole.float().std()) > 0
